"""How a client reaches one member's store: by call within a process, or over gRPC.

Both give the same answers and raise the same errors, so a client does not know which it
has. Every call over gRPC has a deadline; a member that does not answer rests.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc

from base.block_hash import BlockHash
from base.clock import Clock
from base.codec import TUPLE, message_of, optional
from base.errors import CapacityError, ProtocolError, ServeError, UnavailableError
from base.logs import event
from base.resting import Resting
from base.wire import GRANT
from kvstore.store import Found, Leased, OpenPut, Store
from kvstore.wire import MEMBER, Member, chain_to
from protos import kvstore_pb2 as pb
from protos.kvstore_pb2_grpc import KvStoreStub

if TYPE_CHECKING:
    from protos.kvstore_pb2_grpc import KvStoreAsyncStub

T = TypeVar("T")

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
"""Limit of a call that decides; loopback and a datacentre need milliseconds."""
LEASE_TIMEOUT_S = 10.0
"""Limit of a call that may wait for the disk."""

CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

OPEN_PUT = message_of(OpenPut, missing=TUPLE, grant=optional(GRANT))
LEASED = message_of(Leased, grant=optional(GRANT), checksums=TUPLE)


class LocalAccess:
    """A store of this process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.commit = store.commit
        self.abort = store.abort
        self.release = store.release
        self.lease = store.lease
        self.delete = store.delete
        self.report = store.report

    async def match(self, chain: Sequence[BlockHash]) -> Found:
        return self._store.match(chain)

    async def reserve(self, chain: Sequence[BlockHash], tenant: str) -> OpenPut:
        return self._store.reserve(chain, tenant)

    async def close(self) -> None:
        """The store is its owner's."""


class RemoteAccess:
    """A store of another process. Raises UnavailableError when it does not answer."""

    def __init__(
        self, address: str, credentials: Callable[[], grpc.ChannelCredentials] | None = None
    ) -> None:
        """Begin; `credentials` makes a node's, from `base/tls.py`: None where stores have no TLS."""
        self._address = address
        self._credentials = credentials
        self._shown: grpc.ChannelCredentials | None = None
        self._dial()

    def _dial(self) -> None:
        """Make the channel. Nothing is dialled before the first call."""
        if self._credentials is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        else:
            self._shown = self._credentials()
            self._channel = grpc.aio.secure_channel(self._address, self._shown, options=CHANNEL_OPTIONS)
        self._stub_of_channel = KvStoreStub(self._channel)

    @property
    def _stub(self) -> KvStoreAsyncStub:
        """The member, by a channel that shows the certificate of now: one made before never would."""
        if self._credentials is not None and self._credentials() is not self._shown:
            self._dial()
        return self._stub_of_channel

    async def match(self, chain: Sequence[BlockHash]) -> Found:
        answer = await self._match(chain)
        return Found(answer.num_blocks, answer.num_in_memory)

    async def match_as(self, chain: Sequence[BlockHash]) -> tuple[Member, int]:
        """Return who answers, and how many leading blocks it holds."""
        answer = await self._match(chain)
        return MEMBER.unpack(answer.member), answer.num_blocks

    async def _match(self, chain: Sequence[BlockHash]) -> pb.MatchResponse:
        call = self._stub.Match(pb.Chain(hashes=chain_to(chain)), timeout=CALL_TIMEOUT_S)
        answer = await _answer(call)
        if answer.num_blocks > len(chain):
            raise ProtocolError(f"{answer.num_blocks} blocks of a chain of {len(chain)}")
        return answer

    async def reserve(self, chain: Sequence[BlockHash], tenant: str) -> OpenPut:
        request = pb.ReserveRequest(hashes=chain_to(chain), tenant=tenant)
        return OPEN_PUT.unpack(await _answer(self._stub.Reserve(request, timeout=CALL_TIMEOUT_S)))

    async def commit(self, ticket: int, checksums: Sequence[int]) -> int:
        request = pb.CommitRequest(ticket=ticket, checksums=checksums)
        return (await _answer(self._stub.Commit(request, timeout=CALL_TIMEOUT_S))).num_stored

    async def abort(self, ticket: int) -> None:
        await _answer(self._stub.Abort(pb.Ticket(ticket=ticket), timeout=CALL_TIMEOUT_S))

    async def lease(self, chain: Sequence[BlockHash], first: int) -> Leased:
        request = pb.LeaseRequest(hashes=chain_to(chain), first=first)
        return LEASED.unpack(await _answer(self._stub.Lease(request, timeout=LEASE_TIMEOUT_S)))

    async def release(self, ticket: int) -> None:
        await _answer(self._stub.Release(pb.Ticket(ticket=ticket), timeout=CALL_TIMEOUT_S))

    async def delete(self, chain: Sequence[BlockHash]) -> int:
        call = self._stub.Delete(pb.Chain(hashes=chain_to(chain)), timeout=CALL_TIMEOUT_S)
        return (await _answer(call)).num_blocks

    async def report(self, block_hash: BlockHash) -> None:
        await _answer(self._stub.Report(pb.ReportRequest(hash=block_hash), timeout=CALL_TIMEOUT_S))

    async def close(self) -> None:
        await self._channel.close()


StoreAccess = LocalAccess | RemoteAccess
"""The calls by which a client uses one member's store."""


async def _answer(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise CapacityError(error.details() or "no room") from error
        raise UnavailableError(f"{error.code().name}: {error.details()}") from error


def resting_peers(clock: Clock) -> Resting:
    """Return a memory of failed peers, by whatever names them: they rest for a second to half a minute."""
    return Resting(clock, 1.0, 30.0)


def note_failure(resting: Resting, peer: Hashable, error: ServeError) -> None:
    """Let `peer` rest, and log that unless it rests already."""
    rest_s = resting.failed(peer)
    if rest_s is not None:
        event(log, "peer failed", level=logging.WARNING, peer=peer, rest_s=rest_s, error=error)
