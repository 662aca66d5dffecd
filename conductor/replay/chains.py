"""Chains of block ids that grow: the contexts of a session, which begin alike.

A session of a thousand turns has a thousand contexts, each the one before it and a little more. As lists they
would take a thousand times what the file does; here a chain is parts that are shared, ranges of ids and
tuples, and each turn has a few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain as joined
from typing import overload

MAX_PARTS = 64
"""A chain of more is copied into one: walking over parts is then not what a lookup costs."""

Part = tuple[int, ...] | range


class JoinedChain(Sequence[int]):
    """Block ids in parts, one after the other. Never changed."""

    __slots__ = ("_length", "parts")

    def __init__(self, *parts: Part) -> None:
        merged: list[Part] = []
        for part in parts:
            last = merged[-1] if merged else None
            if isinstance(last, range) and isinstance(part, range) and last.stop == part.start:
                merged[-1] = range(last.start, part.stop)
            elif part:
                merged.append(part)
        if len(merged) > MAX_PARTS:
            merged = [tuple(joined.from_iterable(merged))]
        self.parts = tuple(merged)
        self._length = sum(map(len, merged))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return joined.from_iterable(self.parts)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        if isinstance(at, slice):
            return tuple(self)[at]
        place = at + self._length if at < 0 else at
        for part in self.parts:
            if 0 <= place < len(part):
                return part[place]
            place -= len(part)
        raise IndexError(at)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JoinedChain) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def up_to(self, count: int) -> tuple[Part, ...]:
        """Return the parts of the first `count` blocks."""
        parts: list[Part] = []
        for part in self.parts:
            if count <= 0:
                break
            parts.append(part if count >= len(part) else part[:count])
            count -= len(part)
        return tuple(parts)


def moved(chain: Sequence[int], offset: int, known: dict[int, Part]) -> Sequence[int]:
    """Return a chain whose ids are `offset` higher.

    Args:
        known: Parts that were moved already, by `id`; those of one session are mostly the same.
    """
    if isinstance(chain, JoinedChain):
        return JoinedChain(*(_moved_part(part, offset, known) for part in chain.parts))
    return _moved_part(chain if isinstance(chain, range) else tuple(chain), offset, {})


def _moved_part(part: Part, offset: int, known: dict[int, Part]) -> Part:
    if isinstance(part, range):
        return range(part.start + offset, part.stop + offset)
    if id(part) not in known:
        known[id(part)] = tuple([block + offset for block in part])
    return known[id(part)]


class KnownBlocks:
    """Ids that a file named so far: equal ones are one object, and each has one predecessor.

    An id names a block with all before it, so what comes before it is the same wherever it occurs. The caches
    rely on that.
    """

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._before: dict[int, int] = {}

    def interned(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the ids, equal ones as one object."""
        known = self._known
        return tuple([known.setdefault(block, block) for block in ids])

    def require_order(self, ids: Sequence[int]) -> None:
        """Raise ValueError where an id follows another than it did before."""
        known, before = self._before, -1
        for block in ids:
            predecessor = known.setdefault(block, before)
            if predecessor != before:
                raise ValueError(
                    f"id {block} follows {before} here and {predecessor} elsewhere: "
                    "an id names a block with all before it"
                )
            before = block
