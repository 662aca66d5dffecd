"""`python -m bench.handoff`: from prefill's last layer to the first decode step, by prompt length.

A prefill node and a decode node, each a real process with a GPU of its own (or both on one:
`--shared-gpu`), and one request at a time. Reported for each length, as medians:

    compute    the prompt's steps on the prefill node
    exposed    from the end of the last step to the acknowledgement of the last write
    gap        from the first token (prefill's) to the second (decode's), at the client
    step       between the decode node's later tokens
    hand-off   exposed + gap - step: what disaggregation adds before the first decode step

Then the same prompts go through one engine in this process, and greedy tokens are compared.

    python -m bench.handoff --out bench/results/handoff.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc

from base.clock import SystemClock
from base.config import EngineConfig
from base.metrics import samples_of
from base.request import RequestId, StopParams
from bench.about_run import write_result
from bench.engine_work import GREEDY, ROOT, run_to_end, stepping
from bench.local_cluster import LocalCluster
from bench.shapes import about, limits_of, model_config, options_parser, parse_shape, running, write_model
from deploy.api_client import read_text
from engine.build import build_engine
from engine.sequence import Sequence
from protos import inference_pb2
from protos.inference_pb2_grpc import InferenceStub

NEW_TOKENS = 24
PARTS = ("queue", "prefill", "exposed_transfer", "dispatch")
TIMEOUT_S = 120.0
MAX_MESSAGE = [("grpc.max_receive_message_length", 64 << 20)]


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer: its tokens, when each came after the request was sent, and the node's own times."""

    token_ids: list[int]
    at_s: list[float]
    parts_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one prompt length, milliseconds."""

    prompt_tokens: int
    repeats: int
    ttft_ms: float
    compute_ms: float
    exposed_ms: float
    gap_ms: float
    step_ms: float
    handoff_ms: float
    worst_handoff_ms: float
    exposed_share: float
    """Exposed transfer as a share of the compute."""


def ask(cluster: LocalCluster, token_ids: list[int], new_tokens: int) -> Asked:
    """Ask for a greedy answer of exactly `new_tokens`; nothing else may run meanwhile."""
    before = _parts(cluster)
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=token_ids),
        sampling=inference_pb2.Sampling(temperature=0.0),
        stop=inference_pb2.Stop(max_tokens=new_tokens, ignore_eos=True),
    )
    tokens: list[int] = []
    at_s: list[float] = []
    with grpc.insecure_channel(cluster.grpc_address, options=MAX_MESSAGE) as channel:
        stub: Any = InferenceStub(channel)
        grpc.channel_ready_future(channel).result(timeout=TIMEOUT_S)
        sent_at_s = time.perf_counter()
        for response in stub.Generate(request, timeout=TIMEOUT_S):
            now_s = time.perf_counter() - sent_at_s
            tokens += response.token_ids
            at_s += [now_s] * len(response.token_ids)
    after = _parts(cluster)
    return Asked(tokens, at_s, {name: after[name] - before[name] for name in PARTS})


def _parts(cluster: LocalCluster) -> dict[str, float]:
    found = dict.fromkeys(PARTS, 0.0)
    for name, labels, seconds in samples_of(read_text(f"127.0.0.1:{cluster.http_port}", "/metrics")):
        if name == "conductor_ttft_part_seconds_sum":
            found[labels["part"]] = seconds
    return found


def measure(cluster: LocalCluster, length: int, repeats: int, vocab_size: int, rng: random.Random) -> Row:
    """Return a row; the first request of a length warms up and is not counted."""
    asked = [ask(cluster, _prompt(length, vocab_size, rng), NEW_TOKENS) for _ in range(repeats + 1)][1:]
    steps = [statistics.median(b - a for a, b in pairwise(item.at_s[2:])) for item in asked]
    exposed = [item.parts_s["exposed_transfer"] for item in asked]
    gaps = [item.at_s[1] - item.at_s[0] for item in asked]
    handoffs = [a + b - c for a, b, c in zip(exposed, gaps, steps, strict=True)]
    compute_s = statistics.median(item.parts_s["prefill"] for item in asked)
    return Row(
        prompt_tokens=length,
        repeats=repeats,
        ttft_ms=1e3 * statistics.median(item.at_s[0] for item in asked),
        compute_ms=1e3 * compute_s,
        exposed_ms=1e3 * statistics.median(exposed),
        gap_ms=1e3 * statistics.median(gaps),
        step_ms=1e3 * statistics.median(steps),
        handoff_ms=1e3 * statistics.median(handoffs),
        worst_handoff_ms=1e3 * max(handoffs),
        exposed_share=statistics.median(exposed) / compute_s,
    )


def _prompt(length: int, vocab_size: int, rng: random.Random) -> list[int]:
    return rng.choices(range(vocab_size), k=length)


def agreement(found: list[list[int]], expected: list[list[int]]) -> dict[str, float]:
    """Return the share of equal answers, and of tokens before the first difference."""
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(found, expected, strict=True)
    ]
    return {
        "answers": len(found),
        "equal_answers": sum(count == len(x) for count, x in zip(same, found, strict=True)) / len(found),
        "equal_tokens": sum(same) / sum(map(len, found)),
    }


async def alone(
    model: str, config: EngineConfig, prompts: list[list[int]], new_tokens: int
) -> list[list[int]]:
    """Return what one engine in this process answers, one prompt after another."""
    with tempfile.TemporaryDirectory() as folder:
        prepared = write_model(model, Path(folder))
        engine = await asyncio.to_thread(build_engine, config, prepared.path, SystemClock())
    answers = []
    async with stepping(engine.loop):
        for index, prompt in enumerate(prompts):
            name, stop = RequestId(str(index)), StopParams(new_tokens)
            sequence = Sequence(name, list(prompt), len(prompt), ROOT, GREEDY, stop)
            await run_to_end(engine.loop, [sequence])
            answers.append(sequence.token_ids[len(prompt) :])
    return answers


def make_parser() -> argparse.ArgumentParser:
    parser = options_parser(__doc__, max_model_len=0)
    add = parser.add_argument
    add("--shape", default="1p1d")
    add("--lengths", default="512,2048,8192,16384,32768")
    add("--repeats", type=int, default=5)
    add("--chunk-tokens", type=int, default=4096)
    add("--same-prompts", type=int, default=12, help="compared with one engine")
    add("--same-tokens", type=int, default=64, help="of each")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    rng = random.Random(0)
    shape = parse_shape(f"{options.shape}@{options.chunk_tokens}")
    report: dict[str, Any] = {"model": options.model, "shape": shape.name, **about(options.commit)}
    vocab_size = model_config(options.model).vocab_size
    lengths = [int(length) for length in options.lengths.split(",")]
    prompts = [
        _prompt(1 + max(lengths) // 4 * index // options.same_prompts, vocab_size, rng)
        for index in range(options.same_prompts)
    ]
    with running(options.model, shape, limits_of(options), options.logs) as cluster:
        rows = []
        for length in lengths:
            rows.append(asdict(measure(cluster, length, options.repeats, vocab_size, rng)))
            print(json.dumps(rows[-1]), flush=True)
        report["rows"] = rows
        found = [ask(cluster, prompt, options.same_tokens).token_ids for prompt in prompts]
    if prompts:
        engine = limits_of(options).engine(shape.chunk_tokens, options.max_batch)
        expected = asyncio.run(alone(options.model, engine, prompts, options.same_tokens))
        report["same_tokens"] = agreement(found, expected)
        print(json.dumps(report["same_tokens"]), flush=True)
    write_result(options.out, report)


if __name__ == "__main__":
    main()
