"""The processes of a cluster are found by their ids, and those whose parents died as well."""

import os
import signal
import subprocess
import uuid

import pytest

from bench.faults.descendants import Family, Process, below, marked
from bench.faults.up_cluster import is_process
from tests.deploy.processes import wait_gone

ROOT, CHILD, GRANDCHILD, STRANGER = (
    Process(pid, parent, 7, ("program",)) for pid, parent in ((10, 1), (11, 10), (12, 11), (13, 1))
)


def pids(processes):
    return {process.pid for process in processes}


def test_what_is_below_a_process_is_found_however_deep():
    every = [GRANDCHILD, STRANGER, ROOT, CHILD]
    assert pids(below([10], every)) == {10, 11, 12}
    assert pids(below([11, 12], every)) == {11, 12}
    assert below([99], every) == []


def test_whoever_was_seen_is_remembered_with_what_it_starts_and_a_pid_used_again_is_a_stranger():
    family = Family(10, "mark")
    assert pids(family.of([ROOT, CHILD, STRANGER])) == {10, 11}
    orphan = Process(11, 1, 7, ("program",))
    assert pids(family.of([orphan, GRANDCHILD, STRANGER])) == {11, 12}
    reused = Process(10, 1, 9, ("another",))
    assert pids(family.of([Process(12, 1, 7, ("program",)), reused])) == {12}


def test_whoever_carries_the_mark_belongs_to_it():
    adopted = Process(20, 1, 7, ("program",), "mark")
    foreign = Process(21, 1, 7, ("program",), "another mark")
    assert pids(Family(10, "mark").of([ROOT, adopted, foreign])) == {10, 20}


def test_a_real_orphan_is_found_until_it_has_ended():
    mark = uuid.uuid4().hex
    parent = subprocess.Popen(
        ["sh", "-c", "sleep 600 > /dev/null & echo $!; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=marked(mark),
    )
    family = Family(parent.pid, mark)
    orphan = int(parent.stdout.readline())
    try:
        assert {parent.pid, orphan} <= pids(family.look())
        parent.communicate()
        assert pids(family.look()) == {orphan}
    finally:
        os.kill(orphan, signal.SIGKILL)
    assert wait_gone(orphan, 60.0)
    assert family.look() == []


@pytest.mark.parametrize(
    ("words", "is_it"),
    [
        ("python -m conductor --config /runs/1/conductor.json", True),
        ("python -m conductor --config /runs/1/conductor.json --spare", False),
        ("python -m conductor --config /runs/1/conductor-1.json", False),
        ("ray::ActorProcess.wait_event", False),
    ],
)
def test_a_supervised_process_is_distinguished_from_its_spare_and_from_others(words, is_it):
    assert is_process(tuple(words.split()), "conductor") is is_it
