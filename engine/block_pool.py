"""Block pool: who holds each block of one device cache, and what may be evicted.

Every block is in exactly one of three places:

    free      no content                        -> allocate() takes these first
    cached    content named by a hash, not held -> allocate() evicts these, oldest first
    held      ref_count >= 1                    -> never touched

`check()` asserts this partition. Two blocks may hold equal content (two sequences that computed the same
prefix at the same time). They are not merged: block tables stay append-only, and the second copy takes over
the name when the first is evicted, so that the children of a chain never outlive every copy of their parent.

A chain that another node has too, and keeps, is evicted before all others: from its end up to where another
chain branches off, which would be lost with the rest.

What a peer may write into a block of ours is fenced by its grant (`transfer/owned/grant.py`), not here.

Belongs to the event loop; nothing in here is thread-safe.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from base.block_hash import BlockHash
from base.errors import CapacityError


class BlockPool:
    """Owns the block ids of one device cache."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: list[int] = list(range(num_blocks))[::-1]
        self._ref_counts: dict[int, int] = {}
        # Insertion order is eviction order; a match removes entries from the middle in O(1). A plain dict
        # looks for its first entry past all that are gone.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._evicted_first: OrderedDict[int, None] = OrderedDict()
        # Held blocks that are to be in it again, if those who hold them only read.
        self._goes_first: set[int] = set()
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}
        # Further blocks with the content of `_block_of`'s; seldom any.
        self._copies: dict[BlockHash, list[int]] = {}
        self._parent_of: dict[BlockHash, BlockHash] = {}
        self._num_children: dict[BlockHash, int] = {}
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}
        self._listeners: list[Callable[[], None]] = []
        # Holds on blocks that somebody else holds too; and those of them that share nothing.
        self._num_repeated = self._num_beside = 0
        self.num_promised = 0
        """Number of available blocks that `allocate` gives and `allocate_spare` leaves."""

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Whether `match` finds a block, given those before it."""
        return block_hash in self._block_of

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free and cached ones."""
        return len(self._free) + self.num_cached

    @property
    def num_cached(self) -> int:
        """Blocks with content that nobody holds."""
        return len(self._evictable) + len(self._evicted_first)

    @property
    def num_held(self) -> int:
        return len(self._ref_counts)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks without content, evicting cached ones if needed. All or nothing.

        Raises CapacityError if fewer than `count` are free or cached. The pool is unchanged."""
        if count > self.num_available:
            raise CapacityError(f"{count} blocks wanted, {self.num_available} of {self.num_blocks} available")
        block_ids = []
        for _ in range(count):
            block_id = self._free.pop() if self._free else self._evict_oldest()
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def allocate_spare(self, count: int) -> list[int]:
        """Take `count` blocks of those that are not promised; otherwise as `allocate`.

        Without it, other nodes could reserve all that comes free while a sequence here waits for ever.

        Raises CapacityError if fewer than `count` are free or cached and not promised."""
        if count > self.num_available - self.num_promised:
            raise CapacityError(
                f"{count} blocks wanted, {self.num_available} of {self.num_blocks} available, "
                f"of which {self.num_promised} are promised"
            )
        return self.allocate(count)

    def match(self, chain: Iterable[BlockHash]) -> list[int]:
        """Hold the longest cached prefix of `chain` and return its block ids."""
        matched = []
        for block_hash in chain:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            matched.append(block_id)
        self.hold(matched)
        return matched

    def hold(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that have content, or that somebody holds already, once more."""
        for block_id in block_ids:
            held = self._ref_counts.get(block_id, 0)
            if held:
                self._num_repeated += 1
            elif block_id in self._evicted_first:
                del self._evicted_first[block_id]
                self._goes_first.add(block_id)
            else:
                assert block_id in self._evictable, f"block {block_id} is free"
                del self._evictable[block_id]
            self._ref_counts[block_id] = held + 1

    @property
    def num_shared(self) -> int:
        """Number of blocks that sequences would hold besides if none held a block of another."""
        return max(0, self._num_repeated - self._num_beside)

    @contextmanager
    def sharing_nothing(self, block_ids: Iterable[int]) -> Iterator[None]:
        """Count a hold as none of a sequence for the length of the body: a proof's, or a lend's."""
        num_beside = sum(self._ref_counts[block_id] > 1 for block_id in block_ids)
        self._num_beside += num_beside
        try:
            yield
        finally:
            self._num_beside -= num_beside

    def release(self, block_ids: Sequence[int], evict_first: bool | None = False) -> None:
        """Give back one hold on each block of a chain, in the order of the chain.

        A block that nobody holds then stays cached if it has a name; otherwise its content is given up.

        Args:
            evict_first: Whether another node keeps the chain; None: it was only read, and that is as before.
        """
        # Deepest first: a child without its parent can never be matched, so the tail of a chain has to be
        # evicted before its head.
        # Children that are the chain's own: none of its last block, one of each before it.
        num_own = 0
        for block_id in reversed(block_ids):
            held = self._ref_counts.get(block_id, 0)
            assert held, f"block {block_id} is released and not held"
            block_hash = self._hash_of.get(block_id)
            if evict_first is not None and block_hash is not None:
                evict_first = evict_first and self._num_children.get(block_hash, 0) <= num_own
                num_own = 1
                (self._goes_first.add if evict_first else self._goes_first.discard)(block_id)
            if held > 1:
                self._ref_counts[block_id] = held - 1
                self._num_repeated -= 1
                continue
            del self._ref_counts[block_id]
            if block_hash is None:
                self._free.append(block_id)
            elif block_id in self._goes_first:
                self._goes_first.remove(block_id)
                self._evicted_first[block_id] = None
            else:
                self._evictable[block_id] = None
        for listener in self._listeners:
            listener()

    def publish(self, block_id: int, block_hash: BlockHash, parent: BlockHash | None = None) -> None:
        """Name the content of a held, full block, so that `match` finds it.

        The same hash again changes nothing. Another hash is a bug: held content never changes.

        Args:
            parent: Name of the block before it; None: it is the first.
        """
        assert block_id in self._ref_counts, f"block {block_id} is published and not held"
        known = self._hash_of.get(block_id)
        if known is not None:
            assert known == block_hash, f"block {block_id} has another name already"
            return
        self._hash_of[block_id] = block_hash
        if block_hash in self._block_of:
            self._copies.setdefault(block_hash, []).append(block_id)
            return
        self._block_of[block_hash] = block_id
        if parent is not None:
            self._parent_of[block_hash] = parent
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._stored[block_hash] = None

    def on_release(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each release, so that whoever waits for blocks can look again."""
        self._listeners.append(listener)

    def take_events(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Return (stored, removed) since the last call, each in the order it happened.

        They are the net change, so no hash is in both and either may be applied first."""
        events = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return events

    def snapshot(self) -> list[BlockHash]:
        """Return every hash that `match` knows, oldest first, so parents before children."""
        return list(self._block_of)

    def check(self) -> None:
        """Assert the partition described at the head of this file."""
        places = [*self._free, *self._evictable, *self._evicted_first, *self._ref_counts]
        assert sorted(places) == list(range(self.num_blocks)), "a block is lost, or in two places"
        assert all(count >= 1 for count in self._ref_counts.values())
        assert self._num_repeated == sum(self._ref_counts.values()) - self.num_held
        assert not set(self._free) & self._hash_of.keys(), "a free block has a name"
        assert self._evictable.keys() | self._evicted_first.keys() <= self._hash_of.keys(), (
            "a cached block has no name"
        )
        assert self._goes_first <= self._ref_counts.keys()
        assert self._parent_of.keys() <= self._block_of.keys()
        assert self._num_children == Counter(self._parent_of.values())
        named: dict[int, BlockHash] = {block_id: name for name, block_id in self._block_of.items()}
        for name, block_ids in self._copies.items():
            assert block_ids, "an empty list of copies"
            assert name in self._block_of, "copies of a block that match() does not know"
            named |= dict.fromkeys(block_ids, name)
        assert named == self._hash_of
        assert not self._stored.keys() & self._removed.keys()
        assert self._stored.keys() <= self._block_of.keys()
        assert not self._removed.keys() & self._block_of.keys()

    def _evict_oldest(self) -> int:
        queue = self._evicted_first or self._evictable
        block_id, _ = queue.popitem(last=False)
        block_hash = self._hash_of.pop(block_id)
        if copies := self._copies.get(block_hash):
            if self._block_of[block_hash] == block_id:
                self._block_of[block_hash] = copies.pop()
            else:
                copies.remove(block_id)
            if not copies:
                del self._copies[block_hash]
            return block_id
        del self._block_of[block_hash]
        if (parent := self._parent_of.pop(block_hash, None)) is not None:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._removed[block_hash] = None
        return block_id
