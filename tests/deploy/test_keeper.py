"""What serves outlives the driver of Ray, and never the command."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from base.lifeline import KEEPS, SUPERVISES
from deploy.held import HeldProcess
from tests.deploy.processes import ROOT, marked_environment, marked_pids, wait_all_gone, wait_gone

PROGRAM = (sys.executable, str(Path(__file__).parent / "run_kept.py"))
GONE_S = 60.0


@pytest.fixture
def kept(tmp_path):
    """Return the command, its processes' ids and its environment."""
    environment = marked_environment()
    folder = tmp_path / "run"
    with subprocess.Popen(
        [*PROGRAM, str(folder)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        yield process, pids, environment
        process.kill()
        for pid in marked_pids(environment):
            os.kill(pid, signal.SIGKILL)


def lose_ray(process):
    process.stdin.write("lost\n")
    process.stdin.flush()
    told = process.stderr.readline()
    assert told.startswith("Ray has ended. conductor, decode-0, prefill-0 serve on without it")


def test_processes_serve_on_without_their_supervisors_until_a_signal_drains_them(kept, tmp_path):
    process, pids, environment = kept
    lose_ray(process)
    assert set(pids) <= set(marked_pids(environment))
    process.send_signal(signal.SIGTERM)
    assert process.wait(GONE_S) == 0
    assert wait_all_gone(environment, GONE_S) == {}


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_first_that_ends_without_a_supervisor_ends_them_all_with_status_1(kept, index):
    process, pids, environment = kept
    lose_ray(process)
    os.kill(pids[index], signal.SIGKILL)
    assert process.wait(GONE_S) == 1
    assert wait_all_gone(environment, GONE_S) == {}


def test_a_driver_that_ends_in_order_leaves_nothing(kept):
    process, _, environment = kept
    process.stdin.write("done\n")
    process.stdin.flush()
    assert process.wait(GONE_S) == 0
    assert wait_all_gone(environment, GONE_S) == {}


def test_a_driver_that_is_killed_leaves_what_serves_to_the_keeper(kept):
    process, pids, environment = kept
    [driver] = {pid for pid, line in marked_pids(environment).items() if "run_kept" in line} - {process.pid}
    os.kill(driver, signal.SIGKILL)
    assert process.stderr.readline().startswith("Ray has ended")
    assert set(pids) <= set(marked_pids(environment))
    process.send_signal(signal.SIGINT)
    assert process.wait(GONE_S) == 0


def test_a_signal_is_the_drivers_while_it_lives(kept):
    process, _, environment = kept
    process.send_signal(signal.SIGTERM)
    assert process.wait(GONE_S) == 0
    assert process.stderr.read() == ""
    assert wait_all_gone(environment, GONE_S) == {}


def test_a_keeper_that_is_killed_leaves_nothing(kept):
    process, _, environment = kept
    process.kill()
    assert wait_all_gone(environment, GONE_S) == {}


def test_processes_that_are_kept_wait_for_a_supervisor(kept, tmp_path):
    process, pids, _ = kept
    lose_ray(process)
    found = HeldProcess.at(tmp_path / "run" / "prefill-0.sock", SUPERVISES)
    assert found.pid in pids
    assert b'"node_id": "prefill-0"' in found.answer(GONE_S)
    process.send_signal(signal.SIGTERM)
    assert wait_gone(found.pid, GONE_S)
    assert found.answer(GONE_S) == b""
    assert not found.is_hearing
    found.close()


def test_no_process_is_held_where_there_is_none(tmp_path):
    assert HeldProcess.at(tmp_path / "none.sock", KEEPS) is None
