"""Swap space: host memory that keeps the KV of sequences which had to give up their blocks.

A preempted sequence is computed again, or its blocks move to host memory and back, whichever is cheaper by
the measured times of a block's move and a token's computation. Moving 2,048 tokens of an 8B model takes a
tenth of the time of computing them.

Moves are part of a step's plan and go before its computation, in the one order that the device works in. So a
slot may be taken again as soon as a plan has emptied it. A block may not: peers write into free blocks
without asking the device. Those that move out stay held until their step has landed.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from base.clock import Clock
from engine.paged_cache import PagedCache
from engine.sequence import Sequence, Swapped

MEASURED_BLOCKS = 16

MEASURED_TOKENS = 512
"""Tokens from which a step says what recomputing costs, or `chunk_tokens`, if those are fewer.

Beside sequences that decode, a step seldom has thousands, whatever there is memory for."""


@dataclass(frozen=True, slots=True)
class Swap:
    """One sequence's move, before the step that it is planned with computes: block i to or from slot i."""

    sequence: Sequence
    blocks: tuple[int, ...]
    """Blocks that move out may be more than slots: the last ones have no content yet."""
    slots: tuple[int, ...]
    is_out: bool
    """Whether blocks move from the device to host memory, and not back."""


class SwapSpace:
    """Owns the numbers of the slots, and the moves of the step that is being planned.

    Belongs to the event loop. A swapped sequence's slots are its own until a plan brings its blocks back, and
    then the plan's; blocks that move out are the plan's.
    """

    def __init__(self, num_slots: int, block_s: float) -> None:
        """Begin with all slots free; a block takes `block_s` seconds in one direction."""
        self.num_slots = num_slots
        self._block_s = block_s
        self._token_s = 0.0
        self._free = list(range(num_slots))
        self._planned: list[Swap] = []
        self.num_leaving_blocks = 0
        """Number of blocks that move out, and come free when their step has landed."""

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Take in the seconds of a step with a long chunk, which say what recomputing costs."""
        token_s = seconds / num_tokens
        self._token_s = token_s if not self._token_s else 0.8 * self._token_s + 0.2 * token_s

    def move_out(self, sequence: Sequence, num_blocks: int) -> bool:
        """Plan to move the leading blocks of a sequence, and take its block table over.

        False: not done; there are too few slots, or its tokens are computed again in less time."""
        recompute_s = self._token_s * sequence.num_computed_tokens
        if num_blocks > len(self._free) or (recompute_s and 2 * num_blocks * self._block_s > recompute_s):
            return False
        slots = tuple(self._free[:num_blocks])
        del self._free[:num_blocks]
        blocks = tuple(sequence.block_table)
        self._planned.append(Swap(sequence, blocks, slots, is_out=True))
        self.num_leaving_blocks += len(blocks)
        sequence.swapped = Swapped(slots, sequence.num_computed_tokens)
        sequence.block_table.clear()
        return True

    def move_in(self, sequence: Sequence, num_there: int) -> None:
        """Plan to bring a sequence's blocks back, but for `num_there` leading ones, to its block table."""
        assert sequence.swapped is not None
        slots, sequence.num_computed_tokens = sequence.swapped.slots, sequence.swapped.num_tokens
        sequence.swapped = None
        self._free += slots[:num_there]
        blocks = tuple(sequence.block_table[num_there : len(slots)])
        self._planned.append(Swap(sequence, blocks, slots[num_there:], is_out=False))

    def drop(self, sequence: Sequence) -> None:
        """Give back a sequence's slots, if it has any: what they hold is not wanted."""
        if sequence.swapped is not None:
            self._free += sequence.swapped.slots
            sequence.swapped = None

    def take_planned(self) -> tuple[Swap, ...]:
        """Return the moves planned since the last call."""
        planned, self._planned = tuple(self._planned), []
        return planned

    def landed(self, swaps: Items[Swap]) -> None:
        """Take in that a step with these moves has run, or failed."""
        for swap in swaps:
            if swap.is_out:
                self.num_leaving_blocks -= len(swap.blocks)
            else:
                self._free += swap.slots

    def check(self, sequences: Items[Sequence]) -> None:
        """Assert that each slot is free or held by one of `sequences`, while no step is under way."""
        held = [slot for item in sequences if item.swapped is not None for slot in item.swapped.slots]
        assert sorted([*self._free, *held]) == list(range(self.num_slots)), "a slot is lost, or held twice"


class HostBlocks:
    """Owns the memory of the slots, pinned where the cache is on a GPU. Belongs to the device thread.

    A block is contiguous, so one copy engine call moves it at the link's rate. To pin 4 GiB takes two
    seconds, for which the first that needs them waits."""

    def __init__(self, cache: PagedCache, num_slots: int) -> None:
        blocks = cache.tensor
        self.num_slots = num_slots
        self._blocks = blocks
        shape, pinned = (num_slots, *blocks.shape[1:]), blocks.device.type == "cuda"
        pool = ThreadPoolExecutor(1, "pinning")
        self._made: Future[torch.Tensor] = pool.submit(
            torch.empty, shape, dtype=blocks.dtype, pin_memory=pinned
        )
        pool.shutdown(wait=False)

    @property
    def _slots(self) -> torch.Tensor:
        return self._made.result()

    def move(self, swaps: Items[Swap]) -> None:
        """Queue moves on the device's current stream."""
        for swap in swaps:
            for block, slot in zip(swap.blocks, swap.slots, strict=False):
                if swap.is_out:
                    self._slots[slot].copy_(self._blocks[block], non_blocking=True)
                else:
                    self._blocks[block].copy_(self._slots[slot], non_blocking=True)

    def measure(self, clock: Clock) -> float:
        """Return the seconds that a block takes in one direction; the cache holds nothing yet."""
        count = min(MEASURED_BLOCKS, len(self._slots), len(self._blocks))
        times_s = []
        for _ in range(3):
            began_s = clock.now_s()
            for index in range(count):
                self._slots[index].copy_(self._blocks[index], non_blocking=True)
            if self._blocks.device.type == "cuda":
                torch.cuda.synchronize(self._blocks.device)
            times_s.append(clock.now_s() - began_s)
        return min(times_s) / count
