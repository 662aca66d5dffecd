"""The order in which cached blocks are forgotten when room is needed. Pure: no I/O, no clock, no chance.

Owns one tree of blocks: each block's parent is the block before it in a prompt. A block
without its parent can never be matched, so only leaves are evicted, and a held block
counts as one more child of itself: **a block that is kept implies all blocks before it**.

How: a block's rank says how soon it goes, lowest first. Using a block may only raise its
rank. So `touch` writes three fields and leaves the heap alone; `victim` pops the leaf that
the heap believes lowest, and pushes it back when it has risen since. A touch costs some
0.1 us whatever the policy, and a policy is one function from an entry to its rank. Lists
in order of use (one linked list for LRU, one for each count for LFU) were weighed: they
need a structure for each policy, and a parent that becomes a leaf again belongs in the
middle of a list, which a list cannot find.

Under `admission` the rank also looks at what was learned of returns (`admission.py`), blocks of
conversations that were not admitted go before all others, and before those the ends that a
conversation's next turn left behind. `BY_NAME` makes each policy; `python -m
bench.hit_rate` compares them.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from base.errors import CapacityError
from kvstore.admission import Admission

BRANCHES_OF_A_SHARED_HEAD = 3
"""A block that this many others follow ends a shared system prompt: what comes after it
is another conversation. Fewer are one conversation's edits."""

Block = TypeVar("Block", bound=Hashable)
"""The name of a block: a `BlockHash` in a store, an integer in a trace."""


@dataclass(slots=True, eq=False, repr=False)
class Entry(Generic[Block]):
    """A block's place in the tree and its uses, from which its rank is computed."""

    block: Block
    parent: Entry[Block] | None
    depth: int
    tick: int
    """When it was last used; moments are numbered by requests."""
    uses: int = 1
    """Requests that used the block since it came in, the first included."""
    patience: float = 0.0
    """Requests that it was worth keeping longer, for its uses, when it was last used."""
    children: int = 0
    """Blocks of the tree that follow it, and holds on it."""
    branches: int = 0
    """Blocks that ever followed it."""
    first_child: Entry[Block] | None = None
    """While it is there, and no other has come."""
    is_queued: bool = False
    is_admitted: bool = True
    is_sampled: bool = False


Rank = Callable[[Entry[Block]], tuple[float, ...]]


def lru(entry: Entry[Block]) -> tuple[float, ...]:
    """Least recently used first."""
    return (entry.tick, -entry.depth)


def lfu(entry: Entry[Block]) -> tuple[float, ...]:
    """Least often used first, among equals the least recently used."""
    return (entry.uses, entry.tick)


def length_aware(entry: Entry[Block]) -> tuple[float, ...]:
    """Least often used first; among equals, the block that stands later in its request.

    The Mooncake report says no more than that; which way its tie-break goes is our reading.
    """
    return (entry.uses, -entry.depth, entry.tick)


def kept_while_it_may_return(entry: Entry[Block]) -> tuple[float, ...]:
    """Least recently used first, what was used before as if that much later.

    Blocks of conversations that were not admitted go before all others, oldest first.
    """
    if entry.is_admitted:
        return (entry.tick + entry.patience, -entry.depth)
    return (0.0, entry.tick)


class Eviction(Generic[Block]):
    """The order in which cached blocks go. Owned by one thread.

    Use: `touch` what a request matched, then `insert` what it adds, parents first; when
    there is no room, `victim`.
    """

    def __init__(self, rank: Rank[Block], admission: Admission[Block] | None = None) -> None:
        self._rank = rank
        self._admission = admission
        self._entries: dict[Block, Entry[Block]] = {}
        self._heap: list[tuple[tuple[float, ...], int, Entry[Block]]] = []
        self._superseded: deque[Entry[Block]] = deque()
        self._tick = 0
        self._pushes = 0
        self._is_full = False
        self._stay = 0
        """Requests from the last victim's last use to its end."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: Block) -> bool:
        return block in self._entries

    def __iter__(self) -> Iterator[Block]:
        return iter(self._entries)

    def touch(self, chain: Sequence[Block]) -> None:
        """Note that a new request uses `chain`, all of them present.

        Call it once for a request, before its inserts, even if nothing matched.
        """
        self._tick += 1
        tick, patience, credits = self._tick, 0.0, 0
        entries = list(map(self._entries.__getitem__, chain))
        if self._admission is not None:
            self._admit(entries, self._admission)
            patience, credits = self._admission.patience, self._admission.credits
        for entry in entries:
            uses = entry.uses
            entry.uses = uses + 1
            entry.tick = tick
            entry.patience = patience * (uses if uses < credits else credits)

    def insert(self, block: Block, parent: Block | None) -> None:
        """Add `block`, absent so far, after `parent`, which is present or None.

        Raises:
            KeyError: the parent is absent. Nothing has changed.
        """
        above = None if parent is None else self._entries[parent]
        entry = Entry(block, above, above.depth + 1 if above else 0, self._tick)
        self._entries[block] = entry
        if self._admission is not None:
            self._draw(entry, self._admission)
        if above is not None:
            above.children += 1
            self._branch(above, entry)
        self._queue(entry)

    def hold(self, block: Block) -> None:
        """Keep `block`, and with it all before it, until `release`. Counts."""
        self._entries[block].children += 1

    def release(self, block: Block) -> None:
        """Undo one `hold`."""
        self._drop_child(self._entries[block])

    def is_leaf(self, block: Block) -> bool:
        """Return whether nothing follows or holds `block`: it may be removed."""
        return self._entries[block].children == 0

    def subtree(self, block: Block) -> list[Block]:
        """Return `block` and all after it, deepest first. Looks at every block: for repairs."""
        # Each stands after its parent: one look at every block finds them all.
        found = {self._entries[block]: None}
        for entry in self._entries.values():
            if entry.parent in found:
                found[entry] = None
        deepest_first = sorted(found, key=lambda entry: -entry.depth)
        return [entry.block for entry in deepest_first]

    def remove(self, block: Block) -> None:
        """Forget a leaf.

        Raises:
            ValueError: a block follows or holds it. Nothing has changed.
        """
        entry = self._entries[block]
        if entry.children:
            raise ValueError("only a leaf can be removed")
        self._forget(entry)

    def victim(self) -> Block:
        """Forget the leaf of the lowest rank and return it.

        Raises:
            CapacityError: every block is held, itself or by one after it.
        """
        while self._superseded:
            entry = self._superseded.popleft()
            if self._is_there(entry) and not entry.children and entry.uses == 1:
                return self._evict(entry)
        heap = self._heap
        while heap:
            rank, _, entry = heap[0]
            if entry.children or not self._is_there(entry):
                heapq.heappop(heap)
                entry.is_queued = False
            elif (risen := self._rank(entry)) != rank:
                self._pushes += 1
                heapq.heapreplace(heap, (risen, self._pushes, entry))
            else:
                heapq.heappop(heap)
                if entry.is_admitted:
                    self._stay = self._tick - entry.tick
                return self._evict(entry)
        raise CapacityError("every block is held")

    def check(self) -> None:
        """Assert that kept blocks imply those before them, and that every leaf is queued."""
        children = dict.fromkeys(self._entries, 0)
        for entry in self._entries.values():
            if entry.parent is not None:
                assert self._entries[entry.parent.block] is entry.parent, "a block outlived its parent"
                children[entry.parent.block] += 1
        queued = {id(entry) for _, _, entry in self._heap}
        assert len(queued) == len(self._heap), "a block is queued twice"
        for block, entry in self._entries.items():
            assert entry.children >= children[block], "a child is not counted"
            assert entry.children or id(entry) in queued, "a leaf cannot be evicted"

    def _admit(self, entries: Sequence[Entry[Block]], admission: Admission[Block]) -> None:
        """A conversation that came back is kept, whatever was drawn for it."""
        admission.request(len(self._entries) if self._is_full else math.inf, self._stay)
        admission.count(len(entries))
        for entry in entries:
            entry.is_admitted = True
            if entry.is_sampled:
                admission.returned(self._tick - entry.tick)

    def _draw(self, entry: Entry[Block], admission: Admission[Block]) -> None:
        admission.count(1)
        above = entry.parent
        if above is None or above.children >= BRANCHES_OF_A_SHARED_HEAD:
            entry.is_admitted, entry.is_sampled = admission.draw()
        else:
            entry.is_admitted, entry.is_sampled = above.is_admitted, above.is_sampled
        if admission.recall(entry.block, self._tick):
            entry.is_sampled = True

    def _branch(self, above: Entry[Block], entry: Entry[Block]) -> None:
        """Count a block that follows another one.

        Where it is the second, the end of the first chain is done with: the part of a prompt that the next
        turn's tokens changed. It goes before all others.
        """
        above.branches += 1
        first, above.first_child = above.first_child, None
        if above.branches == 1:
            above.first_child = entry
        elif first is not None and self._admission is not None:
            self._superseded.append(first)
            if len(self._superseded) > 2 * len(self._entries) + 64:
                self._superseded = deque(filter(self._is_there, self._superseded))

    def _is_there(self, entry: Entry[Block]) -> bool:
        return self._entries.get(entry.block) is entry

    def _evict(self, entry: Entry[Block]) -> Block:
        if entry.is_sampled and self._admission is not None:
            self._admission.remember(entry.block, entry.tick, len(self._entries))
        self._is_full = True
        self._forget(entry)
        return entry.block

    def _queue(self, entry: Entry[Block]) -> None:
        if not entry.is_queued:
            entry.is_queued = True
            self._pushes += 1
            heapq.heappush(self._heap, (self._rank(entry), self._pushes, entry))
            if len(self._heap) > 2 * len(self._entries) + 64:
                self._sweep()

    def _sweep(self) -> None:
        """Drop what `remove` left in the heap, so that it stays as small as the tree."""
        self._heap = [item for item in self._heap if self._is_there(item[2])]
        heapq.heapify(self._heap)

    def _drop_child(self, entry: Entry[Block]) -> None:
        entry.children -= 1
        if not entry.children:
            self._queue(entry)

    def _forget(self, entry: Entry[Block]) -> None:
        del self._entries[entry.block]
        if entry.parent is not None:
            if entry.parent.first_child is entry:
                entry.parent.first_child = None
            self._drop_child(entry.parent)


BY_NAME: dict[str, Callable[[], Eviction[Any]]] = {
    "lru": lambda: Eviction(lru),
    "lfu": lambda: Eviction(lfu),
    "length_aware": lambda: Eviction(length_aware),
    "admission": lambda: Eviction(kept_while_it_may_return, Admission()),
}
