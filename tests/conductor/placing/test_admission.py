"""Admission at its bounds: what is predicted to keep an SLO is taken, and not a hair more."""

import random
from dataclasses import replace
from math import e, inf, nextafter

import pytest

from base.request import NodeId, RequestId, Role, Slo
from conductor.placing.admission import (
    RETRY_AFTER_S,
    TBT_HEADROOM,
    admit_to_decode,
    decode_tbt_s,
    displaced_s,
    refusal,
    step_limit_s,
)
from conductor.placing.cost_model import LearnedTerm
from conductor.placing.placement import RejectReason
from conductor.placing.room_price import MOST, REMEMBERED, RISE
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from tests.conductor.builders import (
    BLOCK_SIZE,
    make_cost,
    make_heartbeat,
    make_info,
    make_request,
    make_view,
    require_placement,
    tbt_slo_for,
)

COST = make_cost()
PREDICT, EARLY = RejectPolicy.PREDICT, RejectPolicy.EARLY
PREDICTING = SchedulerSettings(reject=PREDICT)


class Steps:
    """A cost model in which a step takes what it is told, one of nobody nothing; it is asked once."""

    empty_step_s = 0.0

    def __init__(self, step_s):
        self._step_s = step_s
        self.asked = []

    def decode_step_s(self, sequences, context_tokens):
        self.asked.append((sequences, context_tokens))
        return self._step_s

    def gap_s(self, sequences, context_tokens, places):
        assert sequences <= places, "each has a place"
        return self.decode_step_s(sequences, context_tokens)


def placed(view, request):
    return require_placement(place(replace(request, slo=Slo()), view, COST, 0.0))


def refused(slo, settings=None, waited_s=0.0, is_promised=False, cost=COST, view=None):
    view = view or make_view(1, 1)
    request = replace(make_request(), slo=slo, waited_s=waited_s, is_promised=is_promised)
    return refusal(request, placed(view, request), view, cost, settings or SchedulerSettings(), 0.0)


def predicted_ttft_s():
    return placed(make_view(1, 1), make_request()).predicted_ttft_s


def test_a_promised_request_is_taken_up_to_its_very_bound():
    bound_s = 3.0 + predicted_ttft_s()
    assert refused(Slo(ttft_slo_s=bound_s), waited_s=3.0, is_promised=True) is None
    reason, *_ = refused(Slo(ttft_slo_s=nextafter(bound_s, 0)), waited_s=3.0, is_promised=True)
    assert reason is RejectReason.TTFT


def test_any_other_has_to_keep_some_room():
    settings = SchedulerSettings(ttft_headroom=0.5)
    bound_s = 2 * predicted_ttft_s()
    assert refused(Slo(ttft_slo_s=bound_s), settings) is None
    assert refused(Slo(ttft_slo_s=nextafter(bound_s, 0)), settings)[0] is RejectReason.TTFT


def test_without_a_policy_everything_is_taken():
    settings = SchedulerSettings(reject=RejectPolicy.NONE)
    assert refused(Slo(1e-9, 1e-9), settings) is None


@pytest.mark.parametrize(
    ("late_by_s", "retry_s"), [(0.1, RETRY_AFTER_S[0]), (7.0, 7.0), (1e3, RETRY_AFTER_S[1])]
)
def test_who_is_late_may_come_back_when_that_is_made_up_for(late_by_s, retry_s):
    waited_s = 2_000.0
    slo = Slo(ttft_slo_s=waited_s + predicted_ttft_s() - late_by_s)
    _, retry_after_s, _ = refused(slo, waited_s=waited_s, is_promised=True)
    assert retry_after_s == pytest.approx(retry_s)


@pytest.mark.parametrize("policy", [EARLY, PREDICT])
def test_a_step_may_take_a_share_of_its_bound_and_no_more(policy):
    settings = SchedulerSettings(reject=policy)
    assert refused(Slo(tbt_slo_s=1.0), settings, cost=Steps(TBT_HEADROOM)) is None
    slow = Steps(nextafter(TBT_HEADROOM, 1))
    assert refused(Slo(tbt_slo_s=1.0), settings, cost=slow)[0] is RejectReason.TBT


def view_with_one():
    """A prefill and a decode node, on which a short request decodes for a while."""
    view, other = make_view(1, 1), make_request("other", blocks=1, first_block=1000)
    view.projection.restore(300.0)
    view.placed(other, placed(view, other), 0.0)
    view.prefill_done(other.request_id, 0.0)
    return view


def test_of_a_step_that_nobody_shortens_no_share_is_kept_free():
    empty_s = COST.decode_step_s(0, 0)
    assert step_limit_s(2 * empty_s, COST) == pytest.approx((1 + TBT_HEADROOM) * empty_s)
    assert step_limit_s(6 * empty_s, COST, ratio=2.0) == pytest.approx((2 + TBT_HEADROOM * 4) * empty_s)
    assert step_limit_s(0.5 * empty_s, COST) == 0.5 * empty_s, "shorter than any step"
    assert step_limit_s(inf, COST) == inf


def test_a_long_context_counts_more_where_others_find_no_room_and_no_more_where_all_are_taken():
    view = view_with_one()
    long, short = (make_request(blocks=blocks) for blocks in (200, 20))
    shown = {request.num_tokens: placed(view, request) for request in (long, short)}
    at_ease = [displaced_s(each, shown[each.num_tokens], view, COST, 0.0) for each in (long, short)]
    assert at_ease == [0.0, 0.0]
    for _ in range(200):
        view.rejected(RejectReason.TBT)
    pressed = [displaced_s(each, shown[each.num_tokens], view, COST, 0.0) for each in (long, short)]
    sequences, tokens = view.projected(shown[long.num_tokens].predicted_ttft_s, 0.0)
    more_s = COST.decode_step_s(1, long.num_tokens) - COST.decode_step_s(1, tokens / sequences)
    assert pressed[0] == pytest.approx((MOST - 1) * more_s)
    assert pressed[0] > pressed[1] > 0.0
    # a bound that the long one keeps alone, and not as one that displaces others
    slo = Slo(tbt_slo_s=tbt_slo_for(COST.decode_step_s(1, long.num_tokens) + more_s, COST))
    asked = replace(long, slo=slo)
    assert refusal(asked, shown[long.num_tokens], make_view(1, 1), COST, PREDICTING, 0.0) is None
    reason, _, has_room = refusal(asked, shown[long.num_tokens], view, COST, PREDICTING, 0.0)
    assert reason is RejectReason.TBT
    assert has_room
    # and one that it does not keep alone
    tight = replace(long, slo=Slo(tbt_slo_s=COST.decode_step_s(1, long.num_tokens)))
    assert refusal(tight, shown[long.num_tokens], view, COST, PREDICTING, 0.0)[2] is False


def test_who_is_no_longer_than_those_who_decode_displaces_nobody_whatever_room_costs():
    view, request = view_with_one(), make_request(blocks=200)
    view.placed(request, placed(view, request), 0.0)
    view.prefill_done(request.request_id, 0.0)
    for _ in range(200):
        view.rejected(RejectReason.TBT)
    asked = [make_request(f"r{blocks}", blocks=blocks) for blocks in (20, 60, 200)]
    taken_s = [displaced_s(each, placed(view, each), view, COST, 0.0) for each in asked]
    assert taken_s[:2] == [0.0, 0.0]
    assert taken_s[2] > 0.0
    view.finished(RequestId("other"), 0.0)
    assert displaced_s(asked[2], placed(view, asked[2]), view, COST, 0.0) == 0.0


def test_a_pool_that_was_idle_takes_whom_it_can_serve_whatever_room_cost_before():
    request = make_request(blocks=200)
    slo = Slo(tbt_slo_s=tbt_slo_for(1.001 * COST.decode_step_s(1, request.num_tokens), COST))
    view = view_with_one()
    for _ in range(200):
        view.rejected(RejectReason.TBT)
    shown = placed(view, request)
    asked = replace(request, slo=slo)
    assert refusal(asked, shown, view, COST, PREDICTING, 0.0)[0] is RejectReason.TBT
    view.finished(RequestId("other"), 0.0)
    view.projection.restore(0.1)
    first = make_request("first")
    view.placed(first, placed(view, first), 0.0)
    assert view.room_price.price == 1.0
    assert refusal(asked, shown, view, COST, PREDICTING, 0.0) is None


def test_the_price_of_room_rises_with_who_finds_none_and_falls_with_time():
    price = make_view(1, 1).room_price
    price.settle(5.0, decode_s=10.0)
    assert price.price == 1.0
    price.found_no_room()
    assert price.price == pytest.approx(RISE)
    for _ in range(200):
        price.found_no_room()
    assert price.price == MOST
    price.settle(5.0, decode_s=10.0)
    assert price.price == MOST, "no time has passed"
    price.settle(5.0 + 10.0 * REMEMBERED, decode_s=10.0)
    assert price.price == pytest.approx(MOST / e)
    price.settle(1e9, decode_s=10.0)
    assert price.price == 1.0


def test_who_is_refused_for_another_reason_than_room_does_not_raise_its_price():
    view = make_view(1, 1)
    view.rejected(RejectReason.TTFT)
    view.rejected(RejectReason.TBT, has_room=True)
    assert view.room_price.price == 1.0


def test_who_has_no_bound_or_is_asked_late_is_not_judged_by_steps():
    endless = Steps(1e9)
    assert refused(Slo(ttft_slo_s=1e9), cost=endless) is None
    late = SchedulerSettings(reject=RejectPolicy.LATE)
    assert refused(Slo(tbt_slo_s=1e-9), late, cost=endless) is None
    assert endless.asked == []


def busy_view(num_running):
    """One prefill and two decode nodes, on the first of which so many requests of 10 blocks decode."""
    view = make_view(1, 2)
    view.heartbeat(NodeId("d1"), make_heartbeat(is_draining=True), 0.0)
    for number in range(num_running):
        request = make_request(f"b{number}")
        view.placed(request, placed(view, request), 0.0)
        view.prefill_done(request.request_id, 0.0)
    view.heartbeat(NodeId("d1"), make_heartbeat(), 0.0)
    view.projection.restore(30.0)
    return view


@pytest.mark.parametrize(("running", "retry_s"), [(1, 30.0), (10, 3.0), (100, RETRY_AFTER_S[0]), (0, 30.0)])
def test_who_meets_a_full_pool_may_come_back_when_one_has_left_it(running, retry_s):
    assert busy_view(0).projection.decode_s == 30.0
    _, retry_after_s, _ = refused(Slo(tbt_slo_s=1e-9), view=busy_view(running))
    assert retry_after_s == pytest.approx(retry_s)


def test_early_looks_at_the_mean_node_and_predict_at_that_of_then():
    view, request = busy_view(4), make_request("r", blocks=3)
    placement = replace(placed(view, request), decode_node=NodeId("d0"))
    running = view.running_context_tokens
    assert running > 4 * 10 * BLOCK_SIZE
    view.corrections.restore(NodeId("d0"), "decode", 2.0)
    early, predict = Steps(0.5), Steps(0.5)
    assert decode_tbt_s(request, placement, view, early, EARLY, 0.0) == 1.0
    assert decode_tbt_s(request, placement, view, predict, PREDICT, 0.0) == 1.0
    assert early.asked == [(4 / 2 + 1, running / 2 + 3 * BLOCK_SIZE)]
    sequences, tokens = view.projected(placement.predicted_ttft_s, 0.0)
    assert 0 < sequences <= 4
    assert predict.asked == [(sequences / 2 + 1, tokens / 2 + 3 * BLOCK_SIZE)]


@pytest.mark.parametrize("policy", [EARLY, PREDICT])
def test_a_prefill_node_that_decodes_a_little_is_no_room_on_the_node_that_was_chosen(policy):
    view, request = busy_view(8), make_request("r", blocks=3)
    view.heartbeat(NodeId("d1"), make_heartbeat(is_draining=True), 0.0)
    placement = replace(placed(view, request), decode_node=NodeId("d0"))
    lent = make_request("lent", first_block=9_000)
    view.placed(lent, replace(placed(view, lent), prefill_node=NodeId("p0"), decode_node=NodeId("p0")), 0.0)
    view.prefill_done(lent.request_id, 0.0)
    assert view.lent_mask
    bound = Slo(tbt_slo_s=tbt_slo_for(COST.decode_step_s(7, view.running_context_tokens), COST))
    asked = replace(request, slo=bound)
    assert not admit_to_decode(view.node(NodeId("d0")), COST, request.num_tokens, bound, policy)
    reason, *_ = refusal(asked, placement, view, COST, SchedulerSettings(reject=policy), 0.0)
    assert reason is RejectReason.TBT


@pytest.mark.parametrize("seed", range(5))
def test_who_is_taken_without_a_projection_would_be_taken_by_it(seed):
    rng = random.Random(seed)
    view, request = busy_view(30), make_request("r", blocks=3)
    for _ in range(20):
        view.projection.observe(rng.expovariate(0.2), 1)
    for _ in range(rng.randrange(3)):
        view.rejected(RejectReason.TBT)
    placement, now_s, taken = placed(view, request), rng.uniform(0.0, 20.0), []
    others_s = displaced_s(request, placement, view, COST, now_s)
    predicted_s = decode_tbt_s(request, placement, view, COST, PREDICT, now_s) + others_s
    for tbt_s in (COST.decode_step_s(0, 0) * (1 + number / 100) for number in range(300)):
        asked = replace(request, slo=Slo(tbt_slo_s=tbt_s))
        taken.append(refusal(asked, placement, view, COST, PREDICTING, now_s) is None)
        assert taken[-1] == (predicted_s <= step_limit_s(tbt_s, COST))
    assert {*taken} == {True, False}


def test_predict_looks_past_the_prefill_from_now_on():
    view, request = busy_view(4), make_request("r", blocks=3)
    placement = replace(placed(view, request), predicted_ttft_s=25.0)
    then = Steps(0.5)
    decode_tbt_s(request, placement, view, then, PREDICT, 20.0)
    sequences, tokens = view.projected(45.0, 20.0)
    assert (sequences, tokens) != view.projected(5.0, 0.0)
    assert then.asked == [(sequences / 2 + 1, tokens / 2 + 3 * BLOCK_SIZE)]


@pytest.mark.parametrize("policy", [EARLY, RejectPolicy.LATE, PREDICT])
def test_the_second_test_is_for_the_same_share_of_the_bound(policy):
    node = busy_view(4).node(NodeId("d0"))
    bound_s = 1.0 * TBT_HEADROOM
    node.learned.decode = LearnedTerm(2.0, 1.0)
    fits, slow = Steps(bound_s / 2), Steps(nextafter(bound_s, 2) / 2)
    assert admit_to_decode(node, fits, 700, Slo(tbt_slo_s=1.0), policy)
    assert not admit_to_decode(node, slow, 700, Slo(tbt_slo_s=1.0), policy)
    assert fits.asked == [(5, node.running_context_tokens + 700)]


def test_the_second_test_takes_what_has_no_bound_and_everything_without_a_policy():
    node, endless = busy_view(1).node(NodeId("d0")), Steps(1e9)
    assert admit_to_decode(node, endless, 1, Slo(tbt_slo_s=inf), PREDICT)
    assert admit_to_decode(node, endless, 1, Slo(tbt_slo_s=1e-9), RejectPolicy.NONE)
    assert not admit_to_decode(node, Steps(1.0), 1, Slo(tbt_slo_s=1.0), PREDICT)


def test_a_node_with_few_places_is_part_of_a_pool_that_has_many():
    view = make_view(1, 0)
    for name, max_batch in (("d0", 8), ("d1", 256)):
        view.add_node(make_info(name, Role.DECODE, max_batch=max_batch), 0.0)
    cost, nodes = make_cost(), []
    slo = Slo(tbt_slo_s=2 * cost.decode_step_s(60, 60 * BLOCK_SIZE))
    for number in range(100):
        request = make_request(str(number), blocks=1, first_block=number, slo=slo)
        placement = require_placement(place(request, view, cost, 0.0))
        view.placed(request, placement, 0.0)
        view.prefill_done(request.request_id, 0.0)
        nodes.append(placement.decode_node)
    assert 8 <= nodes.count("d0") < 16


def crowded_tbt_s(policy, rows, lengths):
    """Return the gap predicted on one node of 10 places where so many decode already, or wait for a place."""
    view, request = make_view(1, 0), make_request()
    view.add_node(make_info("d0", Role.DECODE, max_batch=10), 0.0)
    for tokens in lengths:
        view.projection.observe(0.01 * tokens, tokens)
    view.heartbeat(NodeId("d0"), make_heartbeat(num_step_rows=rows, num_context_tokens=1_000 * rows), 0.0)
    return decode_tbt_s(request, placed(view, request), view, COST, policy, 0.0)


@pytest.mark.parametrize("policy", [EARLY, PREDICT])
def test_the_wait_for_a_place_counts_for_the_few_tokens_of_a_short_answer(policy):
    alike, differing = [100] * 100, [25] * 5 + [100] * 90 + [175] * 5
    assert crowded_tbt_s(policy, 9, alike) == crowded_tbt_s(policy, 9, differing), "each has a place"
    context_tokens = 14_000 + make_request().num_tokens
    step_s = COST.placed_step_s(15, context_tokens, 10)
    assert crowded_tbt_s(policy, 14, alike) == pytest.approx(1.5 * step_s)
    assert crowded_tbt_s(policy, 14, differing) == pytest.approx((1 + 4 * 0.5) * step_s)
