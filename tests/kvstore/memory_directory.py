"""A directory in memory, which the stores of one process share."""

from collections.abc import Iterable, Sequence

from base.block_hash import BlockHash
from kvstore.directory import Replicas
from kvstore.wire import Member


class MemoryBoard:
    """What the directories of one process share."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.holders: dict[BlockHash, dict[int, None]] = {}


class MemoryDirectory:
    """A directory without a server."""

    def __init__(self, board: MemoryBoard, member: Member | None = None) -> None:
        """Join `board` as `member`; None only looks up."""
        self._board = board
        self._member = member
        if member is not None:
            for epoch, other in list(board.members.items()):
                if other.node_id == member.node_id:
                    del board.members[epoch]
            board.members[member.epoch] = member

    def publish(self, hashes: Iterable[BlockHash]) -> None:
        if self._member is not None:
            for block_hash in hashes:
                self._board.holders.setdefault(block_hash, {})[self._member.epoch] = None

    def withdraw(self, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            holders = self._board.holders.get(block_hash, {})
            if self._member is not None:
                holders.pop(self._member.epoch, None)
            if not holders:
                self._board.holders.pop(block_hash, None)

    async def lookup(self, chain: Sequence[BlockHash]) -> list[Replicas]:
        found: list[Replicas] = []
        for block_hash in chain:
            epochs = self._board.holders.get(block_hash, ())
            replicas = tuple(self._board.members[each] for each in epochs if each in self._board.members)
            if not replicas:
                break
            found.append(replicas)
        return found

    async def members(self) -> list[Member]:
        return sorted(self._board.members.values(), key=lambda member: member.node_id)

    async def flush(self) -> None:
        """Nothing waits."""

    async def leave(self) -> None:
        if self._member is not None:
            self._board.members.pop(self._member.epoch, None)
