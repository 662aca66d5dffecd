"""The load order against a scan of all nodes."""

import random

import pytest

from conductor.placing.load_order import LoadOrder, bits_of


@pytest.mark.parametrize("seed", range(50))
def test_least_of_any_mask_agrees_with_a_scan(seed: int) -> None:
    rng = random.Random(seed)
    order, values, floor = LoadOrder(), {}, 0.0
    asked_often = rng.getrandbits(40)
    for _ in range(200):
        node = rng.randrange(40)
        if rng.random() < 0.2:
            order.remove(node)
            values.pop(node, None)
        else:
            values[node] = floor + rng.randrange(6)
            order.set(node, values[node])
        floor += rng.random() * 0.3
        order.settle(floor)
        order.check()
        mask = rng.choice((asked_often, rng.getrandbits(40)))
        members = [(max(values[n], floor), n) for n in bits_of(mask) if n in values]
        assert order.least(mask) == (min(members)[1] if members else None)
        busy = sorted((-values[n], -n) for n in bits_of(mask) if n in values and values[n] > floor)
        assert order.most(mask, 3) == [-node for _, node in busy[:3]]


def test_bits_of_can_stop_early() -> None:
    assert bits_of(0b101101) == [0, 2, 3, 5]
    assert bits_of(0b101101, limit=2) == [0, 2]


def test_idle_nodes_are_found_without_a_look_at_any_other() -> None:
    order = LoadOrder()
    for node in range(500):
        order.set(node, float(node))
    order.settle(250.0)
    assert order.least((1 << 500) - 1) == 0
    assert order.num_probes == 0
