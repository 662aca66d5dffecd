"""A directory without a directory: every member is asked what it holds.

For a handful of stores and no Redis. A lookup is one call to each member, all at once; its
cost grows with their number, which is what `RedisDirectory` is for. Members know best what
they hold, so there is nothing to publish and nothing that can be stale. One that does not
answer is left out, and rests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from base.block_hash import BlockHash
from base.clock import Clock
from base.errors import ServeError
from base.together import together
from kvstore.access import RemoteAccess, note_failure, resting_peers
from kvstore.directory import Replicas
from kvstore.store import Store
from kvstore.wire import Member


class PeerDirectory:
    """Asks our own store, and the members at some addresses. `close` it."""

    def __init__(
        self,
        addresses: Sequence[str],
        clock: Clock,
        own: tuple[Member, Store] | None = None,
        reach: Callable[[str], RemoteAccess] = RemoteAccess,
    ) -> None:
        """Begin. Among `addresses` may be our own; `reach` makes the access to one."""
        self._own = own
        mine = None if own is None else own[0].address
        self._accesses = {address: reach(address) for address in addresses if address != mine}
        self._resting = resting_peers(clock)
        self._answered: list[Member] = []

    async def lookup(self, chain: Sequence[BlockHash]) -> list[Replicas]:
        answers = await self._ask(chain)
        longest = max((count for _, count in answers), default=0)
        return [tuple(member for member, count in answers if count > at) for at in range(longest)]

    async def members(self) -> list[Member]:
        """Return who answered the last lookup; who is asked for the first time is asked now."""
        answered = self._answered or [member for member, _ in await self._ask(())]
        return sorted(answered, key=lambda member: member.node_id)

    async def close(self) -> None:
        """Close the connections."""
        for access in self._accesses.values():
            await access.close()

    async def _ask(self, chain: Sequence[BlockHash]) -> list[tuple[Member, int]]:
        """Return each member that answers, with its match."""
        asked = await together(
            self._match(address, access, chain)
            for address, access in self._accesses.items()
            if address not in self._resting
        )
        answers = [answer for answer in asked if answer is not None]
        if self._own is not None:
            answers.insert(0, (self._own[0], self._own[1].match(chain).num_blocks))
        self._answered = [member for member, _ in answers]
        return answers

    async def _match(
        self, address: str, access: RemoteAccess, chain: Sequence[BlockHash]
    ) -> tuple[Member, int] | None:
        """Return the member at `address` and its match; None: it does not answer.

        It says who it is each time, because behind an address may be a new start.
        """
        try:
            answer = await access.match_as(chain)
        except ServeError as error:
            note_failure(self._resting, address, error)
            return None
        self._resting.succeeded(address)
        return answer
