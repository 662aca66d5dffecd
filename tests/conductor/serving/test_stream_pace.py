"""When the pace of streams is looked at, and in which turns of the event loop they are woken."""

import asyncio

import pytest

from base.clock import Busy
from bench.virtual_loop import run
from conductor.serving.stream_pace import (
    LONGEST_S,
    LOOK_S,
    PIECES_A_TURN,
    STALE_S,
    TARGET_SHARE,
    TURNS,
    StreamPace,
)
from tests.manual_clock import ManualClock


class ScriptedClock(ManualClock):
    """A clock whose thread has worked and waited for as long as a test says."""

    worked_s = waited_s = 0.0

    def busy(self):
        return Busy(self.worked_s, self.waited_s)


def pace_of(num_streaming, shortest_s=0.0):
    clock = ScriptedClock(5.0)
    pace = StreamPace(shortest_s, clock)
    for _ in range(num_streaming):
        pace.began()
    return clock, pace


def idle_for(clock, pace, seconds, pieces=10, sending=100):
    """Let pieces of so many streams go out in turn."""
    for _ in range(pieces):
        clock.advance(seconds / pieces)
        pace.sent(sending * seconds / pieces)


def test_the_interval_is_the_longest_until_the_event_loop_was_looked_at():
    clock, pace = pace_of(100)
    idle_for(clock, pace, LOOK_S * 0.9)
    assert pace.interval_s == pytest.approx(100 * LONGEST_S)
    idle_for(clock, pace, LOOK_S * 0.2)
    assert pace.interval_s < 100 * LONGEST_S


def test_an_interval_follows_the_number_of_streams_at_once():
    _, pace = pace_of(100)
    for _ in range(90):
        pace.ended()
    assert pace.interval_s == pytest.approx(10 * LONGEST_S)


def test_a_quiet_time_changes_nothing_that_was_learned_before():
    clock, pace = pace_of(100)
    idle_for(clock, pace, 20 * LOOK_S, pieces=400)
    learned_s = pace.interval_s
    assert learned_s < 1e-3
    clock.worked_s += 60.0
    idle_for(clock, pace, 2 * STALE_S, pieces=1)
    assert pace.interval_s == learned_s


def test_a_clock_that_stands_still_changes_nothing():
    clock, pace = pace_of(100)
    clock.worked_s += 1.0
    for _ in range(1_000):
        pace.sent(0.0)
    assert pace.interval_s == pytest.approx(100 * LONGEST_S)


def test_the_interval_of_an_idle_event_loop_is_the_shortest():
    clock, pace = pace_of(100, shortest_s=0.02)
    idle_for(clock, pace, 20 * LOOK_S, pieces=400)
    assert pace.interval_s == 0.02


def test_a_processor_that_others_have_for_half_of_the_time_is_full_at_half_of_it():
    clock, pace = pace_of(10)
    for _ in range(400):
        clock.advance(1e-3)
        clock.worked_s, clock.waited_s = clock.worked_s + 0.5e-3, clock.waited_s + 0.5e-3
        pace.sent(10 * 1e-3)
    assert pace.interval_s == pytest.approx(10 * LONGEST_S)
    for _ in range(20_000):
        clock.advance(1e-4)
        clock.worked_s += 0.5e-4
        pace.sent(10 * 1e-4)
    assert pace.interval_s == pytest.approx(10 * 1e-4 * 0.5 / TARGET_SHARE, rel=0.2)


@pytest.mark.parametrize("silent", [0, 90, 990])
def test_streams_that_send_nothing_slow_no_other(silent):
    clock, pace = pace_of(10 + silent)
    step_s, share = 0.01, 0.3
    for _ in range(2_000):
        gap_s = max(step_s, pace.interval_s)
        for _ in range(10):
            clock.advance(gap_s / 10)
            clock.worked_s += share * gap_s / 10
            pace.sent(gap_s)
    assert pace.interval_s == pytest.approx(step_s * share / TARGET_SHARE)


def test_a_stream_that_goes_on_after_a_long_time_slows_no_other():
    clock, pace = pace_of(10)
    clock.worked_s += 0.05
    pace.sent(60.0)
    idle_for(clock, pace, 1.05 * LOOK_S, pieces=1_000, sending=10)
    assert pace.interval_s < 10 * LONGEST_S


def woken(num_streams, cancelled=()):
    """Return how many streams each turn of the event loop woke, and in which order."""

    async def scenario(_):
        _, pace = pace_of(num_streams)
        loop, order, turns = asyncio.get_running_loop(), [], []
        streams = [loop.create_future() for _ in range(num_streams)]
        for number, stream in enumerate(streams):
            stream.add_done_callback(lambda _, number=number: order.append(number))
            pace.wake(stream)
        for number in cancelled:
            streams[number].cancel()
        while not all(stream.done() for stream in streams):
            before = sum(stream.done() for stream in streams)
            await asyncio.sleep(0)
            turns.append(sum(stream.done() for stream in streams) - before)
        await asyncio.sleep(0)
        return turns, order

    return run(scenario)


def test_streams_that_are_due_together_are_woken_over_turns_in_their_order():
    turns, order = woken(PIECES_A_TURN * TURNS)
    assert turns == [PIECES_A_TURN] * TURNS
    assert order == list(range(PIECES_A_TURN * TURNS))


def test_so_many_streams_that_turns_would_be_too_many_are_woken_more_at_a_time():
    turns, order = woken(1_000)
    assert turns[0] == 1_000 // TURNS
    assert turns[-2] == PIECES_A_TURN
    assert len(order) == 1_000


def test_a_stream_whose_client_left_before_its_turn_is_passed_over():
    turns, order = woken(3, cancelled=[1])
    assert turns == [2]
    assert sorted(order) == [0, 1, 2]
