"""Rejections explained: the numbers are those that decided, and what lacked is what would have helped."""

from dataclasses import replace

import pytest

from base.request import Slo
from conductor.placing.decisions import decision
from conductor.placing.placement import Rejection, RejectReason
from conductor.placing.refused import judged, lacking, would_be
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.placing.waterfall import waterfall
from tests.conductor.builders import make_cost, make_request, make_view, require_placement, tbt_slo_for

COST = make_cost()
SETTINGS = SchedulerSettings(ttft_headroom=0.85)
AHEAD_S = 2.0


def decided(slo, ahead_s=0.0, blocks=10, queued=0, settings=SETTINGS):
    """Return a decision, 0.5 s after the request came, before which `queued` others were placed."""
    view = make_view(1, 1)
    for number in range(queued):
        other = make_request(f"other{number}", first_block=1_000 * (number + 1))
        view.placed(other, require_placement(place(other, view, COST, 0.0)), 0.0)
    asked = replace(make_request(blocks=blocks, slo=slo), waited_s=0.5 + ahead_s)
    return decision(asked, view, place(asked, view, COST, 0.5, settings), 0.0, 0.5)


def explained(made, settings=SETTINGS):
    assert isinstance(made.result, Rejection)
    instead = would_be(made, COST, settings)
    return judged(made, instead, COST, settings), instead


def test_a_late_first_token_is_told_with_those_before_it_and_lacks_a_prefill_node():
    made = decided(Slo(ttft_slo_s=4.0), AHEAD_S, queued=3)
    told, instead = explained(made)
    assert made.result.reason is RejectReason.TTFT
    assert told.ahead_s == pytest.approx(AHEAD_S)
    assert told.ttft_s == pytest.approx(0.5 + AHEAD_S + made.result.predicted_ttft_s)
    assert told.ttft_s > told.ttft_limit_s == pytest.approx(0.85 * 4.0)
    assert told.lacks == "prefill"
    parts = waterfall(made, None, 0.0, instead)
    assert sum(part.predicted_s or 0.0 for part in parts) == pytest.approx(told.ttft_s)
    assert [part.actual_s for part in parts[2:]] == [None] * 5, "none of it was"


def test_a_prompt_that_an_idle_node_could_not_compute_in_time_lacks_speed():
    bound_s = COST.prefill_s(5_120, 0)
    assert explained(decided(Slo(ttft_slo_s=bound_s), queued=3))[0].lacks == "speed"


def test_a_step_that_is_too_long_with_others_lacks_a_decode_node_and_alone_speed():
    alone_s = COST.decode_step_s(1, 5_120)
    told, _ = explained(decided(Slo(tbt_slo_s=tbt_slo_for(1.001 * alone_s, COST)), queued=3))
    assert told.lacks == "decode"
    assert told.tbt_s > told.tbt_limit_s == pytest.approx(1.001 * alone_s)
    assert explained(decided(Slo(tbt_slo_s=0.9 * alone_s)))[0].lacks == "speed"


def test_without_a_bound_or_a_placement_there_is_nothing_to_compare():
    placed = decided(Slo())
    assert would_be(placed, COST, SETTINGS) is None
    waited = placed._replace(result=Rejection(placed.asked.request_id, RejectReason.WAITED, 1.0))
    assert would_be(waited, COST, SETTINGS) is None
    assert len(waterfall(waited, None, 0.0, None)) == 2
    untold = decided(Slo(ttft_slo_s=0.1))
    untold = untold._replace(seen=untold.seen._replace(nodes=None))
    assert would_be(untold, COST, SETTINGS) is None
    late = replace(SETTINGS, reject=RejectPolicy.LATE)
    assert explained(decided(Slo(0.1, 0.1), settings=late), late)[0].tbt_limit_s is None


@pytest.mark.parametrize(
    ("reason", "lacks"),
    [
        (RejectReason.NO_FREE_BLOCKS, "decode"),
        (RejectReason.NO_DECODE_NODE, "decode"),
        (RejectReason.NO_PREFILL_NODE, "prefill"),
        (RejectReason.WAITED, "prefill"),
        (RejectReason.TOO_MANY_WAIT, "prefill"),
    ],
)
def test_who_is_rejected_for_want_of_a_node_lacks_its_role(reason, lacks):
    assert lacking(make_request(), reason, 1.0, COST, SETTINGS) == lacks
