"""Tools that others wrote, unmodified: curl and `vllm bench serve`. Libraries: `test_client_libraries.py`."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.cluster.test_clients import ANSWER, QUESTION

VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What the command `vllm bench serve` runs, without the imports of its other commands."""


def needs(module):
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed here")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed here")
def test_curl_shows_the_pieces_of_a_stream(cluster):
    body = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 30, "stream": True}
    command = ["curl", "-sN", f"{cluster.url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    done = subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *events, last = done.stdout.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER
    assert len(deltas) > 5


@pytest.mark.full
@pytest.mark.timeout(400)
@needs("vllm")
@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllm_bench_serve_measures_us(cluster, smollm2, tmp_path, backend, endpoint):
    command = [sys.executable, "-c", VLLM_BENCH_SERVE, "--backend", backend, "--base-url", cluster.url]
    command += ["--endpoint", endpoint, "--model", "smollm2", "--tokenizer", smollm2.path, "--ignore-eos"]
    command += ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "8"]
    command += ["--num-prompts", "6", "--request-rate", "4", "--goodput", "ttft:60000"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "figures.json"]
    done = subprocess.run(
        command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["completed"], figures["failed"]) == (6, 0)
    assert figures["total_output_tokens"] == 6 * 8
    assert figures["request_goodput"] > 0
    assert figures["mean_ttft_ms"] > 0
    assert figures["mean_itl_ms"] > 0
