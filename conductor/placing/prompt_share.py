"""The share of a node's time that prompts have beside what decodes there."""

from __future__ import annotations

from math import inf

from base.step_budget import KEPT_MEAN, WELL_WORTHWHILE, target_gap_s
from conductor.placing.cost_model import CostModel
from conductor.placing.node_state import NodeState

MOST_LOAD = 0.95

# Of a node's time, for prompts: with less a prompt is not begun.
LEAST_SHARE = 0.02

# Of the time that prompts have: the rest is what steps take for any chunk, however short.
CHUNK_SHARE = WELL_WORTHWHILE / (WELL_WORTHWHILE + 1)


def prompt_share(step_s: float, bound_s: float) -> float:
    """Return the share of a node's time that a prompt has beside what decodes there; not more than 0: none.

    Args:
        step_s: Predicted seconds of a step without prompts.
        bound_s: The tightest bound on TBT of those who decode; infinity: there is none.
    """
    return share_beside(step_s, target_gap_s(step_s) if bound_s == inf else KEPT_MEAN * bound_s)


def share_beside_running(node: NodeState, step_s: float) -> float:
    """Return the share that prompts have beside those who decode on a node now.

    `step_s`: seconds of their step by the profile.
    """
    if not node.running_sequences:
        return 1.0
    return max(LEAST_SHARE, prompt_share(step_s * node.learned.decode.ratio, node.tightest_running_s))


def share_when_begun(node: NodeState, cost: CostModel) -> float:
    """Return the share of a prefill node's time that a prompt will have which is placed there now.

    Most who are to decode there will have begun when its turn comes: their prompts are before it. Where
    another node computes them they may come later, and the prompt is predicted too long.
    """
    step_s = cost.placed_step_s(node.decode_sequences, node.decode_context_tokens, node.places)
    return prompt_share(step_s * node.learned.decode.ratio, node.tightest_tbt_s)


def share_beside(step_s: float, length_s: float) -> float:
    """Return the share of prompts in steps of a length, `step_s` of which are for those who decode."""
    return CHUNK_SHARE * (length_s - step_s) / length_s


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
