"""A host that is about to go: what runs there finishes first, conductors before nodes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from base.clock import SystemClock
from deploy.cluster import Programs
from deploy.leave import leave


@pytest.fixture
def programs(tmp_path):
    """Programs of which nobody else has any: `leave` looks at all processes of the host."""
    stub = shutil.copy(Path(__file__).parent / "stub_process.py", tmp_path)
    return Programs(
        *((sys.executable, str(stub), role) for role in ("prepare", "conductor", "node")),
    )


@pytest.fixture
def start(tmp_path):
    started = []

    def run(command, name):
        config = tmp_path / f"{name}.json"
        config.write_text(json.dumps({"node_id": name, "server": {"http_port": 0, "grpc_port": 0}}))
        process = subprocess.Popen(
            [*command, "--config", str(config)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        assert json.loads(process.stdout.readline())["event"] == "ready"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_conductors_and_nodes_are_drained_and_nothing_else_is(programs, start):
    ours = [start(programs.conductor, "conductor"), start(programs.node, "a"), start(programs.node, "b")]
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    leave(programs, SystemClock(), 60.0)
    assert [process.poll() for process in ours] == [0, 0, 0]
    assert other.poll() is None
    other.communicate(b"\n")


def test_who_does_not_end_is_not_waited_for_beyond_the_grace(programs, start, monkeypatch):
    monkeypatch.setenv("FAULT", "deaf")
    deaf = start(programs.node, "a")
    leave(programs, SystemClock(), 0.1)
    assert deaf.poll() is None
