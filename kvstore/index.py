"""Prefix index: which nodes hold which block, answered for a whole prompt at once.

`holders[block] = bit mask of nodes`. A query walks the chain and keeps the intersection
of the masks; whenever it shrinks, the nodes that fell out form one group: they hold
exactly that many leading blocks. The walk ends at the first block that nobody has, so a
query costs at most depth + 1 probes and some machine words per 64 nodes, whatever the
number of nodes. Only the groups are ever looked at afterwards: with one prefix shared by
all (a system prompt) there are two or three of them for a thousand nodes.

A radix tree was weighed: the chain already names each block together with all before it,
so the tree's edges say nothing that the key does not. Sharding by first block was weighed
and lost: in the public conversation trace every prompt starts with the same block.

Masks of one node are shared objects, because most blocks have one holder (76 % in that
trace). Each node's blocks are also kept as a set, so that a node can leave in time
proportional to what it held.

The keys are `BlockHash` in the conductor and the trace's integers in replay: any hashable.
Nothing here does I/O; one thread owns an index.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence

Key = Hashable

Group = tuple[int, int]
"""(matched blocks, mask of the nodes that hold exactly so many leading blocks)."""


class PrefixIndex:
    """Holders of every block in the cluster, nodes being small integers.

    `check()` asserts that both directions of the map agree.
    """

    def __init__(self) -> None:
        self._holders: dict[Key, int] = {}
        self._blocks: dict[int, set[Key]] = {}
        self._bits: list[int] = []

    def __len__(self) -> int:
        """Return the number of distinct blocks that somebody holds."""
        return len(self._holders)

    def num_blocks(self, node: int) -> int:
        """Return how many blocks `node` holds."""
        return len(self._blocks.get(node, ()))

    def holders(self, key: Key) -> int:
        """Return the mask of the nodes that hold one block, whatever came before it."""
        return self._holders.get(key, 0)

    def held_nowhere(self, keys: Collection[Key]) -> set[Key]:
        """Return those of `keys` that no node holds."""
        return set(keys).difference(self._holders)

    def store(self, node: int, keys: Collection[Key]) -> None:
        """Note that `node` holds `keys`; those it already held stay."""
        mine = self._blocks.get(node)
        if mine is None:
            mine = self._blocks[node] = set()
            self._know(node)
        # the shared object where there is one holder: an index of millions of
        # blocks over hundreds of nodes would otherwise be mostly equal integers
        bit = self._bits[node]
        holders = self._holders
        for key in keys:
            mask = holders.setdefault(key, bit)
            if mask is not bit:
                holders[key] = mask | bit
        mine.update(keys)

    def remove(self, node: int, keys: Collection[Key]) -> None:
        """Note that `node` forgot `keys`; unknown ones are passed over."""
        mine = self._blocks.get(node)
        if mine is None:
            return
        bit = self._bits[node]
        holders = self._holders
        for key in keys:
            mask = holders.pop(key, 0)
            if mask != bit and (left := mask & ~bit):  # most blocks have this holder alone
                holders[key] = left
        mine.difference_update(keys)

    def remove_node(self, node: int) -> None:
        """Forget everything that `node` held."""
        self.remove(node, list(self._blocks.get(node, ())))
        self._blocks.pop(node, None)

    def replace(self, node: int, keys: Iterable[Key]) -> None:
        """Make `keys` all that `node` holds: a snapshot."""
        wanted = set(keys)
        known = self._blocks.get(node, set())
        self.remove(node, list(known - wanted))
        self.store(node, wanted - known)

    def match(self, chain: Sequence[Key]) -> list[Group]:
        """Return the nodes that hold a prefix of `chain`, grouped, deepest first.

        The masks are disjoint. Nodes that do not hold the first block are in no group.
        """
        groups: list[Group] = []
        current, depth, get = -1, 0, self._holders.get
        for key in chain:
            mask = get(key, 0)
            if mask != current and (deeper := current & mask) != current:
                if depth:
                    groups.append((depth, current ^ deeper))
                current = deeper
                if not current:
                    break
            depth += 1
        if current > 0:
            groups.append((depth, current))
        groups.reverse()
        return groups

    def _know(self, node: int) -> None:
        """Make the mask of one node, which is the same object from then on."""
        while len(self._bits) <= node:
            self._bits.append(1 << len(self._bits))

    def check(self) -> None:
        """Assert that the holders of each block and the blocks of each node agree."""
        seen: dict[Key, int] = {}
        for node, keys in self._blocks.items():
            for key in keys:
                seen[key] = seen.get(key, 0) | 1 << node
        assert seen == self._holders, "holders and blocks disagree"


class NodeEvents:
    """Numbers of one node's KV events, in one epoch of it; finds what was lost.

    Every block stored or removed has a number, counted from 1 in each epoch. A message
    carries a run of them. A run that does not start where the last one ended means that
    something was lost: what is known of the node is then wrong in unknown places, so all
    of it is dropped until the node's next snapshot. So does a node's word that its next
    event has a later number than the one awaited here: the last events were lost.
    """

    def __init__(self, index: PrefixIndex, node: int) -> None:
        self._index = index
        self._node = node
        self._next_number = 1
        self.waits_for_snapshot = False
        """Whether a gap was seen and events are ignored until a snapshot comes."""

    def reached(self, next_number: int) -> None:
        """Take in the number of the event that the node sends next: those before it should be known."""
        if next_number > self._next_number:
            self._lose()

    def _lose(self) -> None:
        self._index.remove_node(self._node)
        self.waits_for_snapshot = True

    def apply(
        self,
        first_number: int,
        stored: Sequence[Key],
        removed: Sequence[Key],
        is_snapshot: bool = False,
    ) -> bool:
        """Apply one message; return False where it showed a gap or came during one.

        `removed` is applied before `stored`, since a node evicts in order to store.
        A run that is wholly old (a repeat) changes nothing and is no gap.
        """
        next_number = first_number + len(stored) + len(removed)
        if is_snapshot:
            self._index.replace(self._node, stored)
            self.waits_for_snapshot = False
        elif next_number <= self._next_number and not self.waits_for_snapshot:
            return True
        elif self.waits_for_snapshot or first_number != self._next_number:
            self._lose()
            return False
        else:
            self._index.remove(self._node, removed)
            self._index.store(self._node, stored)
        self._next_number = next_number
        return True
