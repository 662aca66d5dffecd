"""What attempts teach: of steps only those whose gaps held no prompt."""

import pytest

from base.messages import PrefillTimes
from base.request import NodeId
from conductor.placing.learner import Learner
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


@pytest.mark.parametrize("slowness", [0.5, 1.0, 2.0])
def test_prompt_beside_decoding_teaches_how_fast_the_node_is_and_not_what_others_took(slowness):
    taught = Taught()
    first, placement = taught.placed()
    taught.prefilled(first, placement)
    node = taught.view.node(NodeId("d0"))
    assert node.running_sequences == 1
    taught.view.prefill_order.set(0, 60.0)
    asked = make_request("beside", 8, 5_000)
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
