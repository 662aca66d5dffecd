"""The gRPC face of a store: messages in, the store's methods, messages out.

Who may call is decided here, and what each peer may hold until it ends or runs out. A peer is a host. None
holds more than `MAX_TICKETS`, none has more than half of the pool reserved, and none ends what another
holds. Leases share blocks and last half a minute: their tickets alone count. Errors become statuses in
`base/rpc.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from typing import Any, NamedTuple

import grpc

from base.block_hash import HASH_BYTES, BlockHash
from base.clock import Clock
from base.errors import CapacityError, ForbiddenError, InvalidRequestError, LeaseExpiredError
from base.rpc import Service
from base.tls import NODE_NAME
from kvstore.access import LEASED, OPEN_PUT
from kvstore.store import LEASE_S, MAX_PUT_BLOCKS, PUT_S, Store
from kvstore.wire import MEMBER, Member, chain_from
from protos import kvstore_pb2 as pb
from protos.kvstore_pb2_grpc import KvStoreServicer, add_KvStoreServicer_to_server

Context = grpc.aio.ServicerContext[Any, Any]

MAX_TICKETS = 1024
"""Tickets of one peer. A node has some for each request; the store as a whole has 4,096 grants."""
SHARE = 0.5
"""Share of the pool's blocks that one peer may have reserved."""
MIN_BLOCKS = 64
"""Blocks that one peer may have in the smallest pool: a chain of a short prompt."""


class TicketKind(Enum):
    """The kind of a ticket: one of them does not end the other."""

    PUT = auto()
    READ = auto()


class _PeerTicket(NamedTuple):
    num_blocks: int
    """Blocks that nobody else can have; 0 of a lease."""
    ends_at_s: float


class PeerHolds:
    """Counts tickets and their blocks by peer. Belongs to the event loop."""

    def __init__(self, clock: Clock, num_blocks: int) -> None:
        self._clock = clock
        self._max_blocks = max(MIN_BLOCKS, int(num_blocks * SHARE))
        self._tickets: defaultdict[str, dict[tuple[TicketKind, int], _PeerTicket]] = defaultdict(dict)

    def num_free(self, peer: str) -> int:
        """Return how many more blocks `peer` may have; raises CapacityError if it may have no ticket more."""
        self._forget_ended()
        tickets = self._tickets.get(peer, {})
        if len(tickets) >= MAX_TICKETS:
            raise CapacityError(f"this host holds {MAX_TICKETS} reservations and leases: end some")
        return self._max_blocks - sum(ticket.num_blocks for ticket in tickets.values())

    def add(self, peer: str, name: tuple[TicketKind, int], num_blocks: int, seconds: float) -> None:
        """Count what `peer` was given for so long, under the kind and the number of its ticket."""
        self._tickets[peer][name] = _PeerTicket(num_blocks, self._clock.now_s() + seconds)

    def remove(self, peer: str, name: tuple[TicketKind, int]) -> bool:
        """Forget a ticket; return whether it was this peer's."""
        return self._tickets.get(peer, {}).pop(name, None) is not None

    def _forget_ended(self) -> None:
        now_s = self._clock.now_s()
        for peer, tickets in list(self._tickets.items()):
            for name in [name for name, ticket in tickets.items() if ticket.ends_at_s <= now_s]:
                del tickets[name]
            if not tickets:
                del self._tickets[peer]


class StoreService(KvStoreServicer):
    """Serves one store to other processes."""

    def __init__(self, store: Store, clock: Clock, describe: Callable[[], Member]) -> None:
        self._store = store
        self._holds = PeerHolds(clock, store.pool.num_blocks)
        self._describe = describe

    async def Match(self, request: pb.Chain, context: Context) -> pb.MatchResponse:  # noqa: N802
        found = self._store.match(chain_from(request.hashes))
        return pb.MatchResponse(
            num_blocks=found.num_blocks,
            num_in_memory=found.num_in_memory,
            member=MEMBER.pack(self._describe()),
        )

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:  # noqa: N802
        chain, peer = chain_from(request.hashes), _peer(context)
        known = self._store.pool.match(chain)
        chain = chain[: known + min(MAX_PUT_BLOCKS, _some(self._holds.num_free(peer)))]
        reserved = self._store.reserve(chain, request.tenant)
        if reserved.grant is not None:
            self._holds.add(peer, (TicketKind.PUT, reserved.ticket), len(reserved.missing), PUT_S)
        return pb.ReserveResponse(**OPEN_PUT.pack(reserved))

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:  # noqa: N802
        if not self._holds.remove(_peer(context), (TicketKind.PUT, request.ticket)):
            raise LeaseExpiredError(f"put {request.ticket} has ended")
        return pb.CommitResponse(num_stored=await self._store.commit(request.ticket, request.checksums))

    async def Abort(self, request: pb.Ticket, context: Context) -> pb.Empty:  # noqa: N802
        if self._holds.remove(_peer(context), (TicketKind.PUT, request.ticket)):
            await self._store.abort(request.ticket)
        return pb.Empty()

    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.LeaseResponse:  # noqa: N802
        peer = _peer(context)
        self._holds.num_free(peer)
        chain = chain_from(request.hashes)
        leased = await self._store.lease(chain, request.first)
        if leased.grant is not None:
            try:
                self._holds.num_free(peer)  # others of its calls waited too
            except CapacityError:
                await self._store.release(leased.ticket)
                raise
            self._holds.add(peer, (TicketKind.READ, leased.ticket), 0, LEASE_S)
        return pb.LeaseResponse(**LEASED.pack(leased))

    async def Release(self, request: pb.Ticket, context: Context) -> pb.Empty:  # noqa: N802
        if self._holds.remove(_peer(context), (TicketKind.READ, request.ticket)):
            await self._store.release(request.ticket)
        return pb.Empty()

    async def Delete(self, request: pb.Chain, context: Context) -> pb.DeleteResponse:  # noqa: N802
        return pb.DeleteResponse(num_blocks=await self._store.delete(chain_from(request.hashes)))

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.Empty:  # noqa: N802
        if len(request.hash) != HASH_BYTES:
            raise InvalidRequestError(f"hash: {HASH_BYTES} bytes", "hash")
        await self._store.report(BlockHash(request.hash))
        return pb.Empty()


def admit_nodes(method: str, context: Context) -> AbstractContextManager[None]:
    """Admit a caller whose certificate says that it is a node's; raises ForbiddenError for others."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    if NODE_NAME.encode() not in names:
        raise ForbiddenError(f"only a node may call: its certificate must name {NODE_NAME}")
    return nullcontext()


def _some(num_free: int) -> int:
    """Return the blocks that a peer may still have; raises CapacityError where it may have none."""
    if num_free <= 0:
        raise CapacityError("this host has as much of the pool as one may: end reservations first")
    return num_free


def _peer(context: Context) -> str:
    """Return the caller's host: what it holds outlives its connection."""
    return str(context.peer()).rpartition(":")[0]


def store_service(store: Store, clock: Clock, describe: Callable[[], Member]) -> Service:
    """Return what `base.rpc.start_server` serves. `describe` is asked once it listens."""
    servicer = StoreService(store, clock, describe)
    return Service("conductor.v1.KvStore", lambda server: add_KvStoreServicer_to_server(servicer, server))
