"""Step memory: a plan's numbers as one run of int32, on the host and at a fixed place on the device.

This is the only place where a plan's lists become tensors. A step needs a dozen small ones. They lie one
behind the other in one buffer, so that a step costs one copy to the device, and at addresses that follow from
the step's shape alone, so that a CUDA graph finds them where it was captured. On a GPU a shape is rounded up
to a size of the ladder, and padding says so in its values (slot -1, length 0); on a CPU it is the plan's own
(`batch.py`). The tokens of all sequences lie in one row, entries of one token first.

A token that an earlier step has sampled and the host does not know yet is named by the row of that step in
which it was sampled (`sources`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from base.request import SamplingParams
from engine.prefix_groups import NUM_FIELDS, PrefixGroups
from engine.sampler import GREEDY_BELOW, MASK_64
from engine.sequence import Sequence
from engine.step import StepEntry, StepPlan

Numbers = NDArray[np.int32]
T = TypeVar("T")

ALIGN = 4
"""Regions start at multiples of 16 bytes, which kernels turn into wide loads."""

FIELDS = 8
"""int32 of a row: bits of temperature, min-p and top-p; top-k; seed, low word first; position; nothing."""

POSITION = 6
"""Index of the position in a row, the only field that differs from step to step."""

MAX_KEPT_VIEWS = 64
"""Number of shapes whose views are kept: more than a ladder has."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes that the addresses in a step's memory follow from."""

    num_tokens: int
    num_single: int
    """Sequences of one token; their tokens come first. At most `num_tokens`."""
    num_chunks: int
    max_blocks: int
    """Width of the block tables."""

    @property
    def num_rows(self) -> int:
        """Rows of logits: one for each sequence."""
        return self.num_single + self.num_chunks

    @property
    def regions(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the regions, in the order of `StepViews`."""
        tokens, chunks = (self.num_tokens,), (self.num_chunks,)
        return (
            tokens,
            tokens,
            tokens,
            tokens,
            (self.num_rows,),
            (self.num_rows, FIELDS),
            (self.num_single,),
            (NUM_FIELDS, self.num_single),
            chunks,
            (self.num_chunks + 1,),
            (self.num_single, self.max_blocks),
            (self.num_chunks, self.max_blocks),
        )

    @property
    def size(self) -> int:
        """int32 that the whole takes."""
        return sum(_padded(region) for region in self.regions)


class StepViews(NamedTuple, Generic[T]):
    """The regions of a step's memory; int32, tensors or the host's arrays."""

    token_ids: T
    sources: T
    """Row of the last step's samples that holds the token; -1: it is in `token_ids`."""
    positions: T
    slots: T
    """block_id * block_size + offset; -1: padding."""
    logit_rows: T
    """Token whose logits are wanted, for each sequence; 0 where none are."""
    sampling: T
    """How each sequence's next token is chosen, as `sample_rows` reads it; zeros: the best one."""
    single_lens: T
    """Context of each sequence of one token; 0: padding."""
    single_groups: T
    """How each of these shares what it begins with, as `PrefixGroups.numbers` says it; zeros: with nobody."""
    chunk_lens: T
    chunk_starts: T
    """Where each chunk's tokens start, and where the last one's end."""
    single_tables: T
    chunk_tables: T


def carve(memory: torch.Tensor, shape: StepShape) -> StepViews[torch.Tensor]:
    """Return the regions of a step of `shape` in `memory`, [>= shape.size] int32."""
    views = []
    start = 0
    for region in shape.regions:
        views.append(memory[start : start + math.prod(region)].view(region))
        start += _padded(region)
    return StepViews(*views)


def write_padding(memory: torch.Tensor, shape: StepShape) -> None:
    """Lay out a step of padding alone: it writes no KV and counts no expert.

    Whatever a step of another shape left in `memory`, [>= shape.size] int32, is gone."""
    memory[: shape.size].zero_()
    carve(memory, shape).slots.fill_(-1)


class StepWriter:
    """Writes plans into one host buffer, which no copy reads meanwhile.

    Block tables and how to sample change little from step to step; only rows that changed are written.

    Args:
        groups: Of the sequences that decode; None: nobody shares what is read.
    """

    def __init__(
        self, capacity: int, block_size: int, pinned: bool, groups: PrefixGroups | None = None
    ) -> None:
        self.memory = torch.zeros(capacity, dtype=torch.int32, pin_memory=pinned)
        self._block_size = block_size
        self._views: dict[StepShape, StepViews[Numbers]] = {}
        self._shape: StepShape | None = None
        self._rows: list[tuple[int, ...]] = []
        self._sequences: list[Sequence | None] = []
        self._groups = groups
        self._written = 0
        """The version of the groups that the buffer holds."""

    def write(self, plan: StepPlan, shape: StepShape, rows_of: Mapping[Sequence, int]) -> torch.Tensor:
        """Lay out `plan` and return the part of `memory` that holds it.

        `rows_of` are the rows in which the last step sampled its sequences' tokens."""
        views = self._views_of(shape)
        if shape != self._shape:
            self._shape, self._rows = shape, [()] * shape.num_rows
            self._sequences = [None] * shape.num_rows
            self._written = 0
            views.sampling[:] = 0
            views.single_groups[:] = 0
        singles, chunks = plan.entries[: plan.num_single], plan.entries[plan.num_single :]
        self._write_singles(views, singles, rows_of)
        self._write_chunks(views, shape, chunks, plan.num_single)
        self._write_sampling(views, 0, shape.num_single, singles)
        self._write_sampling(views, shape.num_single, shape.num_rows, chunks)
        return self.memory[: shape.size]

    def _views_of(self, shape: StepShape) -> StepViews[Numbers]:
        # Captured shapes come again and again; others are as many as there are lengths.
        views = self._views.get(shape)
        if views is None:
            views = StepViews(*(view.numpy() for view in carve(self.memory, shape)))
            if len(self._views) < MAX_KEPT_VIEWS:
                self._views[shape] = views
        return views

    def _write_singles(
        self, views: StepViews[Numbers], entries: tuple[StepEntry, ...], rows_of: Mapping[Sequence, int]
    ) -> None:
        count = len(entries)
        known = [entry.start < len(entry.sequence.token_ids) for entry in entries]
        views.token_ids[:count] = [
            entry.sequence.token_ids[entry.start] if is_known else 0
            for entry, is_known in zip(entries, known, strict=True)
        ]
        views.sources[:count] = [
            -1 if is_known else rows_of[entry.sequence]
            for entry, is_known in zip(entries, known, strict=True)
        ]
        views.positions[:count] = [entry.start for entry in entries]
        views.single_lens[:count] = views.positions[:count] + 1
        views.single_lens[count:] = 0
        size = self._block_size
        views.slots[:count] = [
            entry.block_table[entry.start // size] * size + entry.start % size for entry in entries
        ]
        views.logit_rows[:count] = range(count)
        for row, entry in enumerate(entries):
            self._write_table(views.single_tables, row, row, entry)
        if self._groups is not None:
            self._groups.arrange(entries)
            if self._written != self._groups.version:
                self._written = self._groups.version
                views.single_groups[:, :count] = self._groups.numbers()
                views.single_groups[:, count:] = 0

    def _write_chunks(
        self, views: StepViews[Numbers], shape: StepShape, entries: tuple[StepEntry, ...], num_single: int
    ) -> None:
        start = num_single
        views.logit_rows[num_single:] = 0
        for index, entry in enumerate(entries):
            stop = start + entry.num_tokens
            positions = np.arange(entry.start, entry.context_len, dtype=np.int32)
            table = np.array(entry.block_table, dtype=np.int32)
            # array reads a list of numbers twice as fast as numpy
            token_ids = array("i", entry.sequence.token_ids[entry.start : entry.context_len])
            views.token_ids[start:stop] = np.frombuffer(token_ids, np.int32)
            views.positions[start:stop] = positions
            views.slots[start:stop] = table[positions // self._block_size] * self._block_size
            views.slots[start:stop] += positions % self._block_size
            views.chunk_starts[index] = start
            views.chunk_lens[index] = entry.context_len
            views.logit_rows[shape.num_single + index] = stop - 1
            self._write_table(views.chunk_tables, index, shape.num_single + index, entry)
            start = stop
        views.chunk_starts[len(entries) :] = start
        views.chunk_lens[len(entries) :] = 0
        views.token_ids[start:] = 0
        views.positions[start:] = 0
        views.slots[start:] = -1
        views.sources[num_single:] = -1

    def _write_sampling(
        self, views: StepViews[Numbers], start: int, stop: int, entries: tuple[StepEntry, ...]
    ) -> None:
        for row, entry in enumerate(entries, start):
            if self._sequences[row] is not entry.sequence:
                self._sequences[row] = entry.sequence
                views.sampling[row] = sampling_numbers(entry.sequence.sampling)
        used = start + len(entries)
        views.sampling[start:used, POSITION] = [entry.context_len for entry in entries]
        if any(self._sequences[used:stop]):
            self._sequences[used:stop] = [None] * (stop - used)
            views.sampling[used:stop] = 0

    def _write_table(self, tables: Numbers, index: int, row: int, entry: StepEntry) -> None:
        if self._rows[row] != entry.block_table:
            tables[index, : len(entry.block_table)] = entry.block_table
            # The rest of a captured prompt's table is read, and another shape had other numbers there.
            tables[index, len(entry.block_table) :] = 0
            self._rows[row] = entry.block_table


def sampling_numbers(sampling: SamplingParams) -> Numbers:
    """Return a row of `StepViews.sampling`, its position 0."""
    numbers = np.zeros(FIELDS, np.int32)
    if sampling.temperature > GREEDY_BELOW:
        numbers[:3] = np.array([sampling.temperature, sampling.min_p, sampling.top_p], np.float32).view(
            np.int32
        )
        numbers[3] = min(sampling.top_k, np.iinfo(np.int32).max)
        numbers[4:6] = np.array([sampling.seed & MASK_64], np.uint64).view(np.int32)
    return numbers


def _padded(region: tuple[int, ...]) -> int:
    return -(-math.prod(region) // ALIGN) * ALIGN
