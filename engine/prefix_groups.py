"""Sequences of a step that begin with the same KV blocks, in groups of a few.

Attention reads what a group shares once for all of it (`engine/kernels/paged_decode.py`). A group has few
places, as many as a tensor core has rows for, so that sixteen agents with one prefix are four groups.

Who comes joins the open group with which most tokens less are read, and opens one of its own where none
gains. A group that half of its members have left is taken apart, and those who are left join others. What a
group shares is content: the block tables were equal so far when a sequence joined, and tokens that are
computed do not change, so that no later step has to look again. A sequence that moved to other blocks shares
them still.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from engine.sequence import Sequence
from engine.step import StepEntry

MOST_MEMBERS = 8
"""Sequences of a group, at most."""

NUM_FIELDS = 5 + MOST_MEMBERS
"""int32 of each sequence, and of each group, of which there are fewer; zeros where there is none.

Of a sequence: the tokens that are read for its group, and the unit at which those begin. Of a group: the
units at which its tokens begin and end, its size, and the rows of its members. Units are counted over all
groups."""

LEAST_SHARED = 256
"""Tokens that are worth sharing, at least.

Where 16 to 256 sequences have as many again behind them, a layer takes 0.91 to 1.00 of the time."""

UNIT = 32
"""Tokens: what a group shares is a multiple of it, and what kernels read at once is, too."""

MOST_TRIED = 8
"""Open groups that a sequence looks at, each a comparison of block tables."""


@dataclass(slots=True, eq=False)
class PrefixGroup:
    """Sequences that begin with the same blocks."""

    key: tuple[int, ...]
    """The blocks by which who joins finds the group."""
    num_shared: int
    """Blocks that all members begin with; of a single member those that it has computed."""
    members: list[Sequence]


class PrefixGroups:
    """The groups of the sequences that decode. Belongs to the device thread.

    Args:
        block_size: Tokens of a block.
        most_members: Sequences of a group; 1: there are no groups.
        least_shared: Tokens that a group shares, at least.
    """

    def __init__(self, block_size: int, most_members: int, least_shared: int = LEAST_SHARED) -> None:
        self._block_size = block_size
        self._most_members = most_members
        self._least = -(-least_shared // block_size)
        self._sequences: list[Sequence] = []
        self._group_of: dict[Sequence, PrefixGroup] = {}
        self._open: dict[tuple[int, ...], list[PrefixGroup]] = {}
        self.version = 0
        """Another number whenever `numbers` may be others."""

    def arrange(self, entries: tuple[StepEntry, ...]) -> None:
        """Group the sequences of a step, each of which computes one token."""
        sequences = [entry.sequence for entry in entries]
        if sequences == self._sequences or self._most_members < 2:
            return
        self._sequences = sequences
        self.version += 1
        entry_of = dict(zip(sequences, entries, strict=True))
        for sequence in [each for each in self._group_of if each not in entry_of]:
            if sequence in self._group_of:
                self._leave(sequence)
        for entry in entries:
            if entry.sequence not in self._group_of:
                self._join(entry, entry_of)

    def numbers(self) -> NDArray[np.int32]:
        """Return what kernels know of the sequences of the last step, [NUM_FIELDS, num_sequences]."""
        row_of = {sequence: row for row, sequence in enumerate(self._sequences)}
        numbers = [[0] * len(row_of) for _ in range(NUM_FIELDS)]
        read, at, begins, ends, sizes, *members = numbers
        groups = {id(group): group for group in self._group_of.values() if len(group.members) > 1}
        end = 0
        for index, group in enumerate(groups.values()):
            begin, units = end, group.num_shared * self._block_size // UNIT
            end += units
            begins[index], ends[index], sizes[index] = begin, end, len(group.members)
            for place, sequence in enumerate(group.members):
                row = row_of[sequence]
                read[row], at[row] = units * UNIT, begin
                members[place][index] = row
        return np.array(numbers, np.int32)

    def check(self) -> None:
        """Assert what holds between any two calls."""
        groups = {id(group): group for group in self._group_of.values()}
        assert sum(len(group.members) for group in groups.values()) == len(self._group_of)
        is_open = [id(group) for groups in self._open.values() for group in groups]
        assert sorted(is_open) == sorted(
            key for key, group in groups.items() if len(group.members) < self._most_members
        )
        assert all(self._open.values())
        assert set(self._group_of) <= set(self._sequences)

    def _join(self, entry: StepEntry, entry_of: Mapping[Sequence, StepEntry]) -> None:
        computed = entry.start // self._block_size
        if computed < self._least:
            return
        key = entry.block_table[: self._least]
        found, most, shared = None, 0, computed
        for group in islice(self._open.get(key, ()), MOST_TRIED):
            first = entry_of[group.members[0]]
            common = min(num_common(first.block_table, entry.block_table), computed, group.num_shared)
            size = len(group.members)
            gain = size * common - (size - 1) * group.num_shared
            if common >= self._least and gain > most:
                found, most, shared = group, gain, common
        if found is None:
            found = PrefixGroup(key, computed, [])
            self._open.setdefault(key, []).append(found)
        found.num_shared = shared
        found.members.append(entry.sequence)
        self._group_of[entry.sequence] = found
        if len(found.members) == self._most_members:
            self._close(found)

    def _leave(self, sequence: Sequence) -> None:
        group = self._group_of.pop(sequence)
        if len(group.members) == self._most_members:
            self._open.setdefault(group.key, []).append(group)
        group.members.remove(sequence)
        if len(group.members) <= self._most_members // 2:
            self._close(group)
            for member in group.members:
                del self._group_of[member]

    def _close(self, group: PrefixGroup) -> None:
        groups = self._open[group.key]
        groups.remove(group)
        if not groups:
            del self._open[group.key]


def num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many numbers two block tables begin with alike."""
    begin, end = 0, min(len(one), len(other))
    while begin < end:
        middle = (begin + end + 1) // 2
        if one[begin:middle] == other[begin:middle]:
            begin = middle
        else:
            end = middle - 1
    return begin
