"""Batch: a plan as tensors. The only place where lists become tensors.

The tokens of all sequences lie in one row, sequence after sequence, entries of one
token first: the model's linear layers see one matrix, whatever the lengths, and
attention sees two ragged halves, one for each of its two functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.step import StepPlan


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where the KV of some sequences is."""

    block_tables: torch.Tensor
    """[num_seqs, max_blocks] int32; entries past a sequence's last block are 0."""
    context_lens: torch.Tensor
    """[num_seqs] int32; tokens of the sequence up to its last in this step."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one step, on the device."""

    token_ids: torch.Tensor
    """[1, num_tokens] int64."""
    position_ids: torch.Tensor
    """[1, num_tokens] int64."""
    slots: torch.Tensor
    """[num_tokens] int64; block_id * block_size + offset, where a token's KV is written."""
    logit_rows: torch.Tensor
    """[num_sampling] int64; the tokens whose logits are wanted, in the plan's order."""
    num_single: int
    """Tokens, at the front, that are the only one of their sequence."""
    singles: PagedRows
    """Of the first `num_single` sequences."""
    chunks: PagedRows
    """Of the others."""
    query_starts: torch.Tensor
    """[num_chunks + 1] int32; where each chunk starts, counted from token `num_single`."""


def build_batch(plan: StepPlan, block_size: int, device: torch.device) -> Batch:
    """Lay out a plan's tokens."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    query_starts = [0]
    for entry in plan.entries:
        stop = entry.start + entry.num_tokens
        token_ids += entry.sequence.token_ids[entry.start : stop]
        positions += range(entry.start, stop)
        slots += _slots(entry.block_table, entry.start, stop, block_size)
        if entry.samples:
            logit_rows.append(len(token_ids) - 1)
        if entry.num_tokens > 1:
            query_starts.append(len(token_ids) - plan.num_single)
    return Batch(
        token_ids=torch.tensor([token_ids], dtype=torch.int64, device=device),
        position_ids=torch.tensor([positions], dtype=torch.int64, device=device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        num_single=plan.num_single,
        singles=_paged_rows(plan, slice(0, plan.num_single), block_size, device),
        chunks=_paged_rows(plan, slice(plan.num_single, None), block_size, device),
        query_starts=torch.tensor(query_starts, dtype=torch.int32, device=device),
    )


def batch_numbers(batch: Batch) -> torch.Tensor:
    """Return a batch as one row of int64, from which `batch_from_numbers` makes it again."""
    parts = (
        batch.token_ids,
        batch.position_ids,
        batch.slots,
        batch.logit_rows,
        batch.query_starts,
        batch.singles.context_lens,
        batch.chunks.context_lens,
        batch.singles.block_tables,
        batch.chunks.block_tables,
    )
    sizes = torch.tensor([batch.num_single, *(part.numel() for part in parts)])
    return torch.cat([sizes, *(part.cpu().flatten().long() for part in parts)])


def batch_from_numbers(numbers: torch.Tensor, device: torch.device) -> Batch:
    """Return the batch of `batch_numbers`."""
    num_single, *sizes = numbers[:10].tolist()
    parts = torch.split(numbers[10:].to(device), sizes)
    token_ids, positions, slots, logit_rows = parts[:4]
    query_starts, single_lens, chunk_lens, single_tables, chunk_tables = (part.int() for part in parts[4:])
    return Batch(
        token_ids=token_ids[None],
        position_ids=positions[None],
        slots=slots,
        logit_rows=logit_rows,
        num_single=num_single,
        singles=PagedRows(_rows_of(single_tables, len(single_lens)), single_lens),
        chunks=PagedRows(_rows_of(chunk_tables, len(chunk_lens)), chunk_lens),
        query_starts=query_starts,
    )


def _rows_of(tables: torch.Tensor, num_rows: int) -> torch.Tensor:
    return tables.view(num_rows, len(tables) // num_rows if num_rows else 0)


def _slots(block_table: tuple[int, ...], start: int, stop: int, block_size: int) -> list[int]:
    slots: list[int] = []
    while start < stop:
        index, offset = divmod(start, block_size)
        end = min(stop, start - offset + block_size)
        first = block_table[index] * block_size + offset
        slots += range(first, first + end - start)
        start = end
    return slots


def _paged_rows(plan: StepPlan, part: slice, block_size: int, device: torch.device) -> PagedRows:
    entries = plan.entries[part]
    used = [entry.block_table[: -(-entry.context_len // block_size)] for entry in entries]
    width = max((len(table) for table in used), default=0)
    # Block 0 stands where nothing is read; it is always a valid block.
    tables = [[*table, *[0] * (width - len(table))] for table in used]
    context_lens = [entry.context_len for entry in entries]
    return PagedRows(
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device).view(len(entries), width),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
    )
