"""What failed rests, longer each time, and comes back."""

import weakref

import pytest

from base.resting import Resting
from tests.manual_clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def resting(clock: ManualClock) -> Resting:
    """One failure is enough."""
    return Resting(clock, 1.0, 30.0)


@pytest.fixture
def patient(clock: ManualClock) -> Resting:
    """Three failures within ten seconds."""
    return Resting(clock, 30.0, 300.0, max_failures=3, window_s=10.0)


def failed(resting: Resting, times: int) -> list[float | None]:
    return [resting.failed("a") for _ in range(times)]


def test_what_failed_rests_and_nothing_else_does(resting: Resting) -> None:
    assert resting.failed("a") == 1.0
    assert "a" in resting
    assert "b" not in resting


def test_failures_during_a_rest_do_not_make_it_longer(resting: Resting, clock: ManualClock) -> None:
    assert failed(resting, 3) == [1.0, None, None]
    clock.advance(1.0)
    assert "a" not in resting
    assert resting.failed("a") == 2.0


def test_each_rest_is_twice_as_long_up_to_the_longest(resting: Resting, clock: ManualClock) -> None:
    for rest_s in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        assert resting.failed("a") == rest_s
        clock.advance(rest_s - 0.5)
        assert "a" in resting
        clock.advance(0.5)
        assert "a" not in resting


def test_what_fails_for_days_goes_on_resting(resting: Resting, clock: ManualClock) -> None:
    for _ in range(2000):
        rest_s = resting.failed("a")
        assert rest_s is not None
        clock.advance(rest_s)
    assert resting.failed("a") == 30.0


def test_a_success_during_a_rest_changes_nothing_and_one_after_it_starts_anew(
    resting: Resting, clock: ManualClock
) -> None:
    resting.failed("a")
    resting.succeeded("a")
    assert "a" in resting
    clock.advance(1.0)
    assert resting.failed("a") == 2.0
    clock.advance(2.0)
    resting.succeeded("a")
    assert resting.failed("a") == 1.0


def test_fewer_failures_than_are_allowed_begin_no_rest(patient: Resting) -> None:
    assert failed(patient, 3) == [None, None, 30.0]


def test_failures_older_than_the_window_do_not_count(patient: Resting, clock: ManualClock) -> None:
    failed(patient, 2)
    clock.advance(10.0)
    assert failed(patient, 3) == [None, None, 30.0]


def test_a_success_between_failures_leaves_them_counted(patient: Resting) -> None:
    failed(patient, 2)
    patient.succeeded("a")
    assert patient.failed("a") == 30.0


class Peer:
    """A name of which can be seen whether anybody has it."""


def test_names_that_are_not_used_again_are_forgotten(resting: Resting, clock: ManualClock) -> None:
    """Each start of a process is another name."""
    kept: weakref.WeakSet[Peer] = weakref.WeakSet()
    for _ in range(200):
        peer = Peer()
        kept.add(peer)
        assert resting.failed(peer) == 1.0
        clock.advance(10.0)
    del peer
    assert len(kept) < 8
