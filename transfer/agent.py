"""The transfer agent: one for each process, and all that the rest of the program uses.

Owner's side: segments, and grants on them for peers. Asker's side: batches under a
grant that a peer gave. Memory is safe to reuse when `revoke` has returned (ours, that
peers wrote or read) and when `write` or `read` has returned or raised (ours, that we
sent from or received into).
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import secrets
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from base.clock import Clock
from base.config import TransferConfig
from base.errors import ProtocolError, TransferFailedError
from base.grants import Endpoint, Grant, Operation, PeerDescriptor
from base.logs import event
from base.transports import TRANSPORTS
from transfer.batch import Pieces, Priority, require_allowed
from transfer.completion import Latch, begin, post
from transfer.gpu.staged import StagedTransport
from transfer.gpu.staging import PinnedStaging
from transfer.owned.board import Board
from transfer.owned.holdings import Holdings
from transfer.owned.ranges import ranges_of, with_table
from transfer.owned.segment import DeviceMemory, Segment
from transfer.router import Router
from transfer.tcp.frame import MAX_FRAME_BYTES
from transfer.tcp.greeting import SECRET_BYTES, PeerKey
from transfer.tcp.host import TransferHost
from transfer.tcp.server import TcpServer
from transfer.transport import AbsentError, Carriage, OfferedTransport, TransferObserver, Transport

MAX_KEPT_S = 0.001
"""Time for which batches that wait for nothing follow each other before other tasks have the loop."""
KNOWN_GRANTS = 128
"""Grants whose ranges are remembered, at most 1 MiB each."""
CUT_AFTER_S = 1.0
"""A peer that reaches into a grant this long after its end is disconnected."""

log = logging.getLogger(__name__)


class TransferAgent:
    """Owns this process's segments, grants and links. One event loop calls it.

    `wrap` is put around each transport: `bench/faults/transport.py`. `carriage` makes what carries bytes
    instead of the configured transports, and `random_bits` draws the names of segments and grants
    and the secret that peers prove to know: a simulation hands both in. `observers` are notified
    of each batch.
    """

    def __init__(
        self,
        node_id: str,
        epoch: int,
        config: TransferConfig,
        clock: Clock,
        wrap: Callable[[Transport], Transport] = lambda transport: transport,
        carriage: Callable[[Holdings], Carriage] | None = None,
        random_bits: Callable[[int], int] = secrets.randbits,
        observers: Sequence[TransferObserver] = (),
    ) -> None:
        self._wrap = wrap
        self._node_id = node_id
        self._epoch = epoch
        self._secret = random_bits(8 * SECRET_BYTES).to_bytes(SECRET_BYTES, "little")
        self._config = config
        self._clock = clock
        self._names = [name for name in TRANSPORTS if name in config.transports]
        on_host = [name for name in self._names if TRANSPORTS[name].is_on_host]
        board = Board(epoch) if on_host else None
        stage = functools.partial(PinnedStaging, buffer_bytes=MAX_FRAME_BYTES)
        self._holdings = Holdings(clock, board, random_bits, stage)
        self._host = TransferHost(config, clock, self._holdings, PeerKey(self._secret, epoch))
        self._carriage = None if carriage is None else carriage(self._holdings)
        self._endpoints = [] if self._carriage is None else list(self._carriage.endpoints)
        self._endpoints += [] if board is None else [Endpoint(name, board.address) for name in on_host]
        self._offers: list[OfferedTransport] = []
        self._wires: list[Transport] = []
        self._absent: dict[str, str] = {}
        self._router = Router((), clock, self._absent, observers)
        # Batches of one grant follow each other, and a grant may have thousands of ranges.
        self._ranges_of = functools.lru_cache(KNOWN_GRANTS)(
            lambda grant: with_table(ranges_of(grant.offsets, grant.length))
        )
        self._turn_begun_s: float | None = None
        self._draining: dict[int, asyncio.Future[None]] = {}
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._sweep_at_s = float("inf")

    async def start(self) -> None:
        """Listen, and be ready to reach peers. Raises OSError if the port is taken."""
        if self._carriage is not None:
            self._offers = [OfferedTransport(transport) for transport in self._carriage.transports]
        else:
            self._offers = [made for name in self._names if (made := self._made(name)) is not None]
        self._endpoints += [
            Endpoint(made.transport.name, made.address) for made in self._offers if made.address
        ]
        self._wires = [made.transport for made in self._offers if made.is_wire]
        for made in self._offers:
            self._router.add(self._wrap(made.transport))

    def _made(self, name: str) -> OfferedTransport | None:
        """Return the transport of that name; None: it cannot work here, and why is kept."""
        try:
            # By name, because some import torch: seconds that a process without a GPU need not spend.
            made: OfferedTransport = importlib.import_module(TRANSPORTS[name].module).offer(self._host)
        except (AbsentError, ImportError) as error:
            reason = f"not installed: {error}" if isinstance(error, ImportError) else str(error)
            self._absent[name] = reason
            event(log, "transport absent", level=logging.WARNING, transport=name, reason=reason)
            return None
        return made

    async def close(self) -> None:
        """End every batch and grant, and release every segment."""
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        await self._router.close()
        await self._host.close()
        self._holdings.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def descriptor(self) -> PeerDescriptor:
        """How peers reach this process."""
        return PeerDescriptor(self._node_id, self._epoch, tuple(self._endpoints), self._secret)

    @property
    def num_grants(self) -> int:
        """Grants whose memory may still be touched: live, or ended and not drained."""
        return self._holdings.grants.num_live + self._holdings.grants.num_ended

    def allocate(self, num_bytes: int) -> Segment:
        """Return a new zeroed segment that every transport reaches.

        With RDMA, its pages are pinned here and now, a second for some GB: make segments
        before serving.

        Raises:
            ValueError: no bytes, or too many segments.
            OSError: no memory or no descriptor is left.
        """
        return self._pinned(self._holdings.allocate(num_bytes))

    def register_device(self, memory: DeviceMemory) -> Segment:
        """Return a segment over memory of a GPU, described by `transfer/gpu/transport.py`. May take seconds.

        Raises:
            ValueError: the configuration allows no transport that reaches it.
        """
        segment = self._holdings.register_device(memory, is_served=self._host.server is not None)
        while self._wires:
            staged = StagedTransport(self._wires.pop(), self._holdings.register)
            self._router.add(self._wrap(staged))
        return self._pinned(segment)

    def grant(
        self, segment: Segment, offsets: Sequence[int], length: int, operation: Operation, lease_s: float
    ) -> Grant:
        """Allow peers to read or write `length` bytes at each offset until revoked or expired.

        Raises:
            ValueError: a range lies outside the segment, or there is none, or no lease.
            CapacityError: too many grants are live. Nothing changes.
        """
        grant = self._holdings.grant(segment, offsets, length, operation, lease_s)
        self._schedule_sweep()
        return grant

    async def revoke(self, grant: Grant) -> None:
        """Refuse the grant at once; return when nothing done under it is in flight.

        Then its memory may be reused. An expired grant needs this too, and a second
        call does no harm. Cancelled, the grant stays refused: call again before reuse.
        """
        self._holdings.revoke(grant.generation)
        if not self._holdings.grants.is_retired(grant.generation):
            await asyncio.shield(self._drain(grant.generation))

    async def write(
        self,
        peer: PeerDescriptor,
        grant: Grant,
        pieces: Pieces,
        deadline_s: float | None = None,
        priority: Priority = Priority.FOREGROUND,
    ) -> None:
        """Put pieces of our segment into the peer's, all of them, within `deadline_s` seconds.

        When it returns, the bytes are in the peer's memory. When it raises, any part of
        them may be. Either way our memory is not read any more. `deadline_s`: from now;
        None is the configuration's `timeout_s`, which is also the most.

        Raises:
            LeaseExpiredError: the grant's lease ran out.
            StaleError: the grant was revoked, or the peer restarted.
            TransferFailedError: the peer cannot be reached, or the deadline passed.
            ProtocolError: a range lies outside our segment or the grant.
        """
        await self._move(Operation.WRITE, peer, grant, pieces, deadline_s, priority)

    async def read(
        self,
        peer: PeerDescriptor,
        grant: Grant,
        pieces: Pieces,
        deadline_s: float | None = None,
        priority: Priority = Priority.FOREGROUND,
    ) -> None:
        """Fetch pieces of the peer's segment into ours; otherwise as `write`.

        When it has returned or raised, our memory is not written any more.
        """
        await self._move(Operation.READ, peer, grant, pieces, deadline_s, priority)

    async def _move(
        self,
        operation: Operation,
        peer: PeerDescriptor,
        grant: Grant,
        pieces: Pieces,
        deadline_s: float | None,
        priority: Priority,
    ) -> None:
        if grant.operation is not operation:
            raise ProtocolError(f"the grant is to {grant.operation.name}, not to {operation.name}")
        if not len(pieces):
            return
        require_allowed(self._ranges_of(grant), pieces)
        timeout_s = self._config.timeout_s if deadline_s is None else min(deadline_s, self._config.timeout_s)
        rest = begin(self._router.move(peer, grant, pieces, priority))
        if rest is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await rest
            except TimeoutError as error:
                raise TransferFailedError(f"no end within {timeout_s:.3g} s") from error
        elif self._is_late():
            await asyncio.sleep(0)

    def _is_late(self) -> bool:
        """Return whether this turn of the loop has had batches for so long that it is others'."""
        now_s = self._clock.now_s()
        if self._turn_begun_s is None:
            self._turn_begun_s = now_s
            asyncio.get_running_loop().call_soon(self._end_turn)
        return now_s - self._turn_begun_s > MAX_KEPT_S

    def _end_turn(self) -> None:
        self._turn_begun_s = None

    def _pinned(self, segment: Segment) -> Segment:
        for pin in (made.pin for made in self._offers if made.pin is not None):
            try:
                pin(segment)
            except TransferFailedError as error:
                # Batches that would need it are refused likewise, and go by another transport.
                event(log, "not registered", level=logging.WARNING, reason=error)
        return segment

    def _drain(self, generation: int) -> asyncio.Future[None]:
        """Return what is done once nothing in flight can touch an ended grant's memory."""
        draining = self._draining.get(generation)
        if draining is None:
            loop = asyncio.get_running_loop()
            draining = self._draining[generation] = loop.create_future()
            latch = Latch(2, lambda: post(loop, lambda: self._drained(generation)))
            self._detach(generation, latch.count_down)
            self._holdings.drain_board(generation, latch.count_down)
        return draining

    def _detach(self, generation: int, done: Callable[[], None]) -> None:
        if self._carriage is not None:
            self._carriage.detach(generation, done)
            return
        server = self._host.server
        if server is None:
            done()
            return
        server.detach(generation, done)
        if server.is_one_sided:
            asyncio.get_running_loop().call_later(CUT_AFTER_S, self._cut, server, generation)

    def _cut(self, server: TcpServer, generation: int) -> None:
        if generation in self._draining:
            server.cut(generation)

    def _drained(self, generation: int) -> None:
        self._holdings.grants.retire(generation)
        draining = self._draining.pop(generation)
        if not draining.done():
            draining.set_result(None)

    def _schedule_sweep(self) -> None:
        """See that expired grants are closed when they expire, shm having nobody else to ask."""
        in_s = self._holdings.grants.next_expiry_in_s()
        if in_s is None:
            return
        loop = asyncio.get_running_loop()
        if self._sweep_timer is None or self._sweep_at_s > loop.time() + in_s:
            if self._sweep_timer is not None:
                self._sweep_timer.cancel()
            self._sweep_at_s = loop.time() + in_s
            self._sweep_timer = loop.call_later(in_s, self.sweep)

    def sweep(self) -> None:
        """Close the grants whose lease ran out. Called by a timer; a test may call it too."""
        self._sweep_timer = None
        for generation in self._holdings.expire():
            self._drain(generation)
        self._schedule_sweep()
