"""A node loads what it has found to be sooner loaded than computed, and tries again what was slow."""

import pytest

from kvstore.engine_store import LoadCosts


def costs(compute_s=0.01, block_tokens=10):
    learned = LoadCosts(block_tokens)
    learned.computed(100, 100 * compute_s)
    return learned


def after_two(learned, place, *load):
    """Return whether a place is worth another load before each of two, and after them."""
    found = []
    for _ in range(2):
        found.append(learned.is_worth(place))
        learned.loaded(place, *load)
    return [*found, learned.is_worth(place)]


PASSED_OVER = [True, True, False]


def test_what_was_never_tried_is_tried():
    assert LoadCosts(10).is_worth("disk")
    assert costs().is_worth("disk")


def test_one_load_that_took_long_decides_nothing():
    learned = costs()
    for seconds in (60.0, 0.01, 0.01, 60.0, 0.01, 60.0):
        learned.loaded("memory", 1, seconds)
        assert learned.is_worth("memory")


def test_the_quicker_way_is_taken_for_each_place():
    learned = costs()
    learned.loaded("memory", 10, 0.5)
    learned.loaded("memory", 10, 0.5)
    assert after_two(learned, "disk", 10, 2.0) == PASSED_OVER
    assert learned.is_worth("memory")


def test_a_load_that_brought_nothing_cost_its_seconds():
    assert after_two(costs(), "elsewhere", 0, 2.0) == PASSED_OVER


@pytest.mark.parametrize("num_asked", [0, 100])
def test_a_load_that_soon_ends_with_nothing_does_not_make_a_slow_place_quick(num_asked):
    learned = costs()
    learned.loaded("elsewhere", 1, 60.0)
    learned.ended_early("elsewhere", num_asked, 0.001)
    assert not learned.is_worth("elsewhere")
    learned.loaded("elsewhere", 0, 0.001)
    assert not learned.is_worth("elsewhere")


@pytest.mark.parametrize(
    ("num_asked", "seconds", "is_worth"), [(100, 60.0, False), (0, 60.0, False), (100, 1.0, True)]
)
def test_loads_that_hang_are_passed_over_and_those_that_a_client_soon_leaves_say_nothing(
    num_asked, seconds, is_worth
):
    learned = costs()
    for _ in range(2):
        assert learned.is_worth("elsewhere")
        learned.ended_early("elsewhere", num_asked, seconds)
    assert learned.is_worth("elsewhere") is is_worth


def test_a_place_that_was_slow_once_is_tried_again():
    learned = costs()
    assert after_two(learned, "disk", 1, 0.2) == PASSED_OVER
    decisions = [learned.is_worth("disk") for _ in range(100)]
    assert not decisions[0]
    assert decisions[-1]
    learned.loaded("disk", 1, 0.01)
    assert learned.is_worth("disk")


def test_a_device_that_computes_faster_than_anything_loads_computes():
    assert after_two(costs(compute_s=1e-6), "memory", 1, 0.001) == PASSED_OVER
