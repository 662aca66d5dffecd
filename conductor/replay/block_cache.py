"""Block cache: the blocks in one simulated node's host memory.

`PolicyCache` evicts by the live `kvstore/eviction.py`, under any of its policies.
`BlockCache` is its policy `lru` and nothing else, ten times as fast: the simulator's most
frequent work is storing runs of blocks, which it does by loops of the interpreter's own.
A test holds the two to the same evictions.

A prompt's blocks are touched last to first, so a block is always at least as recent as
those that continue it: the tail of a chain goes before its head, and holding a block means
holding all before it. The matched depth can therefore be found by bisection.

OrderedDict and not dict: taking the oldest of a dict is O(n) once many have been taken.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Iterator, Sequence
from itertools import islice
from typing import Protocol

from base.errors import ConfigError
from kvstore.eviction import BY_NAME, Eviction
from kvstore.index import Key


class Cache(Protocol):
    """What a simulated node needs of its cache."""

    def __len__(self) -> int: ...

    def match(self, chain: Sequence[Key]) -> int:
        """Return how many leading blocks of `chain` are held."""
        ...

    def store(self, chain: Sequence[Key]) -> tuple[Sequence[Key], list[Key]]:
        """Hold all of `chain`, as far as it fits; return what is new and what had to go."""
        ...

    def clear(self) -> None:
        """Forget everything: the node died."""
        ...


def make_cache(policy: str, capacity: int) -> Cache:
    """Return an empty cache under a policy of `kvstore.eviction.BY_NAME`.

    Raises:
        ConfigError: there is no such policy.
    """
    if policy not in BY_NAME:
        raise ConfigError(f"eviction {policy!r}: one of {', '.join(BY_NAME)}")
    return BlockCache(capacity) if policy == "lru" else PolicyCache(policy, capacity)


class BlockCache:
    """At most `capacity` blocks, least recently used out first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, chain: Sequence[Key]) -> int:
        """Return how many leading blocks of `chain` are held."""
        return _depth(self._blocks, chain)

    def store(self, chain: Sequence[Key]) -> tuple[Sequence[Key], list[Key]]:
        """Hold all of `chain`, as far as it fits; return what is new and what had to go."""
        chain = chain[: self.capacity]
        blocks = self._blocks
        depth = self.match(chain)
        stored = chain[depth:]
        blocks.update(dict.fromkeys(reversed(stored)))
        _exhaust(map(blocks.move_to_end, reversed(chain[:depth])))
        evicted = list(islice(blocks, max(0, len(blocks) - self.capacity)))
        _exhaust(map(blocks.__delitem__, evicted))
        return stored, evicted

    def clear(self) -> None:
        """Forget everything: the node died."""
        self._blocks.clear()


class PolicyCache:
    """At most `capacity` blocks, evicted by the live code."""

    def __init__(self, policy: str, capacity: int) -> None:
        self.capacity = capacity
        self._policy = policy
        self._blocks: Eviction[Key] = BY_NAME[policy]()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, chain: Sequence[Key]) -> int:
        """Return how many leading blocks of `chain` are held."""
        return _depth(self._blocks, chain)

    def store(self, chain: Sequence[Key]) -> tuple[Sequence[Key], list[Key]]:
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


def _exhaust(calls: Iterator[None]) -> None:
    deque(calls, maxlen=0)
