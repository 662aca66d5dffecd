"""What is counted as a bench's own work, of processes whose ticks a folder like /proc has."""

import os

import pytest

from bench.others import TICK_S, own_s, worked_s


@pytest.fixture
def proc(tmp_path):
    """Process 1 began 10, which began 11 and has waited for others; 20 is of another family."""
    processes = {1: (0, (1, 1, 0, 0)), 10: (1, (3, 4, 50, 60)), 11: (10, (5, 6, 0, 0)), 20: (1, (7, 8, 0, 0))}
    for pid, (parent, ticks) in processes.items():
        fields = [str(pid), "(any (name) of one)", "S", str(parent), *"0" * 9, *map(str, ticks), *"0" * 30]
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(" ".join(fields))
    (tmp_path / "12").mkdir()  # one that has just ended
    (tmp_path / "stat").write_text("cpu  100 20 30 1000 500 4 6 0 0 0\ncpu0 50 10 15 500 250 2 3 0 0 0\n")
    return tmp_path


def test_work_of_children_and_of_their_children_is_ones_own(proc):
    assert own_s(10, proc) == pytest.approx((3 + 4 + 50 + 60 + 5 + 6) * TICK_S)


def test_work_of_a_process_that_is_no_child_is_not(proc):
    assert own_s(20, proc) == pytest.approx((7 + 8) * TICK_S)
    assert own_s(1, proc) == pytest.approx((2 + 117 + 11 + 15) * TICK_S)


def test_processors_that_wait_do_not_work(proc):
    assert worked_s(proc) == pytest.approx((100 + 20 + 30 + 4 + 6) * TICK_S)


def test_the_kernel_writes_what_is_read_here():
    assert worked_s() >= own_s(os.getpid()) >= 0.0
