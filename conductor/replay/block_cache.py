"""Block cache: the blocks in one simulated node's host memory.

`PolicyCache` evicts by the live `kvstore/eviction.py`, under any of its policies.
`LruCache` is its policy `lru` and nothing else, ten times as fast: storing prompts is the
simulator's most frequent work, so it keeps runs of blocks that came and went together
instead of blocks. A test holds the two to the same evictions.

A prompt's blocks are touched last to first, so a block is always at least as recent as
those that continue it: the tail of a chain goes before its head, and holding a block means
holding all before it. An id names a block with all before it (the trace reader refuses
others), so two chains that agree in one place agree in all before.

An OrderedDict of blocks was weighed, and a dict of their last uses: both took three times
as long, for every block of every prompt is looked at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass

from base.errors import ConfigError
from conductor.placing.profile import Profile
from kvstore.eviction import BY_NAME, Eviction
from kvstore.index import Key


def make_cache(policy: str, profile: Profile, block_size: int) -> Cache:
    """Return an empty cache as large as a node's host memory and disk, under a policy of BY_NAME.

    Raises:
        ConfigError: there is no such policy, or it is simulated without a disk alone.
    """
    if policy not in BY_NAME:
        raise ConfigError(f"eviction {policy!r}: one of {', '.join(BY_NAME)}")
    capacity, on_disk = profile.host_kv_tokens // block_size, profile.disk_kv_tokens // block_size
    if policy == "lru":
        return TieredCache(capacity, on_disk) if on_disk else LruCache(capacity)
    if on_disk:
        raise ConfigError(f"eviction {policy!r}: a disk is simulated with lru alone")
    return PolicyCache(policy, capacity)


@dataclass(slots=True, eq=False)
class _BlockRun:
    """Blocks that follow each other and were last used together."""

    keys: Sequence[Key]
    parent: _BlockRun | None
    num_children: int = 0
    """Runs that go on from its last block."""


class LruCache:
    """A cache of at most `capacity` blocks: what another node keeps out first, then the least recently used.

    A prompt that leaves a run in its middle splits it there; what it used is one run from then on. What
    other prompts share never goes first (`engine/block_pool.py` has the same rule).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._size = 0
        self._by_first: dict[Key, _BlockRun] = {}
        self._by_use: OrderedDict[_BlockRun, None] = OrderedDict()
        self._evicted_first: OrderedDict[_BlockRun, None] = OrderedDict()

    def __len__(self) -> int:
        return self._size

    def match(self, chain: Sequence[Key]) -> int:
        """Return how many leading blocks of `chain` are held."""
        get = self._by_first.get
        depth, length = 0, len(chain)
        while depth < length:
            run = get(chain[depth])
            if run is None:
                return depth
            keys = run.keys
            end = depth + len(keys)
            if end > length or chain[end - 1] != keys[-1]:
                end = depth + _num_common(keys, chain, depth)
            depth = end
        return depth

    def store(self, chain: Sequence[Key], evict_first: bool = False) -> tuple[Sequence[Key], list[Key]]:
        """Hold all of `chain`, as far as it fits; return what is new and what had to go."""
        if len(chain) > self.capacity:
            chain = chain[: self.capacity]
        path: list[_BlockRun] = []
        get, by_use = self._by_first.get, self._by_use
        depth, length = 0, len(chain)
        while depth < length and (run := get(chain[depth])):
            keys = run.keys
            end = depth + len(keys)
            if end > length or chain[end - 1] != keys[-1]:
                end = depth + _num_common(keys, chain, depth)
                run = self._split(run, end - depth)
            path.append(run)
            depth = end
        stored, first_out = chain[depth:], self._evicted_first
        evicted: list[Key] = []
        if (excess := self._size + len(stored) - self.capacity) > 0:
            for run in path:  # what is in use stays
                first_out.pop(run, None)
                by_use.pop(run, None)
            evicted = self._evict(excess)
        if stored:
            parent = path[-1] if path else None
            if parent is not None:
                parent.num_children += 1
            run = self._by_first[stored[0]] = _BlockRun(stored, parent)
            path.append(run)
            self._size += len(stored)
        if len(path) > 1:
            path = self._joined(path, chain)
        for run in reversed(path):
            queue, other = by_use, first_out
            if evict_first and not run.num_children:
                queue, other = first_out, by_use
            other.pop(run, None)
            queue[run] = None
            queue.move_to_end(run)
        return stored, evicted

    def clear(self) -> None:
        """Forget everything: the node died."""
        self._size = 0
        self._by_first.clear()
        self._by_use.clear()
        self._evicted_first.clear()

    def _joined(self, path: list[_BlockRun], chain: Sequence[Key]) -> list[_BlockRun]:
        """Return the runs of a path, those as one that no other prompt leaves before its end."""
        last, first = path[-1], len(path) - 1
        while first and path[first - 1].num_children == 1:
            first -= 1
        if path[first] is last:
            return path
        del self._by_first[last.keys[0]]
        for run in path[first:-1]:
            del self._by_first[run.keys[0]]
            self._by_use.pop(run, None)
            self._evicted_first.pop(run, None)
        before = sum(len(run.keys) for run in path[:first])
        last.keys, last.parent = chain[before:], path[first].parent
        self._by_first[last.keys[0]] = last
        return [*path[:first], last]

    def _split(self, run: _BlockRun, at: int) -> _BlockRun:
        """Return the first `at` blocks as a run of their own; the others keep their place in the order."""
        head = self._by_first[run.keys[0]] = _BlockRun(run.keys[:at], run.parent, 1)
        run.keys, run.parent = run.keys[at:], head
        self._by_first[run.keys[0]] = run
        return head

    def _evict(self, excess: int) -> list[Key]:
        """Drop and return `excess` blocks: those that go first, and then those used longest ago."""
        self._size -= excess
        evicted: list[Key] = []
        while excess:
            queue = self._evicted_first or self._by_use
            oldest = next(iter(queue))
            keys = oldest.keys
            if len(keys) > excess:
                evicted.extend(keys[: -excess - 1 : -1])
                oldest.keys = keys[:-excess]
                break
            evicted.extend(reversed(keys))
            excess -= len(keys)
            del queue[oldest], self._by_first[keys[0]]
            if oldest.parent is not None:
                oldest.parent.num_children -= 1
        return evicted


class TieredCache:
    """Host memory, and a disk for what memory has no room for: one order of use, cut in two.

    What is used is in memory; the least recently used of memory goes to disk, and of disk
    for good. Both are LRU, so memory holds the latest of what is held at all.
    """

    def __init__(self, in_memory: int, on_disk: int) -> None:
        self._memory = LruCache(in_memory)
        self._all = LruCache(in_memory + on_disk)

    def __len__(self) -> int:
        return len(self._all)

    def match(self, chain: Sequence[Key]) -> int:
        """Return how many leading blocks of `chain` are held."""
        return self._all.match(chain)

    def num_on_disk(self, chain: Sequence[Key], matched: int) -> int:
        """Return how many of the `matched` blocks have to be read from disk."""
        return max(0, matched - self._memory.match(chain))

    def store(self, chain: Sequence[Key], evict_first: bool = False) -> tuple[Sequence[Key], list[Key]]:
        """Hold all of `chain`, as far as it fits; return what is new and what had to go."""
        self._memory.store(chain, evict_first)
        return self._all.store(chain, evict_first)

    def clear(self) -> None:
        """Forget everything: the node died."""
        self._memory.clear()
        self._all.clear()


class PolicyCache:
    """A cache of at most `capacity` blocks, evicted by the live code of stores, which knows no other node."""

    def __init__(self, policy: str, capacity: int) -> None:
        self.capacity = capacity
        self._policy = policy
        self._blocks: Eviction[Key] = BY_NAME[policy]()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, chain: Sequence[Key]) -> int:
        """Return how many leading blocks of `chain` are held."""
        return _depth(self._blocks, chain)

    def store(self, chain: Sequence[Key], evict_first: bool = False) -> tuple[Sequence[Key], list[Key]]:
        """Hold all of `chain`, as far as it fits; return what is new and what had to go."""
        chain = chain[: self.capacity]
        blocks = self._blocks
        depth = self.match(chain)
        blocks.touch(chain[:depth])
        evicted: list[Key] = []
        parent = chain[depth - 1] if depth else None
        # what this request matched or adds is in use until all of it is in
        held = [parent] if parent is not None else []
        for key in held:
            blocks.hold(key)
        for key in chain[depth:]:
            if len(blocks) >= self.capacity:
                evicted.append(blocks.victim())
            blocks.insert(key, parent)
            blocks.hold(key)
            held.append(key)
            parent = key
        for key in held:
            blocks.release(key)
        return chain[depth:], evicted

    def clear(self) -> None:
        """Forget everything: the node died."""
        self._blocks = BY_NAME[self._policy]()


Cache = LruCache | TieredCache | PolicyCache


def _num_common(keys: Sequence[Key], chain: Sequence[Key], start: int) -> int:
    """Return how many blocks `chain` shares with `keys` from `start` on: one at least, by bisection."""
    low, high = 1, min(len(keys), len(chain) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if chain[start + middle - 1] == keys[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _depth(blocks: Container[Key], chain: Sequence[Key]) -> int:
    """Bisect: holding a block means holding all before it."""
    low, high = 0, len(chain)
    while low < high:
        middle = (low + high) // 2
        if chain[middle] in blocks:
            low = middle + 1
        else:
            high = middle
    return low
