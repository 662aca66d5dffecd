"""The commands of the documents that look at a running cluster, at one that runs."""

import json

import httpx
import pytest

from deploy import cli
from deploy.targets import write_targets
from tests.cluster.asking import held_blocks, until


@pytest.fixture
def config_file(cluster, tmp_path):
    """As `conductor up` leaves it: cluster.yaml, and where the processes' metrics are."""
    ready = {name: told for name, told in cluster.ready.items() if name != "conductor"}
    write_targets(str(tmp_path), "tested", {"conductor": f"127.0.0.1:{cluster.http_port}"}, ready)
    file = tmp_path / "cluster.yaml"
    file.write_text(f"cache_dir: {tmp_path}\n")
    return str(file)


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    told = capsys.readouterr()
    assert not ended.value.code, told.out + told.err
    return told.out


@pytest.mark.full
def test_the_doctor_of_a_healthy_cluster_measures_its_links_and_has_nothing_to_mend(
    cluster, config_file, capsys
):
    address = f"127.0.0.1:{cluster.http_port}"
    findings = json.loads(run(capsys, "doctor", "-c", config_file, "--address", address, "--json"))
    told = [finding["what"] for finding in findings]
    assert "the cluster is ready, with 2 nodes" in told
    assert any(what.startswith("prefill-0 - decode-0: shm") for what in told), told
    assert any(what.startswith("clocks agree") for what in told), told
    assert any(what.startswith("all processes have torch") for what in told), told
    assert not [finding for finding in findings if finding["level"] == "wrong"]
    until(lambda: held_blocks(cluster) == 0)


@pytest.mark.full
def test_no_log_has_a_prompt_or_an_answer(cluster):
    secret = "Xylophones quarrel"
    body = {"model": "smollm2", "prompt": secret, "max_tokens": 200, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
        answer = next(response.iter_text())  # and the client leaves
    assert answer
    refused = httpx.post(f"{cluster.url}/v1/completions", json={**body, "max_tokens": -1}, timeout=60)
    assert refused.status_code == 400
    until(lambda: held_blocks(cluster) == 0)
    logs = {name: process.log_path.read_text() for name, process in cluster.processes.items()}
    assert all(logs.values())
    assert not [name for name, log in logs.items() if "Xylophones" in log]


@pytest.mark.full
def test_what_runs_can_be_looked_at_asked_and_measured(cluster, capsys):
    address = f"127.0.0.1:{cluster.http_port}"
    assert "prefill-0" in run(capsys, "status", "--address", address)
    assert "decode-0" in run(capsys, "top", "--address", address, "--times", "1")
    figures = json.loads(
        run(
            capsys,
            "bench",
            "--url",
            cluster.url,
            "--rate",
            "5",
            "--requests",
            "4",
            "--output-tokens",
            "4",
            "--json",
        )
    )
    assert figures["completed"] == 4
