"""Rails rest when they fail too often, and come back."""

from base.clock import ManualClock
from transfer.rdma.rails import RailHealth


def failed(health: RailHealth, times: int) -> None:
    for _ in range(times):
        health.failed("a")


def test_two_errors_do_not_rest_a_rail_and_three_do() -> None:
    health = RailHealth(ManualClock())
    failed(health, 2)
    assert health.is_usable("a")
    failed(health, 1)
    assert not health.is_usable("a")
    assert health.is_usable("b")


def test_errors_older_than_the_window_do_not_count() -> None:
    clock = ManualClock()
    health = RailHealth(clock)
    failed(health, 2)
    clock.advance(10.0)
    failed(health, 2)
    assert health.is_usable("a")


def test_each_rest_is_twice_as_long_up_to_five_minutes() -> None:
    clock = ManualClock()
    health = RailHealth(clock)
    for rest_s in (30.0, 60.0, 120.0, 240.0, 300.0, 300.0):
        failed(health, 3)
        clock.advance(rest_s - 0.5)
        assert not health.is_usable("a")
        clock.advance(0.5)
        assert health.is_usable("a")


def test_a_success_after_a_rest_starts_anew() -> None:
    clock = ManualClock()
    health = RailHealth(clock)
    failed(health, 3)
    clock.advance(30.0)
    health.succeeded("a")
    failed(health, 3)
    clock.advance(30.0)
    assert health.is_usable("a")
