"""Replicas of hot prefixes, made before requests ask for them, and taken away when they are cold.

Algorithm 1 makes replicas as a side effect: a node that fetched a prefix keeps it. That is
enough where a prefix warms up slowly. One that many ask for at once has its holders' queues
fill first; here copies are made as soon as what its readers take exceeds what its holders
should give.

    wanted = seconds of prefill a second that its readers take / HOLDER_SHARE

at most one on each prefill node, and more than there are only where computing the prefix takes
longer than moving it and each copy would be read `MIN_READS` times in `LASTING_S` of such heat:
else the bytes are not worth it. A copy goes to the prefill node whose queue ends first. What was
copied here is dropped when nobody has read the prefix for `COLD_S`; a replica that came by itself
is left to the node's eviction.

A prefix is what a request shares with what is held: its longest match in the cluster. So each
request touches one entry, whatever its length.

`replicas_wanted` and `Replicas` are pure: no I/O, no clock. The live conductor
(`serving/replication.py`) and replay call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import NamedTuple

from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.placement import Placement, PlacementRequest
from conductor.placing.scheduler import best_source
from kvstore.index import Key

HALF_LIFE_S = 5.0
"""Of heat: reads count half after so long. A burst is over before a slower one has seen it."""
LASTING_S = 30.0
COLD_S = 60.0
HOLDER_SHARE = 0.5
"""Of a holder's time, that one prefix may take before another holder is wanted."""
MIN_READS = 3.0
"""Of a copy in that time, at least."""
COPY_TIMEOUT_S = 20.0
"""For a copy to come; then it is thought about again."""
MAX_PREFIXES = 4_096
MAX_COPIES = 4
"""At one step: of the bytes on the links, requests need the most."""
COLD_READS = 0.1
"""A prefix below it is forgotten."""


class Hot(NamedTuple):
    """How much a prefix is read."""

    num_tokens: int
    reads_per_s: float
    read_s: float
    """Of a prefill node's time, for one read by a node that holds it."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Bring the blocks of `chain` from `first_block` on from one node to another."""

    chain: Sequence[Key]
    first_block: int
    source_slot: int
    target_slot: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Give up a copy that was made before."""

    blocks: Sequence[Key]
    slot: int


def replicas_wanted(hot: Hot, num_holders: int, num_nodes: int, cost: CostModel) -> int:
    """Return on how many of `num_nodes` prefill nodes a prefix should be; it is on `num_holders`."""
    by_load = min(num_nodes, ceil(hot.reads_per_s * hot.read_s / HOLDER_SHARE))
    if by_load <= num_holders:
        return by_load
    worth_reading = int(hot.reads_per_s * LASTING_S / MIN_READS)
    is_sooner_moved = cost.transfer_s(hot.num_tokens) < cost.prefill_s(hot.num_tokens, 0)
    return max(num_holders, min(by_load, worth_reading)) if is_sooner_moved else num_holders


class _Prefix:
    """Heat of one prefix, and the copies of it that were made here."""

    __slots__ = ("begun", "chain", "copies", "noted_at_s", "read_at_s", "read_s", "reads")

    def __init__(self, chain: Sequence[Key], now_s: float) -> None:
        self.chain = chain
        self.noted_at_s = self.read_at_s = now_s
        self.reads = 0.0
        self.read_s = 0.0
        self.copies: dict[int, int] = {}
        """Slot to the blocks that it had before."""
        self.begun: dict[int, float] = {}
        """Slot to when a copy to it began that has not come yet."""

    def fade(self, now_s: float) -> None:
        self.reads *= 0.5 ** ((now_s - self.noted_at_s) / HALF_LIFE_S)
        self.noted_at_s = now_s


class Replicas:
    """Decides copies and drops. Of several conductors one at a time acts on it."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._prefixes: dict[Key, _Prefix] = {}

    def read(self, chain: Sequence[Key], matched_blocks: int, read_s: float, now_s: float) -> None:
        """A request was placed that shares its first `matched_blocks` with what is held.

        `read_s` is its prefill where they are.
        """
        if not matched_blocks:
            return
        tail = chain[matched_blocks - 1]
        prefix = self._prefixes.get(tail)
        if prefix is None:
            if len(self._prefixes) >= MAX_PREFIXES:
                return
            prefix = self._prefixes[tail] = _Prefix(chain[:matched_blocks], now_s)
        prefix.fade(now_s)
        prefix.reads += 1.0
        prefix.read_at_s = now_s
        prefix.read_s += (read_s - prefix.read_s) / max(1.0, prefix.reads)

    def placed(self, asked: PlacementRequest, placement: Placement, view: ClusterView, now_s: float) -> None:
        """Count a placed request as a read of what it shares with what is held."""
        groups = view.index.match(asked.chain)
        blocks = groups[0][0] if groups else 0
        prefix = min(blocks * view.block_size, asked.num_tokens - 1)
        profile_s = self._cost.prefill_s(asked.num_tokens - prefix, prefix)
        read_s = view.corrections.corrected_s(placement.prefill_node, "prefill", profile_s)
        self.read(asked.chain, blocks, read_s, now_s)

    def step(self, view: ClusterView, now_s: float) -> list[Copy | Drop]:
        """Return what to do now, the hottest prefix first. Call it every second or so."""
        for tail, prefix in list(self._prefixes.items()):
            prefix.fade(now_s)
            if prefix.reads < COLD_READS and not prefix.copies:
                del self._prefixes[tail]
        by_load = sorted(self._prefixes.values(), key=lambda prefix: -prefix.reads * prefix.read_s)
        todo: list[Copy | Drop] = []
        for prefix in by_load:
            todo += self._of(prefix, view, MAX_COPIES - sum(isinstance(item, Copy) for item in todo), now_s)
        return todo

    def _of(self, prefix: _Prefix, view: ClusterView, most: int, now_s: float) -> list[Copy | Drop]:
        groups = view.index.match(prefix.chain)
        length = len(prefix.chain)
        holders = groups[0][1] if groups and groups[0][0] == length else 0
        # what was evicted, or left with its node, is no copy of ours any more
        prefix.begun = {
            slot: at_s
            for slot, at_s in prefix.begun.items()
            if not holders >> slot & 1 and now_s - at_s < COPY_TIMEOUT_S
        }
        prefix.copies = {
            slot: first
            for slot, first in prefix.copies.items()
            if holders >> slot & 1 or slot in prefix.begun
        }
        held = (holders & view.prefill_mask).bit_count()
        rate = prefix.reads * log(2) / HALF_LIFE_S
        hot = Hot(length * view.block_size, rate, prefix.read_s)
        wanted = replicas_wanted(hot, held, view.prefill_mask.bit_count(), self._cost)
        if prefix.copies and now_s - prefix.read_at_s > COLD_S:
            cold, prefix.copies = prefix.copies, {}
            return [Drop(prefix.chain[first:], slot) for slot, first in cold.items()]
        missing = wanted - held - len(prefix.begun)
        if not holders or missing <= 0 or most <= 0:
            return []
        copies: list[Copy | Drop] = []
        free = view.prefill_mask & ~holders & ~sum(1 << slot for slot in prefix.begun)
        view.prefill_order.settle(now_s)
        while len(copies) < min(most, missing, held or 1):
            slot = view.prefill_order.least(free)
            if slot is None:
                break
            free ^= 1 << slot
            first = next((depth for depth, mask in groups if mask >> slot & 1), 0)
            prefix.copies[slot] = first
            prefix.begun[slot] = now_s
            copies.append(Copy(prefix.chain, first, best_source(holders, view).slot, slot))
        return copies
