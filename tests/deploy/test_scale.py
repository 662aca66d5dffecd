"""`conductor scale` and `conductor restart` on a real local Ray, with stubs for our processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.processes import ROOT, marked_environment, marked_pids, wait_all_gone

PROGRAM = (sys.executable, str(Path(__file__).parent / "run_stub_cluster.py"))


def nodes(environment):
    """The node processes that run, by name."""
    lines = marked_pids(environment).items()
    found = {line.split(".json")[0].split("/")[-1]: pid for pid, line in lines if "stub_process" in line}
    return {name: pid for name, pid in found.items() if name != "conductor"}


def started(file, environment):
    """Start a cluster of stubs."""
    return subprocess.Popen(
        [*PROGRAM, str(file), "--json"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def conductor(environment, *arguments):
    return subprocess.run(
        [sys.executable, "-c", f"from deploy.cli import main; main({list(arguments)!r})"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def seen_by_prometheus(cache_dir):
    files = (cache_dir / "targets").glob("*.json")
    return {each["labels"]["process"] for file in files for each in json.loads(file.read_text())}


@pytest.mark.full
def test_a_cluster_grows_shrinks_and_restarts_while_it_runs(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(f"cache_dir: {tmp_path}\nserver: {{http_port: 0, grpc_port: 0}}\n")
    environment = marked_environment()
    up = started(file, environment)
    try:
        assert json.loads(up.stdout.readline())["model"] == "smollm2"
        next(line for line in up.stderr if "Ctrl-C drains" in line)
        first = nodes(environment)
        assert first.keys() == {"prefill-0", "decode-0"}

        grown = conductor(environment, "scale", "prefill=3", "decode=2", "-c", str(file))
        assert grown.returncode == 0, grown.stderr
        more = nodes(environment)
        assert more.keys() == {"prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1"}
        assert first.items() <= more.items(), "what ran was disturbed"
        assert seen_by_prometheus(tmp_path) == {"conductor", *more}

        shrunk = conductor(environment, "scale", "prefill=1", "-c", str(file))
        assert shrunk.stdout.splitlines()[-1] == "prefill-2: gone"
        assert nodes(environment).keys() == {"prefill-0", "decode-0", "decode-1"}
        assert seen_by_prometheus(tmp_path) == {"conductor", "prefill-0", "decode-0", "decode-1"}

        restarted = conductor(environment, "restart", "-c", str(file))
        assert restarted.returncode == 0, restarted.stderr
        said = restarted.stdout.splitlines()
        # the only one of its pool is stood in for, and only then ended
        assert (
            said.index("prefill-1: ready")
            < said.index("prefill-0: draining")
            < said.index("prefill-0: ready")
        )
        assert said[-1] == "prefill-1: gone"
        last = nodes(environment)
        assert last.keys() == {"prefill-0", "decode-0", "decode-1"}
        assert not last.items() & more.items(), "not all were restarted"

        refused = conductor(environment, "scale", "prefill=0", "-c", str(file))
        assert refused.returncode == 1
        assert "prefill=0" in refused.stderr

        up.send_signal(signal.SIGTERM)
        _, err = up.communicate(timeout=100)
        assert up.returncode == 0, err
        assert seen_by_prometheus(tmp_path) == set()
        assert wait_all_gone(environment, 30.0) == {}
    finally:
        for pid in marked_pids(environment):
            os.kill(pid, signal.SIGKILL)
        up.communicate()


def test_without_a_cluster_the_command_says_so(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(f"cache_dir: {tmp_path}\n")
    done = conductor(marked_environment(), "scale", "prefill=3", "-c", str(file))
    assert done.returncode == 1
    assert "is `conductor up` running" in done.stderr


@pytest.mark.parametrize("size", ["prefill", "prefill=x", "gpu=1", "prefill=-1"])
def test_a_size_that_is_none_is_refused(size):
    done = conductor(marked_environment(), "scale", "--", size)
    assert done.returncode == 2
    assert "prefill=N or decode=N is wanted" in done.stderr


def test_a_pool_of_two_sizes_is_refused():
    done = conductor(marked_environment(), "scale", "prefill=2", "prefill=3")
    assert done.returncode == 2
    assert "prefill=2 prefill=3: a pool is there twice" in done.stderr
