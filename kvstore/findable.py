"""Blocks that a node can give, from whatever tier, as it reports them to the conductor.

A block is findable on a node while it is in the engine's cache, in the node's part of the
block cache, or on its disk. The conductor knows one list for each node, because for
placement it makes one difference: here, or not here.

The tiers say what changed in them; `take` looks at which of them has a block now. So a
block that moves from one tier to another is not spoken of, and nothing is written down
twice. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from base.block_hash import BlockHash

Has = Callable[[BlockHash], bool]


class Findable:
    """Merges the changes of two tiers: an engine's cache, and a store. Either may be missing."""

    def __init__(self, in_engine: Has, in_store: Has) -> None:
        self._in_engine = in_engine
        self._in_store = in_store
        self._changed: dict[BlockHash, None] = {}

    def store_changed(self, hashes: Iterable[BlockHash]) -> None:
        """Note that these came to the store or left it."""
        self._changed.update(dict.fromkeys(hashes))

    def take(
        self, stored: Collection[BlockHash], removed: Collection[BlockHash]
    ) -> tuple[list[BlockHash], list[BlockHash]]:
        """Return (stored, removed) for the whole node since the last call.

        Args:
            stored: What became findable in the engine's cache since then, net.
            removed: What the engine's cache forgot since then, net.
        """
        in_engine, in_store = self._in_engine, self._in_store
        changed, self._changed = self._changed, {}
        found = [name for name in stored if name in changed or not in_store(name)]
        gone = [name for name in removed if name not in changed and not in_store(name)]
        for name in changed:
            if in_engine(name):
                continue  # reported when it came there
            if in_store(name):
                found.append(name)
            else:
                gone.append(name)
        return found, gone
