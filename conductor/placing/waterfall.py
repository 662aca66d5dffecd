"""The waterfall of one attempt: its parts one after the other, as predicted and as they went.

    received    read and tokenised                      nobody predicts it
    waited      for a placement                         known when it is placed
    ahead       of a rejected one: those who waited before it
    dispatched  messages                                learned
    queued      to be computed; beneath: loaded         the queue, or the fetch where that is longer
    prefilled   in chunks; beneath: written             the cost model's
    handed over what of the writing shows               the cost model's
    decoded     the steps after the first token         the predicted TBT, for as many tokens

A part that lies beneath another takes no time of its own. A rejected attempt has the parts that it would have
had, none of which was. Made from the decision and the outcome that are kept anyway: nothing is recorded.
"""

from __future__ import annotations

from typing import NamedTuple

from conductor.placing.decisions import Actual, Decision
from conductor.placing.placement import Placement


class WaterfallPart(NamedTuple):
    """One part of an attempt. Seconds; None: not predicted, or not known."""

    name: str
    predicted_s: float | None
    actual_s: float | None
    beneath: str = ""
    """The part within which it lies; empty: none."""


def waterfall(
    made: Decision, actual: Actual | None, begun_at_s: float, instead: Placement | None = None
) -> list[WaterfallPart]:
    """Return the parts of an attempt in their order.

    Args:
        actual: How it went; None: it runs, or it was rejected.
        begun_at_s: When it began to wait: the request's arrival, or the end of the attempt before.
        instead: The placement that a rejection refused.
    """
    waited_s = made.decided_at_s - begun_at_s
    placed, went = made.result, actual or Actual(0.0, "")
    parts = [
        WaterfallPart("received", None, went.frontend_s if actual else None),
        WaterfallPart("waited", waited_s, waited_s),
    ]
    if not isinstance(placed, Placement):
        return parts if instead is None else [*parts, *_refused(made, instead)]
    first_s = None if went.ttft_s is None else made.arrived_at_s + went.ttft_s - made.decided_at_s
    dispatched_s = decoded_s = None
    if first_s is not None and None not in (went.queue_s, went.compute_s, went.exposed_transfer_s):
        known_s = sum(each or 0.0 for each in (went.queue_s, went.compute_s, went.exposed_transfer_s))
        dispatched_s = max(0.0, first_s - known_s)
    steps = max(0, went.num_output_tokens - 1)
    if went.mean_tbt_s is not None:
        decoded_s = went.mean_tbt_s * steps
    return [
        *parts,
        WaterfallPart("dispatched", placed.dispatch_s, dispatched_s),
        WaterfallPart("queued", max(placed.queue_s, placed.fetch_s), went.queue_s),
        WaterfallPart("loaded", placed.fetch_s, went.load_s, beneath="queued"),
        WaterfallPart("prefilled", placed.prefill_s, went.compute_s),
        WaterfallPart("written", None, went.transfer_s, beneath="handed over"),
        WaterfallPart("handed over", placed.handoff_s, went.exposed_transfer_s),
        WaterfallPart("decoded", placed.predicted_tbt_s * steps if actual else None, decoded_s),
    ]


def _refused(made: Decision, instead: Placement) -> list[WaterfallPart]:
    """Return what a rejected request would have gone through until its first token."""
    ahead_s = max(0.0, made.asked.waited_s - (made.decided_at_s - made.arrived_at_s))
    return [
        WaterfallPart("ahead", ahead_s, None),
        WaterfallPart("dispatched", instead.dispatch_s, None),
        WaterfallPart("queued", max(instead.queue_s, instead.fetch_s), None),
        WaterfallPart("prefilled", instead.prefill_s, None),
        WaterfallPart("handed over", instead.handoff_s, None),
    ]
