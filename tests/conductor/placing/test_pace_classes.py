"""Each node's own pace: a faster node is found wherever it stands, and classes hold still."""

import random
from math import exp, log

import pytest

from base.request import NodeId
from conductor.placing.pace_classes import EVERYBODY, SLACK, WIDTH, PaceClasses
from conductor.placing.prefill_policies import matched_tokens
from conductor.placing.scheduler import place
from tests.conductor.builders import make_cost, make_request, make_view, require_placement

COST = make_cost()


@pytest.mark.parametrize("seed", range(20))
def test_each_node_is_in_one_class_and_classes_are_in_order_of_pace(seed: int) -> None:
    rng, classes, known = random.Random(seed), PaceClasses(), {}
    for _ in range(100):
        node = rng.randrange(12)
        if rng.random() < 0.2:
            classes.remove(node)
            known.pop(node, None)
        else:
            known[node] = exp(rng.gauss(0.0, 0.6))
            classes.set(node, known[node], known[node])
        for each in range(12):
            assert sum(mask >> each & 1 for mask in classes.masks) == 1
    for node, ratio in known.items():
        assert all(abs(log(ratio) / WIDTH - each) <= SLACK for each in classes.classes_of(node))
    centres = [classes.classes_of(node) for mask in classes.masks for node in range(12) if mask >> node & 1]
    assert centres == sorted(centres)


def test_a_node_that_goes_on_much_as_before_stays_in_its_class() -> None:
    classes = PaceClasses()
    assert classes.masks == EVERYBODY
    for ratio in (1.1, 0.9, 1.15, 0.87):
        classes.set(3, ratio, ratio)
    assert classes.masks == EVERYBODY
    classes.set(3, 3.0, 3.0)
    assert len(classes.masks) == 2
    classes.set(3, 1.0, 1.0)
    assert classes.masks == EVERYBODY


@pytest.mark.parametrize("seed", range(40))
def test_placement_finds_what_a_scan_of_nodes_of_any_pace_finds(seed: int) -> None:
    rng = random.Random(seed)
    view = make_view(6, 2)
    ratios = [rng.choice([0.5, 1.0, 3.0]) for _ in range(6)]
    held = [rng.choice([0, 0, 3, 8, 20]) for _ in range(6)]
    for slot in range(6):
        view.index.store(slot, range(held[slot]))
        view.prefill_order.set(slot, rng.choice([0.0, 0.0, rng.random() * 3]))
        view.corrections.restore(f"p{slot}", "prefill", ratios[slot])
    request = make_request(blocks=rng.randrange(1, 25))
    seconds = []
    for slot in range(6):
        queue_s, most = view.prefill_order.values[slot], min(max(held), len(request.chain))
        for depth in {min(held[slot], len(request.chain)), most}:
            own = matched_tokens(request, depth, view)
            fetched = own - matched_tokens(request, min(held[slot], len(request.chain)), view)
            fetch_s = COST.transfer_s(fetched) if fetched else 0.0
            prefill_s = COST.prefill_s(request.num_tokens - own, own) * ratios[slot]
            seconds.append(max(queue_s, fetch_s) + prefill_s)
    placement = require_placement(place(request, view, COST, 0.0))
    assert max(placement.queue_s, placement.fetch_s) + placement.prefill_s == pytest.approx(min(seconds))


def test_an_idle_holder_that_is_slow_loses_to_a_fast_node_without_the_prefix() -> None:
    view = make_view(2, 1)
    request = make_request(blocks=24)
    view.index.store(0, list(request.chain[:4]))
    assert require_placement(place(request, view, COST, 0.0)).prefill_node == "p0"
    view.corrections.restore("p0", "prefill", 3.0)
    assert require_placement(place(request, view, COST, 0.0)).prefill_node == "p1"
    view.remove_node(NodeId("p0"))
    assert view.paces.masks == EVERYBODY


def test_a_long_prompt_is_not_given_to_a_slow_node_that_is_doubted_to_be_as_fast_as_an_idle_one() -> None:
    view, request = make_view(2, 1), make_request(blocks=20)
    usual_s = COST.prefill_s(request.num_tokens, 0) / 2
    for _ in range(20):
        view.corrections.observe("p0", "prefill", usual_s, 3 * usual_s)
        view.corrections.observe("p1", "prefill", usual_s, usual_s)
    for _ in range(8):
        view.corrections.doubt("p0", "p1", "prefill")
        assert require_placement(place(request, view, COST, 0.0)).prefill_node == "p1"
    assert view.node(NodeId("p0")).learned.prefill.ratio < 1.01
    view.corrections.observe("p0", "prefill", usual_s, usual_s)
    place(request, view, COST, 0.0)
    assert view.paces.masks == EVERYBODY
