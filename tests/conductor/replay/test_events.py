"""Events happen by moment, and at one moment in the order they were scheduled."""

from random import Random

import pytest

from conductor.replay.events import Events


@pytest.mark.parametrize("seed", range(20))
def test_events_happen_in_the_order_of_moment_and_number(seed: int) -> None:
    rng, events = Random(seed), Events()
    scheduled: list[tuple[float, int]] = []
    happened: list[tuple[float, int]] = []

    def schedule(earliest: int) -> None:
        moment_s = float(rng.randrange(earliest, earliest + 5))
        scheduled.append((moment_s, len(scheduled)))
        events.at(moment_s, happen, *scheduled[-1])

    def happen(moment_s: float, number: int) -> None:
        happened.append((moment_s, number))
        if len(scheduled) < 200 and rng.random() < 0.6:
            schedule(int(moment_s))  # for this very moment too

    for _ in range(100):
        schedule(0)
    while events.moments:
        assert events.moments[0] == min(event for event in scheduled if event not in happened)[0]
        events.run_next()
    assert happened == sorted(scheduled)
    assert events.num_scheduled == len(scheduled)
