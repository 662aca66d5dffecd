"""The KV blocks of one simulated device that several sequences hold, each of which counts once.

As `engine/block_pool.py` has it: a sequence that begins holds those blocks of its prompt that it finds,
together with whoever holds them already, and has the rest to itself. What two compute at the same time is
there twice: the second has a copy that nobody finds. Whoever leaves gives back what nobody else holds.

Who shares blocks shares a prefix. So there is a tree of runs, each held by as many from its first block to
its last, and a sequence holds the runs from its last one up to the first. Nothing is done but when one begins
or leaves. An id names a block with all before it, so a run is found by its first block alone, and where two
chains part is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvstore.index import Key


class KvRun:
    """Blocks of a chain that the same sequences hold."""

    __slots__ = ("chain", "end", "num_copies", "num_holders", "parent", "start")

    def __init__(
        self, chain: Sequence[Key], start: int, end: int, parent: KvRun | None, num_holders: int
    ) -> None:
        self.chain = chain
        self.start = start
        self.end = end
        self.parent = parent
        self.num_holders = num_holders
        self.num_copies = 0
        """Sequences that have a copy, and are none of the holders."""


class Holder(Protocol):
    """A sequence as it holds blocks of one device at a time."""

    run: KvRun | None
    """The last blocks of its prompt that it holds; None: it holds none."""

    @property
    def chain(self) -> Sequence[Key]: ...


class SharedKv:
    """Counts the tokens of KV that sequences would hold besides if none held a block of another."""

    def __init__(self, block_tokens: int, on_shared: Callable[[], None] = lambda: None) -> None:
        """Begin with nothing held; `on_shared` is called when a sequence holds blocks of others."""
        self.tokens = 0  # for others to read
        self._block_tokens = block_tokens
        self._on_shared = on_shared
        self._by_first: dict[Key, KvRun] = {}
        # Who has copies of runs, of which blocks in its chain.
        self._copied: dict[Holder, range] = {}

    def found(self, chain: Sequence[Key], tokens: int) -> int:
        """Return how many of the first `tokens` of a chain lie in blocks that are held."""
        held, depth, most = 0, 0, min(tokens // self._block_tokens, len(chain))
        while depth < most and (run := self._by_first.get(chain[depth])) is not None:
            end = _parts_at(run, chain, most)
            held += end - depth if run.num_holders else 0
            depth = end
        return held * self._block_tokens

    def hold(self, holder: Holder, tokens: int) -> None:
        """Let a sequence hold the blocks of its prompt. Again: no effect.

        Of the first `tokens` it finds those that are held; the others are computed or written for it.
        """
        chain = holder.chain
        if holder.run is not None or not chain:
            return
        by_first, length = self._by_first, len(chain)
        run = by_first.get(chain[0])
        if run is None:
            holder.run = by_first[chain[0]] = KvRun(chain, 0, length, None, 1)
            return
        depth, num_shared, most = 0, 0, min(tokens // self._block_tokens, length)
        while run is not None:
            end = _parts_at(run, chain, most if depth < most else length)
            holder.run = run = self._split(run, end) if end < run.end else run
            if depth < most:
                num_shared += end - depth if run.num_holders else 0
                run.num_holders += 1
            else:
                run.num_copies += 1
            depth = end
            run = by_first.get(chain[depth]) if depth < length else None
        if depth > most:
            self._copied[holder] = range(most, depth)
        if depth < length:
            holder.run = by_first[chain[depth]] = KvRun(chain, depth, length, holder.run, 1)
        if num_shared:
            self.tokens += num_shared * self._block_tokens
            self._on_shared()

    def release(self, holder: Holder) -> None:
        """Give back what a sequence holds. Again: no effect."""
        run, holder.run = holder.run, None
        copied = self._copied.pop(holder, None) if self._copied else None
        while run is not None:
            if copied is not None and run.start in copied:
                run.num_copies -= 1
            else:
                run.num_holders -= 1
                if run.num_holders:
                    self.tokens -= (run.end - run.start) * self._block_tokens
            if not (run.num_holders or run.num_copies):
                del self._by_first[run.chain[run.start]]
            run = run.parent

    def check(self, holders: Iterable[Holder]) -> None:
        """Assert that what is counted is what these sequences hold, and nobody else."""
        counts: dict[KvRun, list[int]] = {}
        for holder in holders:
            run, copied = holder.run, self._copied.get(holder, range(0))
            while run is not None:
                counts.setdefault(run, [0, 0])[run.start in copied] += 1
                run = run.parent
        assert all([run.num_holders, run.num_copies] == count for run, count in counts.items())
        repeated = sum((run.end - run.start) * max(0, num - 1) for run, (num, _) in counts.items())
        assert self.tokens == repeated * self._block_tokens
        assert {run.chain[run.start]: run for run in counts} == self._by_first
        assert len(self._copied) <= sum(num for _, num in counts.values())

    def _split(self, run: KvRun, at: int) -> KvRun:
        """Return the blocks of a run before `at` as a run of their own; its holders keep the rest."""
        head = KvRun(run.chain, run.start, at, run.parent, run.num_holders)
        head.num_copies = run.num_copies
        self._by_first[run.chain[run.start]] = head
        run.start, run.parent = at, head
        self._by_first[run.chain[at]] = run
        return head


def _parts_at(run: KvRun, chain: Sequence[Key], most: int) -> int:
    """Return where a chain leaves a run whose first block it has, or `most` if that comes before."""
    keys, low, high = run.chain, run.start + 1, min(run.end, most)
    if chain[high - 1] == keys[high - 1]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle - 1] == keys[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
