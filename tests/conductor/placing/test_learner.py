"""What attempts teach: of steps only those whose gaps held no prompt."""

from base.messages import PrefillTimes
from base.request import NodeId
from conductor.placing.learner import Learner
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from tests.conductor.builders import make_cost, make_request, make_view, require_placement

COST = make_cost()
PLAIN = SchedulerSettings(RejectPolicy.NONE)


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
