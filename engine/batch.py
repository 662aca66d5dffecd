"""Batch: a step's memory as a CPU computes from it, and as it travels to other ranks.

The shape is the plan's own, without padding. The model's linear layers see one row of tokens, whatever the
lengths, and attention sees two ragged halves, one for each of its two functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.prompt_logprobs import scored_rows
from engine.step import StepPlan
from engine.step_memory import StepShape, StepViews, StepWriter, carve


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one step, on the device."""

    shape: StepShape
    memory: torch.Tensor
    """[shape.size] int32."""
    logit_rows: torch.Tensor
    """[num_sampling + num_scored] int64; the tokens whose logits are wanted: those that sample, in the plan's
    order, then those of prompts whose log probabilities are. None on other ranks."""

    @property
    def views(self) -> StepViews[torch.Tensor]:
        """The regions of the memory."""
        return carve(self.memory, self.shape)


def build_batch(plan: StepPlan, block_size: int, device: torch.device) -> Batch:
    """Lay out a plan's tokens."""
    width = max((len(entry.block_table) for entry in plan.entries), default=0)
    shape = StepShape(plan.num_tokens, plan.num_single, len(plan.entries) - plan.num_single, width)
    memory = StepWriter(shape.size, block_size, pinned=False).write(plan, shape, {}).to(device)
    sampling = [row for row, entry in enumerate(plan.entries) if entry.samples]
    rows = carve(memory, shape).logit_rows[sampling].long()
    if scored := scored_rows(plan):
        rows = torch.cat([rows, torch.tensor(scored, device=device)])
    return Batch(shape, memory, rows)


def batch_numbers(batch: Batch) -> torch.Tensor:
    """Return a batch as one row of int64, from which `batch_from_numbers` makes it again."""
    shape = batch.shape
    header = torch.tensor([shape.num_tokens, shape.num_single, shape.num_chunks, shape.max_blocks])
    return torch.cat([header, batch.memory.cpu().long()])


def batch_from_numbers(numbers: torch.Tensor, device: torch.device) -> Batch:
    """Return the batch of `batch_numbers` for another rank, whose logits nobody wants."""
    return Batch(
        StepShape(*numbers[:4].tolist()), numbers[4:].int().to(device), numbers.new_empty(0).to(device)
    )
