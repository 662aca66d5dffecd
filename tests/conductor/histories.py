"""A conductor's history and what it is taken from, on a clock that stands still until it is moved."""

from typing import NamedTuple

from base.config import SloConfig
from base.metrics import ConductorMetrics, process_registry
from conductor.placing.cluster_view import ClusterView
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.serving.budgets import Budgets
from conductor.serving.history import History
from conductor.serving.membership import Membership
from conductor.serving.nodes import NodeSession
from tests.conductor.builders import BLOCK_SIZE, make_cost, make_info
from tests.manual_clock import ManualClock

COST = make_cost()
SINCE_1970_S = 1_790_000_100.0


class Line(list):
    """The requests that wait to be placed, and the seconds before one that comes."""

    line_s = 0.0


class HistoryParts(NamedTuple):
    clock: ManualClock
    view: ClusterView
    metrics: ConductorMetrics
    membership: Membership
    history: History


def make_history(slo: SloConfig) -> HistoryParts:
    """Return the history of a cluster without nodes, whose clock began at `SINCE_1970_S`."""
    clock = ManualClock()
    view = ClusterView(COST, BLOCK_SIZE)
    metrics = ConductorMetrics(process_registry(), "m")
    membership = Membership("m", view, clock)
    budgets = Budgets(slo, COST, SchedulerSettings())
    history = History(metrics, membership, view, COST, clock, lambda: SINCE_1970_S + clock.now_s(), budgets)
    return HistoryParts(clock, view, metrics, membership, history)


def attach(membership: Membership, name, role, **more) -> NodeSession:
    """Attach a node; `more` is said of it."""
    session = NodeSession(make_info(name, role, model_id="m", **more))
    membership.join(session)
    return session
