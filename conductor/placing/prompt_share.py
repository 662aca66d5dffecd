"""The share of a node's time that prompts have beside what decodes there.

Where those who decode bear gaps of a length, a step with a chunk may take that. `around` are its seconds that
are not the chunk's tokens': what it takes for any chunk, and for those who decode. A chunk that would be too
short for its step is not begun: some steps without prompts save for it, as `base/step_budget.py` has it.

    share = 1 - (saving steps x step + around) / ((saving steps + 1) x length)

A step has `chunk_tokens` of prompts at most. Where these end before those who decode have to have their next
tokens, steps with chunks follow each other:

    share = their seconds / (around + their seconds)
"""

from __future__ import annotations

from math import inf

from base.step_budget import (
    KEPT_MEAN,
    PATIENCE_STEPS,
    STARVED_STEPS,
    WELL_WORTHWHILE,
    WORTHWHILE,
    target_gap_s,
)
from conductor.placing.cost_model import CostModel
from conductor.placing.node_state import NodeState

MOST_LOAD = 0.95

# Of a node's time, for prompts: with less a prompt is not begun.
LEAST_SHARE = 0.02

# Of the seconds of chunks' tokens, where steps were measured: the rest is padding, and the attention of short
# chunks, which is slower.
TOKENS_SHARE = 0.93


def prompt_share(
    node: NodeState, sequences: float, context_tokens: float, step_s: float, bound_s: float, cost: CostModel
) -> float:
    """Return the share of a node's time that a prompt has beside sequences.

    Args:
        step_s: Of their step without prompts, by the profile.
        bound_s: The tightest bound on TBT of those who decode; infinity: there is none. One that their steps
            alone are past is lost, and binds nobody.
    """
    ratio = node.learned.decode.ratio
    step_s *= ratio
    around_s = cost.placed_around_s(sequences, context_tokens, node.places) * ratio
    length_s = KEPT_MEAN * bound_s
    if not step_s < length_s < inf:
        length_s = target_gap_s(step_s)
    most_s = most_tokens_s(node, sequences, cost)
    return share_beside(step_s, around_s, length_s, cost.chunk_part_s * ratio, most_s * ratio)


def most_tokens_s(node: NodeState, sequences: float, cost: CostModel) -> float:
    """Return the seconds of as many tokens of prompts as a step has beside sequences; infinity: not said."""
    if not (tokens := node.info.chunk_tokens):
        return inf
    # as `engine/scheduler.py` leaves them
    left = tokens - min(sequences, tokens // 2)
    return left * cost.step.prefill_token_s


def share_beside_running(node: NodeState, bound_s: float, cost: CostModel) -> float:
    """Return the share that prompts have beside those who decode on a node now, LEAST_SHARE at least.

    `bound_s`: the tightest bound on TBT that counts.
    """
    sequences = node.running_sequences
    if not sequences:
        return 1.0
    tokens, step_s = node.running_context_tokens, node.running_step_s
    share = prompt_share(node, sequences, tokens, step_s, bound_s, cost)
    return share if share > LEAST_SHARE else LEAST_SHARE


def share_when_begun(node: NodeState, cost: CostModel) -> float:
    """Return the share of a prefill node's time that a prompt will have which is placed there now.

    Most who are to decode there will have begun when its turn comes: their prompts are before it. Where
    another node computes them they may come later, and the prompt is predicted too long.
    """
    sequences, tokens = node.decode_sequences, node.decode_context_tokens
    step_s = cost.placed_step_s(sequences, tokens, node.places)
    return prompt_share(node, sequences, tokens, step_s, node.tightest_tbt_s, cost)


def share_beside(
    step_s: float, around_s: float, length_s: float, part_s: float, most_s: float = inf
) -> float:
    """Return the share of prompts where gaps may be of a length; not more than 0: none.

    Args:
        step_s: Of a step without prompts.
        around_s: Of a step with a chunk, but for those of its tokens.
        part_s: Of those, what it takes for any chunk; 0: no steps with chunks were measured.
        most_s: Of the tokens that it has at most.
    """
    whole_s = most_s / TOKENS_SHARE if part_s else most_s
    if (longest_s := max(step_s, around_s + whole_s)) < length_s:
        return most_s / longest_s
    saved_s = length_s - step_s
    if saved_s <= 0.0:
        return saved_s / length_s
    missing_s, steps = around_s - length_s, 0.0
    if (well_s := min(WELL_WORTHWHILE * part_s, whole_s) + missing_s) > 0.0:
        steps = min(PATIENCE_STEPS, well_s / saved_s)
        worth_s = min(WORTHWHILE * part_s, whole_s) + missing_s
        steps = max(steps, min(STARVED_STEPS, worth_s / saved_s))
    share = 1.0 - (steps * step_s + around_s) / ((steps + 1.0) * length_s)
    return share * TOKENS_SHARE if part_s else share


def decode_load(node: NodeState, cost: CostModel) -> float:
    """Return what a node decodes, as a share of what the bounds of that and its blocks allow."""
    ratio = node.learned.decode.ratio
    idle_s = cost.profile.decode_fixed_s * ratio
    step_s = cost.gap_s(node.running_sequences, node.running_context_tokens, node.places) * ratio
    bound_s = KEPT_MEAN * node.tightest_tbt_s
    if bound_s == inf or bound_s <= idle_s:
        bound_s = target_gap_s(idle_s)
    blocks = node.running_context_tokens / max(1, node.capacity_tokens)
    return max((step_s - idle_s) / (bound_s - idle_s), blocks)
