"""The directory of members and the blocks that they hold, shared through Redis.

It passes `tests/contract/test_directory.py`. A directory is a hint, never the truth: a
member that is asked for a block it has evicted says so, and the asker goes on.

**Publishing never waits and never fails.** It changes this process's own view and an
outbox; `RedisDirectory.run` carries the outbox to Redis. `lookup` asks Redis within a
short bound; when Redis does not answer, or answers without what we know to be so, the last
view is used. So Redis may restart, be flushed, refuse writes, be slow or be gone: lookups
go on, with what was known. When it is back, the member joins and publishes all it holds.

In Redis (keys after `conductor:`; values are bytes):

    b:<hash>     epochs of the holders, 8 bytes each; lives BLOCK_LIFE_S unless published again
    m:<epoch>    the member, as a StoreMember message; lives LEASE_S unless renewed
    members      set of epochs            nodes    hash of node id to epoch

A chain is looked up by one script (`lua/lookup.lua`), one string in and one out. An MGET
from here takes twice our processor time, a pipeline of single commands ten times.
"""

from __future__ import annotations

import asyncio
import logging
import random
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

import redis.asyncio
from redis.exceptions import RedisError

from base.block_hash import HASH_BYTES, BlockHash
from base.clock import Clock
from base.errors import ProtocolError
from base.logs import event
from kvstore.wire import MEMBER, Member, member_from_bytes
from protos import kvstore_pb2 as pb

T = TypeVar("T")

log = logging.getLogger(__name__)

LEASE_S = 10.0
HEARTBEAT_S = 2.0
LOOKUP_TIMEOUT_S = 0.05
"""A lookup saves a prefill of some 100 ms; waiting longer for it is no gain."""
WRITE_TIMEOUT_S = 1.0
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
BLOCK_LIFE_S = 3600.0
"""Time after which a block that nobody published again is forgotten; all is published again in half."""
MAX_OUTBOX = 65_536
"""Changes that wait for Redis; beyond, all that is held is published again instead."""
MAX_VIEW = 1 << 18
"""Blocks whose holders are remembered from lookups."""
MAX_REPLICAS = 16
WRITE_BATCH = 1_024
LOOKUP_BATCH = 2_048
"""Blocks in one script; Lua unpacks some 8,000 values at most."""
_BLOCK, _MEMBER, _MEMBERS, _NODES = (b"conductor:" + key for key in (b"b:", b"m:", b"members", b"nodes"))
_EPOCH = struct.Struct("<Q")
_RUN = struct.Struct("<HB")
"""Blocks with the same holders, and the number of those."""
_LUA = Path(__file__).parent / "lua"

Replicas = tuple[Member, ...]


class Directory(Protocol):
    """Holders of blocks, as clients look them up."""

    async def lookup(self, chain: Sequence[BlockHash]) -> list[Replicas]:
        """Return the live holders of each leading block, up to the first that has none."""
        ...

    async def members(self) -> list[Member]:
        """Return the members that live, by node id."""
        ...


class RedisDirectory:
    """The shared directory. `run` must be running; everything else works without Redis."""

    def __init__(
        self,
        url: str,
        clock: Clock,
        rng: random.Random,
        member: Member | None = None,
    ) -> None:
        """Begin; connects later.

        Args:
            url: redis://, rediss:// or unix://.
            clock: For the waits between two attempts.
            rng: Spreads the attempts of many processes.
            member: Ours; None only looks up.
        """
        self._reader = _connect(url, LOOKUP_TIMEOUT_S)
        self._writer = _connect(url, WRITE_TIMEOUT_S)
        self._clock = clock
        self._rng = rng
        self._member = member
        self._scripts = {
            path.stem: self._writer.register_script(path.read_text()) for path in sorted(_LUA.glob("*.lua"))
        }
        self._own: dict[BlockHash, None] = {}
        self._view: OrderedDict[BlockHash, bytes] = OrderedDict()
        self._members: dict[int, Member] = {} if member is None else {member.epoch: member}
        self._outbox: OrderedDict[BlockHash, bool] = OrderedDict()
        self._has_news = asyncio.Event()
        self._is_joined = False
        self._num_overruns = 0
        self.is_readable = True
        self.is_writable = True
        self._backoff_s = MIN_BACKOFF_S
        self._republish_at_s = clock.now_s() + BLOCK_LIFE_S / 2

    def publish(self, hashes: Iterable[BlockHash]) -> None:
        """Take note that this process's member holds these blocks."""
        self._note(hashes, is_held=True)

    def withdraw(self, hashes: Iterable[BlockHash]) -> None:
        """Take note that this process's member holds these blocks no more."""
        self._note(hashes, is_held=False)

    async def lookup(self, chain: Sequence[BlockHash]) -> list[Replicas]:
        if not chain:
            return []
        holders = await self._holders(chain)
        kinds = {packed: _unpacked(packed) for packed in set(holders)}
        if any(epoch not in self._members for epochs in kinds.values() for epoch in epochs):
            try:
                await self._refresh_members(self._reader)
            except (RedisError, OSError) as error:
                self._lost_reading(error)
        living = {packed: _living(epochs, self._members) for packed, epochs in kinds.items()}
        found = [living[packed] for packed in holders]
        return found[: found.index(())] if () in found else found

    async def members(self) -> list[Member]:
        if self.is_readable:
            try:
                await self._refresh_members(self._reader)
            except (RedisError, OSError) as error:
                self._lost_reading(error)
        return sorted(self._members.values(), key=lambda member: member.node_id)

    async def leave(self) -> None:
        """End this process's membership: its replicas are nobody's."""
        if self._member is not None:
            with suppress(RedisError, OSError):
                await _answer(self._writer.delete(_MEMBER + _EPOCH.pack(self._member.epoch)))

    async def close(self) -> None:
        """Close the connections."""
        await self._reader.aclose()
        await self._writer.aclose()

    async def run(self) -> None:
        """Keep Redis up to date, until cancelled."""
        while True:
            try:
                await self._carry()
                self.is_readable = self.is_writable = True
                self._backoff_s = MIN_BACKOFF_S
                wait_s = HEARTBEAT_S
            except (RedisError, OSError) as error:
                if self.is_writable:
                    event(log, "redis refuses", level=logging.WARNING, error=error)
                self.is_writable = False
                wait_s = self._backoff_s * (0.5 + self._rng.random())
                self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
            await self._wait_for_news(wait_s)

    # --- the view -----------------------------------------------------------------------

    def _note(self, hashes: Iterable[BlockHash], is_held: bool) -> None:
        if self._member is None:
            return
        for block_hash in hashes:
            if is_held:
                self._own[block_hash] = None
            else:
                self._own.pop(block_hash, None)
            self._outbox[block_hash] = is_held
            self._outbox.move_to_end(block_hash)
        if len(self._outbox) > MAX_OUTBOX:
            # Withdrawals are lost with it: those replicas are refused when asked for.
            self._outbox.clear()
            self._is_joined = False
            self._num_overruns += 1
        if self.is_writable:
            self._has_news.set()

    async def _holders(self, chain: Sequence[BlockHash]) -> list[bytes]:
        """Return the packed epochs for each leading block that somebody is known to hold."""
        found: list[bytes] = []
        if self.is_readable:
            try:
                while len(found) < len(chain):
                    part = await self._found(chain[len(found) : len(found) + LOOKUP_BATCH])
                    found += part
                    if len(part) < LOOKUP_BATCH:
                        break
            except (RedisError, OSError) as error:
                self._lost_reading(error)
        # Without our own join in it, what is missing from Redis may have been lost there.
        if not self.is_readable or (self._member is not None and not self._is_joined):
            found = [
                _union(found[at] if at < len(found) else b"", self._view.get(block_hash, b""))
                for at, block_hash in enumerate(chain)
            ]
        self._view.update(zip(chain, found, strict=False))
        while len(self._view) > MAX_VIEW:
            self._view.popitem(last=False)
        return self._with_our_own(chain, found)

    def _with_our_own(self, chain: Sequence[BlockHash], found: list[bytes]) -> list[bytes]:
        if self._member is None or chain[0] not in self._own:
            return found
        ours = _EPOCH.pack(self._member.epoch)
        found += [b""] * (len(chain) - len(found))
        return [
            _union(epochs, ours) if block_hash in self._own else epochs
            for block_hash, epochs in zip(chain, found, strict=True)
        ]

    async def _found(self, chain: Sequence[BlockHash]) -> list[bytes]:
        args: list[bytes | int] = [_BLOCK + _BLOCK.join(chain), len(_BLOCK) + HASH_BYTES]
        answer: bytes = await _answer(self._scripts["lookup"](args=args, client=self._reader))
        found: list[bytes] = []
        at = 0
        while at < len(answer):
            num_blocks, num_holders = _RUN.unpack_from(answer, at)
            begin, at = at + _RUN.size, at + _RUN.size + num_holders * _EPOCH.size
            found += [answer[begin:at]] * num_blocks
        return found

    def _lost_reading(self, error: Exception) -> None:
        if self.is_readable:
            event(log, "redis does not answer", level=logging.WARNING, error=error)
        self.is_readable = False
        self._has_news.set()  # `run` finds out when it is back

    # --- carrying -----------------------------------------------------------------------

    async def _carry(self) -> None:
        """Bring Redis up to date; raises what Redis raises, and loses nothing then."""
        if self._member is None:
            await self._refresh_members(self._writer)
            return
        key = _MEMBER + _EPOCH.pack(self._member.epoch)
        is_due = self._clock.now_s() >= self._republish_at_s
        if not self._is_joined or is_due or not await _answer(self._writer.pexpire(key, int(LEASE_S * 1000))):
            await self._join(self._member, key)
        while self._outbox:
            await self._carry_batch(self._member)
        await self._refresh_members(self._writer)

    async def _join(self, member: Member, key: bytes) -> None:
        self._is_joined, num_overruns = False, self._num_overruns
        epoch = _EPOCH.pack(member.epoch)
        description = pb.StoreMember(**MEMBER.pack(member)).SerializeToString()
        await _answer(
            self._scripts["join"](
                keys=[_MEMBERS, _NODES, key],
                args=[
                    member.node_id.encode(),
                    epoch,
                    description,
                    int(LEASE_S * 1000),
                    _MEMBER,
                ],
            )
        )
        held = list(self._own)
        self._republish_at_s = self._clock.now_s() + BLOCK_LIFE_S / 2
        for at in range(0, len(held), WRITE_BATCH):
            # What comes or goes meanwhile is in the outbox, and carried after this.
            batch = [name for name in held[at : at + WRITE_BATCH] if name in self._own]
            await self._carry_changes(member, dict.fromkeys(batch, True))
        while self._outbox:
            await self._carry_batch(member)
        self._is_joined = num_overruns == self._num_overruns
        event(log, "joined the directory", blocks=len(self._own))

    async def _carry_batch(self, member: Member) -> None:
        batch = dict(islice(self._outbox.items(), WRITE_BATCH))
        await self._carry_changes(member, batch)
        for block_hash, is_held in batch.items():
            if self._outbox.get(block_hash) is is_held:
                del self._outbox[block_hash]

    async def _carry_changes(self, member: Member, batch: Mapping[BlockHash, bool]) -> None:
        epoch = _EPOCH.pack(member.epoch)
        stored = [_BLOCK + block_hash for block_hash, is_held in batch.items() if is_held]
        gone = [_BLOCK + block_hash for block_hash, is_held in batch.items() if not is_held]
        if stored:
            life = int(BLOCK_LIFE_S * 1000)
            args: list[bytes | int] = [epoch, life, MAX_REPLICAS * _EPOCH.size]
            await _answer(self._scripts["publish"](keys=stored, args=args))
        if gone:
            await _answer(self._scripts["withdraw"](keys=gone, args=[epoch]))

    async def _refresh_members(self, client: redis.asyncio.Redis) -> None:
        answer = await _answer(self._scripts["members"](keys=[_MEMBERS], args=[_MEMBER], client=client))
        found: dict[int, Member] = {}
        for epoch, description in zip(answer[::2], answer[1::2], strict=True):
            with suppress(ProtocolError, struct.error):
                found[_EPOCH.unpack(epoch)[0]] = member_from_bytes(description)
        if self._member is None or self._member.epoch in found:
            self._members = found
        else:
            # A list that lacks us, who live, has lost writes: what it lacks may live too.
            self._members = {**self._members, **found}

    async def _wait_for_news(self, wait_s: float) -> None:
        if self.is_writable and self.is_readable:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._has_news.wait()
        else:
            # News must not shorten the wait: they are what Redis could not take.
            await asyncio.sleep(wait_s)
        self._has_news.clear()


def _living(epochs: Iterable[int], members: Mapping[int, Member]) -> Replicas:
    return tuple(members[epoch] for epoch in epochs if epoch in members)


def _unpacked(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // _EPOCH.size}Q", packed)


def _union(packed: bytes, more: bytes) -> bytes:
    epochs = dict.fromkeys((*_unpacked(packed), *_unpacked(more)))
    return struct.pack(f"<{len(epochs)}Q", *epochs)


async def _answer(call: Awaitable[T]) -> T:
    """Await a call of the client, which at some moments loses a cancellation.

    It takes it for a lost connection, and then asks again or raises something else.
    """
    try:
        return await call
    finally:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError


def _connect(url: str, timeout_s: float) -> redis.asyncio.Redis:
    return redis.asyncio.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        decode_responses=False,
        max_connections=8,
    )
