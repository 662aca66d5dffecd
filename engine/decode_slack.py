"""How long the sequences that decode can wait for a step, from what each has had of its bounds.

`base/step_budget.py` says what is due when, and what a step may take by it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from base.step_budget import KEPT_LONGEST, KEPT_MEAN, DecodeLoad, is_lost, target_gap_s
from base.step_cost import StepCorrection, StepCost
from engine.sequence import Sequence
from engine.step import StepPlan


def decode_load(
    sequences: Iterable[Sequence], cost: StepCost, correction: StepCorrection, now_s: float
) -> DecodeLoad:
    """Return what a step that begins now decodes of these sequences; notes whose bound turns out to be
    lost."""
    rows = [sequence for sequence in sequences if sequence.num_plannable_tokens == 1]
    if not rows:
        return DecodeLoad()
    context_tokens = sum(row.num_tokens - 1 for row in rows)
    empty_s = cost.decode_step_s(len(rows), context_tokens) * correction.ratio(False)
    decoding = [row for row in rows if row.first_token_at_s is not None]
    mean_left_s, first = _first_due(decoding, empty_s, now_s)
    longest_left_s = min((_longest_left_s(row, empty_s, now_s) for row in decoding), default=inf)
    saving_s = 0.0 if first is None else KEPT_MEAN * first.gap_bounds.mean_s - empty_s
    return DecodeLoad(len(rows), context_tokens, mean_left_s, longest_left_s, saving_s)


def predicted_step_s(plan: StepPlan, cost: StepCost) -> float:
    """Return the seconds that the profile says to a step."""
    singles, chunks = plan.entries[: plan.num_single], plan.entries[plan.num_single :]
    context_tokens = sum(entry.start for entry in singles)
    if not chunks:
        return cost.decode_step_s(len(singles), context_tokens)
    attended = sum(entry.num_tokens * (entry.num_tokens + 2 * entry.start) for entry in chunks)
    num_tokens = sum(entry.num_tokens for entry in chunks)
    return cost.with_chunks_s(num_tokens, attended, len(singles), context_tokens)


def _first_due(decoding: Iterable[Sequence], empty_s: float, now_s: float) -> tuple[float, Sequence | None]:
    """Return the seconds until the first token is due by a bound on the mean gap, and whose it is."""
    bound = [row for row in decoding if row.gap_bounds.mean_s != inf and not row.is_mean_lost]
    while bound:
        first = min(bound, key=_due_s)
        left_s = _due_s(first) - now_s
        gaps_left = max(1, first.stop.max_tokens - first.num_generated_tokens)
        if not is_lost(left_s, gaps_left, first.gap_bounds.mean_s, empty_s):
            return left_s, first
        first.is_mean_lost = True
        bound.remove(first)
    return inf, None


def _due_s(sequence: Sequence) -> float:
    assert sequence.first_token_at_s is not None
    return sequence.first_token_at_s + KEPT_MEAN * sequence.gap_bounds.mean_s * (sequence.num_gaps + 1)


def _longest_left_s(sequence: Sequence, empty_s: float, now_s: float) -> float:
    bounds, since_s = sequence.gap_bounds, now_s - sequence.last_token_at_s
    longest_s = inf
    if bounds.longest_s != inf:
        longest_s = KEPT_LONGEST * bounds.longest_s - since_s
    elif bounds.mean_s == inf or sequence.is_mean_lost:
        longest_s = target_gap_s(empty_s)
    return longest_s
