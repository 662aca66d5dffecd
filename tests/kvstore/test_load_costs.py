"""A node loads what it has found to be sooner loaded than computed, and tries again what was slow."""

from kvstore.load_costs import LoadCosts


def costs(compute_s=0.01, block_tokens=10):
    learned = LoadCosts(block_tokens)
    learned.computed(100, 100 * compute_s)
    return learned


def test_what_was_never_tried_is_tried():
    assert LoadCosts(10).is_worth("disk")
    assert costs().is_worth("disk")


def test_the_quicker_way_is_taken_for_each_place():
    learned = costs()
    learned.loaded("memory", 10, 0.5)
    learned.loaded("disk", 10, 2.0)
    assert learned.is_worth("memory")
    assert not learned.is_worth("disk")


def test_a_load_that_brought_nothing_cost_its_seconds():
    learned = costs()
    learned.loaded("elsewhere", 0, 2.0)
    assert not learned.is_worth("elsewhere")


def test_a_place_that_was_slow_once_is_tried_again():
    learned = costs()
    learned.loaded("disk", 1, 0.2)
    decisions = [learned.is_worth("disk") for _ in range(100)]
    assert not decisions[0]
    assert decisions[-1]
    learned.loaded("disk", 1, 0.01)
    assert learned.is_worth("disk")


def test_a_device_that_computes_faster_than_anything_loads_computes():
    learned = costs(compute_s=1e-6)
    learned.loaded("memory", 1, 0.001)
    assert not learned.is_worth("memory")
