"""Prompt logprobs: how likely the model finds the tokens that it is given.

Row i of a prompt's logits says how likely each token is to come after token i, so it has the log probability
of token i + 1. Whoever asks for them has all rows of the prompt kept where others need the last one alone. So
such a prompt is computed in shorter chunks (`Scheduler`), and its cached blocks are of no use: K and V are in
them, and no logits.
"""

from __future__ import annotations

import torch

from base.prompt_logprobs import PromptLogprobs
from engine.step import StepEntry, StepPlan

SLICE_ROWS = 64
"""Rows whose log probabilities are computed at once: of a large vocabulary, 40 MB."""


def scored_rows(plan: StepPlan) -> list[int]:
    """Return the tokens of a step, by their place in it, whose logits say how likely a prompt's token is."""
    rows: list[int] = []
    start = 0
    for entry in plan.entries:
        rows += range(start, start + entry.num_scored)
        start += entry.num_tokens
    return rows


@torch.inference_mode()
def logprobs_of_prompts(logits: torch.Tensor, plan: StepPlan) -> tuple[PromptLogprobs | None, ...]:
    """Return what a step's entries have of their prompts, from the logits [num_scored, vocab_size] of all."""
    if not len(logits):
        return ()
    found: list[PromptLogprobs | None] = []
    start = 0
    for entry in plan.entries:
        rows, start = logits[start : start + entry.num_scored], start + entry.num_scored
        found.append(_of_entry(rows, entry) if entry.num_scored else None)
    return tuple(found)


def _of_entry(logits: torch.Tensor, entry: StepEntry) -> PromptLogprobs:
    sequence = entry.sequence
    follow = sequence.token_ids[entry.start + 1 : entry.start + 1 + entry.num_scored]
    token_ids = torch.tensor(follow, device=logits.device)
    all_found = PromptLogprobs()
    for begin in range(0, len(logits), SLICE_ROWS):
        logprobs = logits[begin : begin + SLICE_ROWS].float().log_softmax(-1)
        chosen = token_ids[begin : begin + SLICE_ROWS]
        top = logprobs.topk(sequence.num_prompt_logprobs or 0, dim=-1)
        found = (logprobs.gather(-1, chosen[:, None]), top.indices.int(), top.values)
        # The host waits for the device here: the numbers are what was asked for.
        all_found = all_found.extended(PromptLogprobs(*(each.cpu().numpy().tobytes() for each in found)), 0)
    return all_found
