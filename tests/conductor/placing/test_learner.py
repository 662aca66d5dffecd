"""What attempts teach: of steps only those whose gaps held no prompt."""

from dataclasses import replace
from math import inf

import pytest

from base.messages import Heartbeat, PrefillTimes
from base.request import NodeId, Slo
from conductor.placing.learner import Learner, _Heard
from conductor.placing.prompt_share import share_beside_running
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from tests.conductor.builders import make_cost, make_request, make_view, require_placement

COST = make_cost()
PLAIN = SchedulerSettings(RejectPolicy.NONE)
INLINE = SchedulerSettings(RejectPolicy.NONE, roles_follow=True)


class Taught:
    """A view with one node of each role, and what it learns."""

    def __init__(self) -> None:
        self.view = make_view(1, 1)
        self.learner = Learner(self.view, COST, 0.0)
        self.num_asked = 0

    def placed(self):
        self.num_asked += 1
        asked = make_request(f"r{self.num_asked}", 2, 1_000 * self.num_asked)
        placement = require_placement(place(asked, self.view, COST, 0.0, PLAIN))
        self.view.placed(asked, placement, 0.0)
        self.learner.placed(placement, 0.0)
        return asked, placement

    def prefilled(self, asked, placement):
        self.view.prefill_done(asked.request_id, 1.0)
        self.learner.first_token(1.0, PrefillTimes(0.0, 0.5, 0.01), asked, placement, 1.0)

    def ended(self, asked):
        self.view.finished(asked.request_id, 9.0, 20)
        self.learner.ended(asked.request_id, 0.4, 9.0)

    @property
    def ratio(self):
        return self.view.corrections.ratio("d0", "decode")


def measured(learner, view, node_id, now_s, slowness):
    """Let a node compute one prompt, so many times slower than by the profile."""
    asked = make_request(f"{node_id} {now_s}", 4, int(1_000 * now_s))
    placement = require_placement(place(asked, view, COST, now_s, PLAIN))
    placement = replace(placement, prefill_node=NodeId(node_id))
    view.placed(asked, placement, now_s)
    learner.placed(placement, now_s)
    view.prefill_done(asked.request_id, now_s)
    times = PrefillTimes(0.0, slowness * COST.prefill_s(asked.num_tokens, 0), 0.01)
    learner.first_token(1.0, times, asked, placement, now_s)


@pytest.mark.parametrize("slowness", [0.5, 1.0, 2.0])
def test_prompt_beside_decoding_teaches_how_fast_the_node_is_and_not_what_others_took(slowness):
    taught = Taught()
    for _ in range(30):
        taught.prefilled(*taught.placed())
    node = taught.view.node(NodeId("d0"))
    assert node.running_sequences == 30
    taught.view.prefill_order.set(0, 60.0)
    asked = make_request("beside", 8, 500_000)
    beside = require_placement(place(asked, taught.view, COST, 0.0, INLINE))
    assert beside.is_inline
    assert beside.prefill_s > 1.05 * COST.prefill_s(asked.num_tokens, 0)
    taught.view.placed(asked, beside, 0.0)
    taught.learner.placed(beside, 0.0)
    taught.view.prefill_done(asked.request_id, 1.0)
    times = PrefillTimes(0.0, slowness * beside.prefill_s, 0.0)
    taught.learner.first_token(1.0, times, asked, beside, 1.0)
    assert taught.view.corrections.ratio("d0", "prefill") == pytest.approx(slowness)


def test_mean_gap_without_prompts_beside_teaches_what_a_step_takes():
    taught = Taught()
    asked, placement = taught.placed()
    taught.prefilled(asked, placement)
    taught.ended(asked)
    assert taught.ratio > 1.0


def test_what_one_measurement_said_of_a_node_that_gets_nothing_is_doubted_sooner_than_what_ten_said():
    view = make_view(3, 1)
    learner, corrections = Learner(view, COST, 0.0), view.corrections

    for number in range(-9, 1):
        measured(learner, view, "p0", number / 10, 5.0)
    measured(learner, view, "p1", 0.0, 5.0)
    for tenths in range(1, 80):
        measured(learner, view, "p2", tenths / 10, 1.0)
    assert corrections.ratio("p0", "prefill") == pytest.approx(5.0)
    assert corrections.ratio("p1", "prefill") < 5.0**0.3


def test_sequences_of_another_conductor_that_come_are_no_slowness_of_their_node():
    taught = Taught()
    asked, placement = taught.placed()
    taught.prefilled(asked, placement)
    node = taught.view.node(NodeId("d0"))
    alone_s = COST.decode_step_s(1, node.running_context_tokens)
    beat = Heartbeat(1, 1_000, 0, 0, 41, 0, 400_000, num_step_rows=41)
    taught.view.heartbeat(NodeId("d0"), beat, 3.0)
    assert node.foreign_sequences == 40
    crowded_s = COST.decode_step_s(41, node.running_context_tokens)
    assert crowded_s > 1.2 * alone_s
    taught.view.finished(asked.request_id, 9.0, 20)
    taught.learner.ended(asked.request_id, 8.0 / (2.0 / alone_s + 6.0 / crowded_s), 9.0)
    assert taught.ratio == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("slowness", [0.5, 1.0, 2.0])
def test_sequences_that_come_while_a_prompt_is_computed_are_no_slowness_of_its_node(slowness):
    taught = Taught()
    node = taught.view.node(NodeId("d0"))
    others = [taught.placed() for _ in range(60)]
    asked = make_request("beside", 8, 500_000)
    taught.view.prefill_order.set(0, 60.0)
    beside = require_placement(place(asked, taught.view, COST, 0.0, INLINE))
    assert (beside.is_inline, beside.prompt_share) == (True, 1.0)
    taught.view.placed(asked, beside, 0.0)
    taught.learner.placed(beside, 0.0)
    for other, placed in others:
        taught.prefilled(other, placed)
    share = share_beside_running(node, inf, COST)
    assert share < 0.9
    # alone until 1.0, and from then on beside the others
    compute_s = slowness * COST.prefill_s(asked.num_tokens, 0)
    ends_s = 5.0
    taught.view.prefill_done(asked.request_id, ends_s)
    times = PrefillTimes(0.0, compute_s * ends_s / (1.0 + share * (ends_s - 1.0)), 0.0)
    taught.learner.first_token(1.0, times, asked, beside, ends_s)
    assert taught.view.corrections.ratio("d0", "prefill") == pytest.approx(slowness)


def test_load_that_comes_and_goes_while_a_sequence_decodes_is_no_slowness_of_its_node():
    taught, num_others = Taught(), 40
    asked, placement = taught.placed()
    taught.prefilled(asked, placement)
    node = taught.view.node(NodeId("d0"))
    alone_s = COST.decode_step_s(1, node.running_context_tokens)
    others = [taught.placed() for _ in range(num_others)]
    for other, placed in others:
        taught.prefilled(other, placed)
    crowded_s = COST.decode_step_s(1 + num_others, node.running_context_tokens)
    assert crowded_s > 1.2 * alone_s
    for other, _ in others:
        taught.view.finished(other.request_id, 7.0, 20)
        taught.learner.ended(other.request_id, None, 7.0)
    # from 1.0 until 7.0 with the others, and alone until 9.0
    num_steps = 6.0 / crowded_s + 2.0 / alone_s
    taught.view.finished(asked.request_id, 9.0, 20)
    taught.learner.ended(asked.request_id, 1.5 * 8.0 / num_steps, 9.0)
    assert taught.ratio == pytest.approx(1.5, rel=0.01), "what its node is slower by, and no more"


def test_mean_gap_with_a_prompt_beside_teaches_nothing_of_steps():
    taught = Taught()
    asked, placement = taught.placed()
    taught.prefilled(asked, placement)
    taught.view.node(NodeId("d0")).num_prompts += 1  # one that the node has computed meanwhile
    taught.ended(asked)
    assert taught.ratio == 1.0


def test_mean_gap_that_began_beside_a_prompt_teaches_nothing_of_steps():
    taught = Taught()
    asked, placement = taught.placed()
    taught.view.node(NodeId("d0")).num_queued += 1
    taught.prefilled(asked, placement)
    taught.view.node(NodeId("d0")).num_queued -= 1
    taught.ended(asked)
    assert taught.ratio == 1.0


def test_a_node_that_seemed_slow_once_and_gets_nothing_is_doubted_and_one_as_slow_as_others_is_not():
    view, cold_s = make_view(3, 1), 5.0
    learner, corrections = Learner(view, COST, 0.0), view.corrections
    slow_all_round = 1.5

    for node_id, slowness in ("p0", cold_s), ("p1", slow_all_round):
        for number in range(-9, 1):
            measured(learner, view, node_id, number / 10, slowness)
    for now_s in range(1, 30):
        measured(learner, view, "p2", float(now_s), slow_all_round)
    assert corrections.ratio("p0", "prefill") == pytest.approx(cold_s)
    asked = make_request("long", 4, 900_000)
    placement = replace(require_placement(place(asked, view, COST, 29.0, PLAIN)), prefill_node=NodeId("p0"))
    view.placed(asked, placement, 29.0)
    for now_s in range(30, 100):
        measured(learner, view, "p2", float(now_s), slow_all_round)
    assert corrections.ratio("p0", "prefill") == pytest.approx(cold_s), "what it has will say how fast it is"
    view.finished(asked.request_id, 100.0)
    for now_s in range(100, 400):
        measured(learner, view, "p2", float(now_s), slow_all_round)
    assert corrections.ratio("p0", "prefill") == pytest.approx(slow_all_round, rel=0.01)
    assert corrections.ratio("p1", "prefill") == pytest.approx(slow_all_round)


def test_the_bound_of_who_has_ended_or_does_not_decode_yet_takes_nothing_from_prompts():
    taught = Taught()
    node = taught.view.node(NodeId("d0"))
    tight = make_request("tight", 2, 7_000, slo=Slo(tbt_slo_s=1.02 * COST.decode_step_s(2, 5_000)))
    waits = make_request("waits", 2, 8_000, slo=tight.slo)
    for asked in (tight, waits):
        taught.view.placed(asked, require_placement(place(asked, taught.view, COST, 0.0, PLAIN)), 0.0)
    shares = []
    first, placement = taught.placed()
    for change in (
        lambda: taught.prefilled(first, placement),
        lambda: taught.view.prefill_done(tight.request_id, 1.0),
        lambda: taught.view.finished(tight.request_id, 1.0),
    ):
        change()
        shares.append(node.passed.prompt_s_at(2.0) - node.passed.prompt_s_at(1.0))
    assert shares[1] < shares[0] == shares[2]


def test_a_node_that_decodes_is_not_doubted_for_getting_nothing():
    view = make_view(1, 2)
    learner = Learner(view, COST, 0.0)
    view.corrections.restore("d0", "decode", 3.0)
    view.corrections.restore("d1", "decode", 1.0)
    learner._heard["decode"] = {NodeId("d0"): _Heard(view.node(NodeId("d0")), 0.0, 1)}
    asked = make_request("long", 2)
    placement = replace(require_placement(place(asked, view, COST, 0.0, PLAIN)), decode_node=NodeId("d0"))
    view.placed(asked, placement, 0.0)
    view.prefill_done(asked.request_id, 1.0)
    for now_s in range(2, 40):
        learner.placed(replace(placement, request_id=f"r{now_s}", decode_node=NodeId("d1")), float(now_s))
    assert view.corrections.ratio("d0", "decode") == 3.0
    view.finished(asked.request_id, 40.0)
    for now_s in range(41, 60):
        learner.placed(replace(placement, request_id=f"r{now_s}", decode_node=NodeId("d1")), float(now_s))
    assert view.corrections.ratio("d0", "decode") < 1.1
