"""Kept copies: of each prompt that is handed over one, and each node keeps its share."""

import dataclasses

import pytest

from base.request import Role, Slo
from conductor.placing.cost_model import CostModel
from conductor.placing.kept_copies import KeptCopies
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from tests.conductor.builders import make_cost, make_info, make_request, make_view, require_placement

COST = make_cost()
SETTINGS = SchedulerSettings(RejectPolicy.NONE)
REQUEST = make_request("r", 20, 0, slo=Slo())


def evicted_first(view, used=0.0, cost=COST, settings=SETTINGS):
    """Return who evicts what is handed over first, if the decode node uses so much of its memory."""
    placement = require_placement(place(REQUEST, view, cost, 0.0, settings))
    node = view.node(placement.decode_node)
    node.peak_tokens = used * node.capacity_tokens
    copies = KeptCopies(cost, settings)
    return [copies.evict_first_on(REQUEST, placement, view) for _ in range(1000)]


@pytest.mark.parametrize("used", [0.0, 0.5, 0.9])
def test_each_node_keeps_its_share_of_the_memory_that_nobody_uses(used):
    first = evicted_first(make_view(1, 1), used)
    assert set(first) == {"p0", "d0"}
    assert first.count("p0") / 1000 == pytest.approx((1 - used) / (2 - used), abs=0.005)


def test_a_node_without_room_keeps_none():
    assert set(evicted_first(make_view(1, 1), used=1.0)) == {"d0"}


def test_prefill_nodes_keep_all_where_nothing_is_fetched():
    assert set(evicted_first(make_view(1, 1), settings=dataclasses.replace(SETTINGS, fetches=False))) == {
        "d0"
    }


def test_prefill_nodes_keep_all_where_computing_is_sooner_than_fetching():
    profile = dataclasses.replace(COST.profile, transfer_bytes_per_s=1e6)
    assert set(evicted_first(make_view(1, 1), cost=CostModel(profile))) == {"d0"}


def test_nothing_is_evicted_first_where_the_prompt_stays():
    view = make_view(0, 0)
    view.add_node(make_info("m0", Role.PREFILL, Role.DECODE), 0.0)
    assert set(evicted_first(view)) == {None}


def test_nothing_is_evicted_first_where_no_node_decodes():
    view, copies = make_view(1, 1), KeptCopies(COST, SETTINGS)
    request = dataclasses.replace(REQUEST, max_tokens=1)
    placement = require_placement(place(request, view, COST, 0.0, SETTINGS))
    assert placement.prefill_node != placement.decode_node
    assert {copies.evict_first_on(request, placement, view) for _ in range(50)} == {None}
