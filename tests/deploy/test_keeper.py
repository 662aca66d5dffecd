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
def begin(tmp_path):
    """Return what begins the command, and returns it and its environment."""
    begun = []

    def start(*how, command=(), **options):
        environment = marked_environment()
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(
            [*command, *PROGRAM, str(tmp_path / "run"), *how],
            cwd=ROOT,
            env=environment,
            text=True,
            **{**pipes, **options},
        )
        begun.append((process, environment))
        return process, environment

    yield start
    for process, environment in begun:
        process.kill()
        for pid in marked_pids(environment):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def kept(begin):
    """Return the command, its processes' ids and its environment."""
    process, environment = begin()
    pids = [int(word) for word in process.stdout.readline().split()]
    return process, pids, environment


def driver_of(process, environment):
    [driver] = {pid for pid, line in marked_pids(environment).items() if "run_kept" in line} - {process.pid}
    return driver


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


@pytest.mark.parametrize(("word", "number"), [("done", None), ("lost", signal.SIGTERM), ("", signal.SIGTERM)])
def test_what_lost_its_parent_ends_before_the_command(begin, word, number):
    process, environment = begin("littering")
    process.stdout.readline()
    assert any("sleep" in line for line in marked_pids(environment).values())
    if word:
        process.stdin.write(f"{word}\n")
        process.stdin.flush()
    if word == "lost":
        assert process.stderr.readline().startswith("Ray has ended")
    if number:
        process.send_signal(number)
    assert process.wait(GONE_S) == 0
    assert marked_pids(environment) == {}


def test_children_of_what_became_the_command_live_on(begin):
    process, environment = begin(command=("sh", "-c", 'sleep 1000 & exec "$@"', "sh"))
    process.stdout.readline()
    process.stdin.write("done\n")
    process.stdin.flush()
    assert process.wait(GONE_S) == 0
    assert list(marked_pids(environment).values()) == ["sleep 1000 "]


def test_a_driver_that_is_killed_leaves_what_serves_to_the_keeper(kept):
    process, pids, environment = kept
    driver = driver_of(process, environment)
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


def test_a_driver_that_hangs_is_killed_after_the_second_signal_and_leaves_nothing(begin):
    process, environment = begin("stuck")
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert process.wait(GONE_S) == 0
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_before_the_driver_takes_any_interrupts_the_command(begin, number):
    process, environment = begin("early")
    assert process.stdout.readline() == "early\n"
    process.send_signal(number)
    assert process.wait(GONE_S) == 130
    assert process.stderr.read() == ""
    assert wait_all_gone(environment, GONE_S) == {}


def test_a_terminal_that_hangs_up_drains_what_serves_without_ray(kept):
    process, _, environment = kept
    lose_ray(process)
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    assert process.wait(GONE_S) == 0
    assert wait_all_gone(environment, GONE_S) == {}


def test_standard_error_that_nobody_reads_ends_nothing(begin):
    process, environment = begin("chatty")
    assert process.stdout.readline() == "early\n"
    process.stderr.close()
    process.stdin.write("go on\n")
    process.stdin.flush()
    pids = [int(word) for word in process.stdout.readline().split()]
    driver = driver_of(process, environment)
    process.stdin.write("lost\n")
    process.stdin.flush()
    assert wait_gone(driver, GONE_S)
    assert set(pids) <= set(marked_pids(environment))
    process.send_signal(signal.SIGTERM)
    assert process.wait(GONE_S) == 0


def test_what_was_not_there_when_ray_ended_ends_the_rest(kept):
    process, pids, environment = kept
    driver = driver_of(process, environment)
    os.kill(driver, signal.SIGSTOP)  # nobody starts the next one again
    os.kill(pids[1], signal.SIGKILL)
    assert wait_gone(pids[1], GONE_S)
    os.kill(driver, signal.SIGKILL)
    assert "Ray has ended, and prefill-0 before it" in process.stderr.readline()
    assert process.wait(GONE_S) == 1
    assert wait_all_gone(environment, GONE_S) == {}
