"""Rejections explained: what was judged, against which limit, and what the cluster lacked.

Worked out from the recorded decision by the functions that judged it (`admission.py`), on the placement that
would have been carried out. What was lacking is one of

    prefill    prefill nodes: an idle one would have had the first token ready in time
    decode     decode nodes: an empty one would have had short steps, or room
    speed      faster nodes: not even an idle one would have kept the bound, however many there are
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import NamedTuple

from base.request import Slo, finite_or_none
from conductor.placing.admission import decode_tbt_s, displaced_s, step_limit_s
from conductor.placing.cost_model import CostModel
from conductor.placing.decisions import Decision, view_of
from conductor.placing.placement import Placement, PlacementRequest, Rejection, RejectReason
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings

LACKS = ("prefill", "decode", "speed")


class Admissible(NamedTuple):
    """The seconds that a prediction may take to be admitted; infinity: any."""

    ttft_s: float
    tbt_s: float


def limits_of(
    slo: Slo, settings: SchedulerSettings, cost: CostModel, is_promised: bool = False, ratio: float = 1.0
) -> Admissible:
    """Return what admission lets predictions be under some bounds; `ratio` as for `step_limit_s`."""
    if settings.reject is RejectPolicy.NONE:
        return Admissible(inf, inf)
    tbt_s = inf if settings.reject is RejectPolicy.LATE else step_limit_s(slo.tbt_slo_s, cost, ratio)
    return Admissible(slo.ttft_slo_s * (1.0 if is_promised else settings.ttft_headroom), tbt_s)


def lacking(
    asked: PlacementRequest,
    reason: RejectReason,
    computing_s: float,
    cost: CostModel,
    settings: SchedulerSettings,
) -> str:
    """Return which of `LACKS` it was. `computing_s`: of the prompt, on a node that does nothing else."""
    limits = limits_of(asked.slo, settings, cost, asked.is_promised)
    match reason:
        case RejectReason.TTFT:
            return "speed" if computing_s > limits.ttft_s else "prefill"
        case RejectReason.TBT:
            return "speed" if cost.decode_step_s(1, asked.num_tokens) > limits.tbt_s else "decode"
        case RejectReason.NO_FREE_BLOCKS | RejectReason.NO_DECODE_NODE:
            return "decode"
        case _:
            return "prefill"


class Judged(NamedTuple):
    """The numbers that a rejected request was judged by. Seconds; None: unbounded."""

    lacks: str
    ahead_s: float
    """Others' prompts before it, of those who wait at the conductor."""
    ttft_s: float
    ttft_limit_s: float | None
    tbt_s: float
    """The step that it would have met, and `displaced_s`."""
    tbt_limit_s: float | None
    displaced_s: float
    """Added because it takes the room of several, while many are refused."""


def would_be(made: Decision, cost: CostModel, settings: SchedulerSettings) -> Placement | None:
    """Return the placement that was refused; None: none was considered, or its nodes were not recorded."""
    refused = made.result
    if not isinstance(refused, Rejection) or refused.reason.is_of_queue or made.seen.nodes is None:
        return None
    taken = replace(settings, reject=RejectPolicy.NONE)
    found = place(made.asked, view_of(made, cost), cost, made.decided_at_s, taken)
    return found if isinstance(found, Placement) else None


def judged(made: Decision, instead: Placement, cost: CostModel, settings: SchedulerSettings) -> Judged:
    """Return what was judged of a rejection: `instead` is the placement that it refused."""
    asked, view = made.asked, view_of(made, cost)
    view.settle(made.decided_at_s)
    ratio = view.node(instead.decode_node).learned.decode.ratio
    limits = limits_of(asked.slo, settings, cost, asked.is_promised, ratio)
    added_s = 0.0
    if settings.reject is RejectPolicy.PREDICT:
        added_s = displaced_s(asked, instead, view, cost, made.decided_at_s)
    tbt_s = instead.predicted_tbt_s
    if asked.max_tokens:
        tbt_s = decode_tbt_s(asked, instead, view, cost, settings.reject, made.decided_at_s) + added_s
    assert isinstance(made.result, Rejection)
    computing_s = view.computing_s(asked.chain, asked.num_tokens)
    return Judged(
        lacking(asked, made.result.reason, computing_s, cost, settings),
        max(0.0, asked.waited_s - (made.decided_at_s - made.arrived_at_s)),
        asked.waited_s + instead.predicted_ttft_s,
        finite_or_none(limits.ttft_s),
        tbt_s,
        finite_or_none(limits.tbt_s),
        added_s,
    )
