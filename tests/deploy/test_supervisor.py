import contextlib
import json
import math
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.held import HeldProcess, end_at
from deploy.supervisor import HANG_S, NOTHING_SEEN, STEADY_S, STOPPED_S, ProcessSpec, Supervisor
from tests.deploy.processes import wait_gone
from tests.manual_clock import ManualClock

STUB = (sys.executable, str(Path(__file__).parent / "stub_process.py"))
CONDUCTOR_CONFIG = {"model_path": "m", "server": {"http_port": 0, "grpc_port": 0}}


def spec_of(folder, role="conductor", **more):
    config = CONDUCTOR_CONFIG if role == "conductor" else {"node_id": "n", "metrics_port": 0}
    return ProcessSpec(role, (*STUB, role), config, more.pop("environment", {}), str(folder), **more)


class HurryingClock(ManualClock):
    """A clock that stands until it is let run, and then moves by `step_s` whenever somebody looks at it."""

    is_running = False
    step_s = STOPPED_S / 4

    def now_s(self):
        if self.is_running:
            self.advance(self.step_s)
        return super().now_s()


@pytest.fixture
def supervise():
    started = []

    def start(spec, clock=None):
        started.append(Supervisor(spec, clock or ManualClock()))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.drain(0.0)


def next_event(supervisor, what, seen=NOTHING_SEEN):
    while True:
        seen, event = supervisor.wait_event(seen)
        if event["event"] == what:
            return seen, event


def test_what_a_process_says_when_ready_is_returned(supervise, tmp_path):
    ready = supervise(spec_of(tmp_path, "node")).wait_ready()
    assert ready == {"event": "ready", "node_id": "n", "metrics_port": 1}


def test_a_killed_process_is_restarted_on_the_ports_it_had(supervise, tmp_path):
    supervisor = supervise(spec_of(tmp_path))
    before = supervisor.wait_ready()
    assert before["http_port"] > 0
    os.kill(supervisor.pid(), signal.SIGKILL)
    seen, event = next_event(supervisor, "exited")
    assert event == {"event": "exited", "name": "conductor", "status": -9, "restart_in_s": 0.5}
    next_event(supervisor, "ready", seen)
    assert supervisor.wait_ready() == before


def test_a_restarted_supervisor_finds_the_ports_of_its_process(supervise, tmp_path):
    first = supervise(spec_of(tmp_path))
    before = first.wait_ready()
    first.drain(5.0)
    assert supervise(spec_of(tmp_path)).wait_ready() == before


def test_who_saw_a_supervisors_events_is_told_all_of_its_successors(supervise, tmp_path):
    first = supervise(spec_of(tmp_path, "node"))
    seen, _ = next_event(first, "ready")
    first.drain(5.0)
    second = supervise(spec_of(tmp_path, "node"))
    after, _ = next_event(second, "ready")
    # its ready came before the question, as when Ray repeats a call late
    assert second.wait_event(seen)[0] == after


def test_restarts_wait_longer_each_time(supervise, tmp_path):
    supervisor = supervise(spec_of(tmp_path, "node"))
    supervisor.wait_ready()
    waits, seen = [], NOTHING_SEEN
    for _ in range(2):
        seen, _ = next_event(supervisor, "ready", seen)
        os.kill(supervisor.pid(), signal.SIGKILL)
        seen, event = next_event(supervisor, "exited", seen)
        waits.append(event["restart_in_s"])
    assert waits == [0.5, 1.0]


def test_a_process_that_ran_for_a_while_is_restarted_at_once(supervise, tmp_path):
    clock = ManualClock()
    supervisor = supervise(spec_of(tmp_path, "node"), clock)
    waits, seen = [], NOTHING_SEEN
    for ran_s in (STEADY_S, 1.0):
        seen, _ = next_event(supervisor, "ready", seen)
        clock.advance(ran_s)
        os.kill(supervisor.pid(), signal.SIGKILL)
        seen, event = next_event(supervisor, "exited", seen)
        waits.append(event["restart_in_s"])
    assert waits == [0.0, 0.5]


def test_a_spare_takes_the_place_of_a_process_that_ends(supervise, tmp_path):
    supervisor = supervise(spec_of(tmp_path, spare_after_s=0.0))
    before = supervisor.wait_ready()
    spare = supervisor.wait_spare()
    os.kill(supervisor.pid(), signal.SIGKILL)
    seen, _ = next_event(supervisor, "exited")
    next_event(supervisor, "ready", seen)
    assert (supervisor.pid(), supervisor.wait_ready()) == (spare, before)


def test_a_spare_that_ends_is_noticed_and_another_stands_by(supervise, tmp_path):
    supervisor = supervise(spec_of(tmp_path, spare_after_s=0.0))
    before = supervisor.wait_ready()
    spare = supervisor.wait_spare()
    os.kill(spare, signal.SIGKILL)
    seen, event = next_event(supervisor, "spare exited")
    assert event["status"] == -signal.SIGKILL
    assert not Path(f"/proc/{spare}").exists(), "it was left as a zombie"
    another = supervisor.wait_spare()
    os.kill(supervisor.pid(), signal.SIGKILL)
    seen, _ = next_event(supervisor, "exited", seen)
    next_event(supervisor, "ready", seen)
    assert (supervisor.pid(), supervisor.wait_ready()) == (another, before)


def test_a_drain_ends_the_spare_too(supervise, tmp_path):
    supervisor = supervise(spec_of(tmp_path, spare_after_s=0.0))
    supervisor.wait_ready()
    spare = supervisor.wait_spare()
    supervisor.drain(30.0)
    assert not Path(f"/proc/{spare}").exists()


def test_a_process_that_never_was_ready_is_not_restarted_and_its_log_is_told(supervise, tmp_path):
    supervisor = supervise(spec_of(tmp_path, environment={"FAULT": "conductor"}))
    with pytest.raises(RuntimeError, match=r"(?s)status 1 before it was ready.*fails, as it was told to"):
        supervisor.wait_ready()
    assert supervisor.wait_event(NOTHING_SEEN)[1]["event"] == "failed"


def test_a_supervisor_that_was_killed_before_its_process_was_ready_leaves_no_ready_process(
    supervise, tmp_path
):
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    child = os.fork()
    if child == 0:
        Supervisor(
            replace(spec_of(tmp_path, "node"), command=("sh", "-c", f"echo > {begun}; read go")),
            ManualClock(),
        )
        begun.read_text()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(RuntimeError, match="status 1 before it was ready"):
        supervise(spec_of(tmp_path, "node", environment={"FAULT": "node"})).wait_ready()


@pytest.fixture
def gate(tmp_path):
    """Return a command of a stub that waits at its start, and what lets it go on."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    command = ("sh", "-c", f'read go < {path}; exec {" ".join(STUB)} "$@"', "sh", "node")
    return command, lambda: path.write_text("go\n")


def test_a_newer_supervisor_adopts_a_process_of_one_that_lives_and_alone_starts_it_again(supervise, tmp_path):
    older = supervise(spec_of(tmp_path))
    ready = older.wait_ready()
    newer = supervise(spec_of(tmp_path))
    seen, event = next_event(newer, "adopted")
    assert event["pid"] == older.pid()
    os.kill(newer.pid(), signal.SIGKILL)
    assert next_event(older, "failed")[1]["problem"] == "another supervisor has its process"
    next_event(newer, "ready", seen)
    assert newer.wait_ready() == ready
    assert older.pid() is None


def test_a_supervisor_that_comes_while_another_starts_the_process_adopts_it(supervise, gate, tmp_path):
    command, let_go = gate
    spec = replace(spec_of(tmp_path / "run", "node"), command=command)
    both = supervise(spec), supervise(spec)
    let_go()
    first_events = [supervisor.wait_event(NOTHING_SEEN)[1]["event"] for supervisor in both]
    assert sorted(first_events) == ["adopted", "ready"]
    assert both[0].pid() == both[1].pid()


def test_a_program_that_is_not_there_is_told(supervise, tmp_path):
    spec = ProcessSpec("node", ("/no/such/program",), {}, {}, str(tmp_path))
    with pytest.raises(RuntimeError, match="No such file"):
        supervise(spec).wait_ready()


def test_a_process_that_is_never_ready_is_given_up(supervise, tmp_path):
    spec = ProcessSpec("node", ("sleep", "60", "#"), {}, {}, str(tmp_path), ready_timeout_s=0.1)
    mute = ProcessSpec("mute", (sys.executable, "-c", "input()"), {}, {}, str(tmp_path), ready_timeout_s=0.1)
    assert spec.ready_timeout_s == mute.ready_timeout_s
    with pytest.raises(RuntimeError, match="not ready in time"):
        supervise(mute).wait_ready()


def test_a_drain_ends_a_process_by_sigterm(supervise, tmp_path):
    supervisor = supervise(spec_of(tmp_path))
    supervisor.wait_ready()
    pid = supervisor.pid()
    supervisor.drain(30.0)
    assert supervisor.pid() is None
    assert not Path(f"/proc/{pid}").exists()
    assert next_event(supervisor, "stopped")[1]["status"] == 0


def test_a_drain_kills_what_does_not_listen(supervise, tmp_path):
    supervisor = supervise(spec_of(tmp_path, environment={"FAULT": "deaf"}))
    supervisor.wait_ready()
    supervisor.drain(0.05)
    assert next_event(supervisor, "stopped")[1]["status"] == -9


def test_a_process_logs_into_its_own_file(supervise, tmp_path):
    supervisor = supervise(spec_of(tmp_path, "node"))
    supervisor.wait_ready()
    supervisor.drain(30.0)
    assert (tmp_path / "node.log").read_text() == "node is up\n"
    assert supervisor.log_tail() == "node is up"


@pytest.fixture
def orphan(tmp_path):
    """Start a process whose supervisor, which lives in a child of ours, is then killed without warning."""
    orphans = []

    def start(**environment):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            supervisor = Supervisor(spec_of(tmp_path, environment=environment), ManualClock())
            ready = supervisor.wait_ready()
            os.write(write_end, json.dumps([supervisor.pid(), ready]).encode())
            os.close(write_end)
            signal.pause()
        os.close(write_end)
        with os.fdopen(read_end) as said:
            pid, ready = json.load(said)
        orphans.append(pid)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return pid, ready

    yield start
    for pid in orphans:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_process_outlives_its_supervisor_and_the_next_one_adopts_it(orphan, supervise, tmp_path):
    pid, ready = orphan()
    supervisor = supervise(spec_of(tmp_path))
    assert supervisor.wait_ready() == ready
    assert next_event(supervisor, "adopted")[1]["pid"] == supervisor.pid() == pid


def test_an_adopted_process_that_is_killed_is_started_again_on_the_ports_it_had(orphan, supervise, tmp_path):
    pid, ready = orphan()
    supervisor = supervise(spec_of(tmp_path))
    seen, _ = next_event(supervisor, "adopted")
    os.kill(pid, signal.SIGKILL)
    seen, event = next_event(supervisor, "exited", seen)
    assert event["status"] is None, "another's child has no exit status for us"
    next_event(supervisor, "ready", seen)
    assert supervisor.wait_ready() == ready
    assert supervisor.pid() != pid


def test_an_adopted_process_has_a_spare_and_is_drained(orphan, supervise, tmp_path):
    pid, _ = orphan()
    supervisor = supervise(spec_of(tmp_path, spare_after_s=0.0))
    spare = supervisor.wait_spare()
    supervisor.drain(30.0)
    assert wait_gone(pid, timeout_s=60.0)
    assert wait_gone(spare, timeout_s=60.0)


def test_a_process_that_nobody_adopts_ends(orphan):
    pid, _ = orphan(ADOPTION_S="0.01")
    assert wait_gone(pid, timeout_s=60.0)


def test_a_process_that_was_found_and_says_nothing_is_killed_and_started_again(orphan, supervise, tmp_path):
    pid, ready = orphan()
    os.kill(pid, signal.SIGSTOP)
    clock = HurryingClock()
    clock.is_running = True
    supervisor = supervise(spec_of(tmp_path), clock)
    seen, event = next_event(supervisor, "hung")
    clock.is_running = False
    assert event["pid"] == pid
    next_event(supervisor, "ready", seen)
    assert supervisor.wait_ready() == ready


@pytest.mark.parametrize(
    ("number", "step_s", "least_s", "most_s"),
    [(signal.SIGUSR1, HANG_S / 3, HANG_S, STOPPED_S), (signal.SIGSTOP, STOPPED_S / 4, STOPPED_S, math.inf)],
    ids=["hangs", "is stopped"],
)
def test_a_process_that_says_nothing_is_killed_and_started_again(
    supervise, tmp_path, number, step_s, least_s, most_s
):
    clock = HurryingClock()
    clock.step_s = step_s
    supervisor = supervise(spec_of(tmp_path, environment={"FAULT": "hanging"}), clock)
    before, pid = supervisor.wait_ready(), supervisor.pid()
    os.kill(pid, number)
    clock.is_running = True
    seen, event = next_event(supervisor, "hung")
    clock.is_running = False
    assert least_s <= clock.now_s() < most_s
    assert event["pid"] == pid
    seen, event = next_event(supervisor, "exited", seen)
    assert event["status"] == -signal.SIGKILL
    next_event(supervisor, "ready", seen)
    assert supervisor.wait_ready() == before


def test_spares_that_end_by_themselves_come_ever_later(supervise, tmp_path):
    supervisor = supervise(spec_of(tmp_path, spare_after_s=0.01))
    waits, seen = [], NOTHING_SEEN
    for _ in range(3):
        os.kill(supervisor.wait_spare(), signal.SIGKILL)
        seen, event = next_event(supervisor, "spare exited", seen)
        waits.append(event["restart_in_s"])
    assert waits == [0.02, 0.04, 0.08]


def test_a_process_that_does_not_end_after_its_loop_is_killed(supervise, tmp_path):
    clock = HurryingClock()
    supervisor = supervise(spec_of(tmp_path, "node", environment={"FAULT": "lingering"}), clock)
    supervisor.wait_ready()
    pid = supervisor.pid()
    os.kill(pid, signal.SIGTERM)
    clock.is_running = True
    seen, event = next_event(supervisor, "hung")
    clock.is_running = False
    assert event["pid"] == pid
    seen, _ = next_event(supervisor, "exited", seen)
    next_event(supervisor, "ready", seen)


def test_a_drain_that_comes_before_a_process_is_found_drains_it(orphan, supervise, tmp_path, monkeypatch):
    pid, _ = orphan(ADOPTION_S="3600")
    started = threading.Event()
    find = HeldProcess.at

    def find_late(path, kind):
        assert started.wait(60.0)
        with pytest.raises(RuntimeError, match="it was stopped"):
            supervisor.wait_ready()
        return find(path, kind)

    monkeypatch.setattr("deploy.supervisor.HeldProcess.at", find_late)
    supervisor = supervise(spec_of(tmp_path))
    started.set()
    supervisor.drain(60.0)
    next_event(supervisor, "stopped")
    assert wait_gone(pid, timeout_s=60.0)


def test_a_process_that_was_ready_is_started_again_although_that_fails_at_first(supervise, tmp_path):
    program, away = tmp_path / "program", tmp_path / "away"
    program.write_text(f'#!/bin/sh\nexec {" ".join(STUB)} "$@"\n')
    program.chmod(0o700)
    spec = replace(spec_of(tmp_path / "run", "node"), command=(str(program), "node"))
    supervisor = supervise(spec)
    supervisor.wait_ready()
    program.rename(away)
    os.kill(supervisor.pid(), signal.SIGKILL)
    seen, _ = next_event(supervisor, "exited")
    seen, event = next_event(supervisor, "exited", seen)
    assert "No such file" in event["problem"]
    away.rename(program)
    next_event(supervisor, "ready", seen)


def test_a_process_that_was_drained_leaves_no_socket(supervise, tmp_path):
    supervisor = supervise(spec_of(tmp_path, "node"))
    supervisor.wait_ready()
    assert (tmp_path / "node.sock").exists()
    supervisor.drain(30.0)
    assert not (tmp_path / "node.sock").exists()


def test_a_process_that_lost_its_supervisor_can_be_ended_by_its_socket(orphan, tmp_path):
    pid, _ = orphan(ADOPTION_S="3600")
    end_at(tmp_path / "conductor.sock", 60.0)
    assert wait_gone(pid, timeout_s=60.0)
    assert not (tmp_path / "conductor.sock").exists()
    end_at(tmp_path / "conductor.sock", 60.0)
