"""`conductor up` as a person runs it: the real model, prefill and decode apart, under Ray."""

import os
import signal
import subprocess
import sys

import pytest

from tests.deploy.processes import ROOT, marked_environment, marked_pids, wait_all_gone

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

ASK = ["up", "--prompt", "What is the capital of France?", "--exit", "-c"]


def test_the_capital_of_france(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("server: {http_port: 0, grpc_port: 0}\n")
    environment = marked_environment()
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"from deploy.cli import main; main({[*ASK, str(file)]})"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=380,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout
        assert done.stdout.count("\n") == 1, "standard output is the answer's alone"
        assert wait_all_gone(environment, 30.0) == {}
    finally:
        for pid in marked_pids(environment):
            os.kill(pid, signal.SIGKILL)
