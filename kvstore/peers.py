"""A directory without a directory: every member is asked what it holds.

For a handful of stores and no Redis. A lookup is one call to each member, all at once; its
cost grows with their number, which is what `RedisDirectory` is for. Members know best what
they hold, so there is nothing to publish and nothing that can be stale.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from base.block_hash import BlockHash
from base.errors import ServeError
from base.logs import event
from kvstore.access import RemoteAccess
from kvstore.directory import Replicas
from kvstore.member import Member

log = logging.getLogger(__name__)


class PeerDirectory:
    """Asks the members at some addresses. `close` it."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._accesses = {address: RemoteAccess(address) for address in addresses}

    def publish(self, hashes: Iterable[BlockHash]) -> None:
        """Members are asked."""

    def withdraw(self, hashes: Iterable[BlockHash]) -> None:
        """Members are asked."""

    async def lookup(self, chain: Sequence[BlockHash]) -> list[Replicas]:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._match(address, chain)) for address in self._accesses]
        answers = [answer for task in asked if (answer := task.result()) is not None]
        longest = max((count for _, count in answers), default=0)
        return [tuple(member for member, count in answers if count > at) for at in range(longest)]

    async def members(self) -> list[Member]:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._match(address, ())) for address in self._accesses]
        answers = [answer for task in asked if (answer := task.result()) is not None]
        return sorted((member for member, _ in answers), key=lambda member: member.node_id)

    async def flush(self) -> None:
        """Nothing waits."""

    async def leave(self) -> None:
        """Nobody was told."""

    async def close(self) -> None:
        """Close the connections."""
        for access in self._accesses.values():
            await access.close()

    async def _match(self, address: str, chain: Sequence[BlockHash]) -> tuple[Member, int] | None:
        """Return the member at `address` and its match; None: it does not answer.

        It is asked who it is each time, because behind an address may be a new start.
        """
        access = self._accesses[address]
        try:
            member = await access.describe()
            return member, (await access.match(chain)).num_blocks if chain else 0
        except ServeError as error:
            event(log, "no answer", level=logging.WARNING, address=address, error=error)
            return None
