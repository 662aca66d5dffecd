"""The gRPC face of a store: messages in, the store's methods, messages out.

Nothing is decided here. Errors become statuses in `base/rpc.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc

from base.block_hash import HASH_BYTES, BlockHash
from base.errors import InvalidRequestError
from base.rpc import Service
from base.wire import grant_to
from kvstore.member import Member
from kvstore.store import Store
from kvstore.wire import chain_from, member_to
from protos import kvstore_pb2 as pb
from protos.kvstore_pb2_grpc import KvStoreServicer, add_KvStoreServicer_to_server

Context = grpc.aio.ServicerContext[Any, Any]

MAX_SOFT_PIN_S = 24 * 3600.0


class StoreService(KvStoreServicer):
    """Serves one store to other processes."""

    def __init__(self, store: Store, describe: Callable[[], Member]) -> None:
        self._store = store
        self._describe = describe

    async def Match(self, request: pb.Chain, context: Context) -> pb.MatchResponse:  # noqa: N802
        found = self._store.match(chain_from(request.hashes))
        return pb.MatchResponse(
            num_blocks=found.num_blocks,
            num_in_memory=found.num_in_memory,
            member=member_to(self._describe()),
        )

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:  # noqa: N802
        reserved = self._store.reserve(chain_from(request.hashes), request.tenant)
        return pb.ReserveResponse(
            ticket=reserved.ticket,
            missing=reserved.missing,
            grant=None if reserved.grant is None else grant_to(reserved.grant),
        )

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:  # noqa: N802
        return pb.CommitResponse(num_stored=await self._store.commit(request.ticket, request.checksums))

    async def Abort(self, request: pb.Ticket, context: Context) -> pb.Empty:  # noqa: N802
        await self._store.abort(request.ticket)
        return pb.Empty()

    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.LeaseResponse:  # noqa: N802
        leased = await self._store.lease(chain_from(request.hashes), request.first)
        return pb.LeaseResponse(
            ticket=leased.ticket,
            num_blocks=leased.num_blocks,
            grant=None if leased.grant is None else grant_to(leased.grant),
            checksums=leased.checksums,
        )

    async def Release(self, request: pb.Ticket, context: Context) -> pb.Empty:  # noqa: N802
        await self._store.release(request.ticket)
        return pb.Empty()

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:  # noqa: N802
        if not math.isfinite(request.seconds) or not 0 <= request.seconds <= MAX_SOFT_PIN_S:
            raise InvalidRequestError(f"seconds: between 0 and {MAX_SOFT_PIN_S:.0f}", "seconds")
        pinned = await self._store.pin(chain_from(request.hashes), request.seconds)
        return pb.PinResponse(ticket=pinned.ticket, num_blocks=pinned.num_blocks)

    async def Delete(self, request: pb.Chain, context: Context) -> pb.DeleteResponse:  # noqa: N802
        return pb.DeleteResponse(num_blocks=self._store.delete(chain_from(request.hashes)))

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.Empty:  # noqa: N802
        if len(request.hash) != HASH_BYTES:
            raise InvalidRequestError(f"hash: {HASH_BYTES} bytes", "hash")
        await self._store.report(BlockHash(request.hash))
        return pb.Empty()


def store_service(store: Store, describe: Callable[[], Member]) -> Service:
    """Return what `base.rpc.start_server` serves. `describe` is asked once it listens."""
    servicer = StoreService(store, describe)
    return Service("conductor.v1.KvStore", lambda server: add_KvStoreServicer_to_server(servicer, server))
