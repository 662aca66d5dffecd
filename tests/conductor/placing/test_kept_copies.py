"""Kept copies: of each prompt that is handed over one, and each node keeps its share."""

import pytest

from base.request import Role, Slo
from conductor.placing.kept_copies import KeptCopies
from conductor.placing.placement import Placement
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from tests.conductor.builders import make_cost, make_info, make_request, make_view, require_placement

COST = make_cost()


def handed_over(view) -> Placement:
    request = make_request("r", 2, 0, slo=Slo())
    return require_placement(place(request, view, COST, 0.0, SchedulerSettings(RejectPolicy.NONE)))


@pytest.mark.parametrize("used", [0.0, 0.5, 0.9])
def test_each_node_keeps_its_share_of_the_memory_that_nobody_uses(used):
    view, copies = make_view(1, 1), KeptCopies()
    placement = handed_over(view)
    node = view.node("d0")
    node.peak_tokens = used * node.capacity_tokens
    assert node.free_tokens == pytest.approx((1 - used) * node.capacity_tokens)
    first = [copies.evict_first_on(placement, view) for _ in range(1000)]
    share = (1 - used) * node.capacity_tokens / (view.node("p0").free_tokens + node.free_tokens)
    assert set(first) == {"p0", "d0"}
    assert first.count("p0") / 1000 == pytest.approx(share, abs=0.005)


def test_a_node_without_room_keeps_none():
    view, copies = make_view(1, 1), KeptCopies()
    placement = handed_over(view)
    view.node("d0").peak_tokens = view.node("d0").capacity_tokens
    assert {copies.evict_first_on(placement, view) for _ in range(50)} == {"d0"}


def test_nothing_is_evicted_first_where_the_prompt_stays():
    view, copies = make_view(0, 0), KeptCopies()
    view.add_node(make_info("m0", Role.PREFILL, Role.DECODE), 0.0)
    placement = handed_over(view)
    assert placement.prefill_node == placement.decode_node
    assert copies.evict_first_on(placement, view) is None
