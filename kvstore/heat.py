"""How often blocks are read, recent reads counting more. Pure.

A read counts for every block of its chain, so a block is never hotter than the one before
it: the blocks above any bound form whole chains.
"""

from __future__ import annotations

from collections.abc import Iterable

from base.block_hash import BlockHash

COLD = 0.25
"""Below it a block is forgotten."""
MAX_BLOCKS = 1 << 18
"""Remembered; the coldest halves go first."""


class Heat:
    """Scores of blocks: reads, halved at each `fade`."""

    def __init__(self) -> None:
        self._scores: dict[BlockHash, float] = {}

    def note(self, chain: Iterable[BlockHash]) -> None:
        """Count one read of each block of `chain`."""
        scores = self._scores
        for block_hash in chain:
            scores[block_hash] = scores.get(block_hash, 0.0) + 1.0
        if len(scores) > MAX_BLOCKS:
            self.fade()

    def fade(self) -> None:
        """Halve every score; forget what is cold."""
        self._scores = {name: score / 2 for name, score in self._scores.items() if score / 2 >= COLD}

    def of(self, block_hash: BlockHash) -> float:
        """Return a block's score."""
        return self._scores.get(block_hash, 0.0)

    def above(self, bound: float) -> list[BlockHash]:
        """Return the blocks of at least that score, hottest first."""
        hot = [(score, name) for name, score in self._scores.items() if score >= bound]
        return [name for _, name in sorted(hot, key=lambda item: -item[0])]
