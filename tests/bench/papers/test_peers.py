"""Peers' rules see of a queue what their originals see."""

import pytest

from base.request import NodeId
from bench.papers.peers import tokens_to_compute
from conductor.placing.placement import Placement
from conductor.placing.scheduler import place
from tests.conductor.builders import make_cost, make_request, make_view

COST = make_cost()


@pytest.mark.parametrize("matched", [0, 10, 30])
def test_queued_tokens_are_those_to_compute(matched: int) -> None:
    view = make_view(1, 1)
    view.kv_events(NodeId("p0"), 1, list(range(matched)), [])
    node, computed = view.node(NodeId("p0")), 0
    assert tokens_to_compute(node, COST) == 0.0
    for number in range(3):
        request = make_request(f"r{number}", blocks=40)
        placement = place(request, view, COST, 0.0)
        assert isinstance(placement, Placement)
        view.placed(request, placement, 0.0)
        computed += request.num_tokens - placement.matched_tokens
    assert tokens_to_compute(node, COST) == pytest.approx(computed, rel=0.02)
