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
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from base.clock import Clock
from base.config import TransferConfig
from base.errors import ProtocolError, TransferFailedError
from base.grants import Endpoint, Grant, Operation, PeerDescriptor
from base.logs import event
from transfer.batch import Pieces, Priority, require_allowed, sums_of
from transfer.completion import Latch, begin, finish_within, on_loop
from transfer.gpu.staged import StagedTransport
from transfer.gpu.staging import PinnedStaging
from transfer.owned.board import Board
from transfer.owned.holdings import Holdings
from transfer.owned.ranges import ranges_of, with_table
from transfer.owned.segment import DeviceMemory, Segment
from transfer.rdma.dma_buf import CudaDriver
from transfer.rdma.registrations import Registrations, device_refusal_or_none, memory_place
from transfer.rdma.transport import RdmaTarget, RdmaTransport
from transfer.rdma.verbs import open_rails
from transfer.router import Router
from transfer.shm.transport import ShmTransport
from transfer.tcp.frame import MAX_FRAME_BYTES
from transfer.tcp.greeting import SECRET_BYTES, PeerKey
from transfer.tcp.reactor import Reactor, num_reactors
from transfer.tcp.server import TcpServer
from transfer.tcp.transport import TcpTransport
from transfer.transport import Carriage, Route, Totals, TransferObserver, Transport
from transfer.turns import Turns

MAX_BATCHES = 256
"""Under way at once; more wait their turn, within their deadlines."""

MAX_KEPT_S = 0.001
"""Batches that need not wait for anything follow each other for so long; then others have the loop."""

KNOWN_GRANTS = 128
"""Whose ranges are remembered, at most 1 MiB each."""
CUT_AFTER_S = 1.0
"""A peer that reaches into a grant this long after its end is disconnected."""

log = logging.getLogger(__name__)


class TransferAgent:
    """Owns this process's segments, grants and links. One event loop calls it.

    `wrap` is put around each transport: `transfer/faults.py`. `carriage` makes what carries bytes
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
        self._observers = observers
        self._wrap = wrap
        self._node_id = node_id
        self._epoch = epoch
        self._secret = random_bits(8 * SECRET_BYTES).to_bytes(SECRET_BYTES, "little")
        self._config = config
        self._clock = clock
        on_host = {"shm", "cuda_ipc"} & set(config.transports)
        self._board = Board(epoch) if on_host else None
        stage = functools.partial(PinnedStaging, room_bytes=MAX_FRAME_BYTES)
        self._holdings = Holdings(clock, self._board, random_bits, stage)
        self._carriage = None if carriage is None else carriage(self._holdings)
        self._reactors: list[Reactor] = []
        self._registrations: Registrations | None = None
        self._one_sided: RdmaTarget | None = None
        self._server: TcpServer | None = None
        self._router: Router | None = None
        self._wires: list[Transport] = []
        # Batches of one grant follow each other, and a grant may have thousands of ranges.
        self._ranges_of = functools.lru_cache(KNOWN_GRANTS)(
            lambda grant: with_table(ranges_of(grant.offsets, grant.length))
        )
        self._turns = Turns(MAX_BATCHES)
        self._turn_begun_s: float | None = None
        self._draining: dict[int, asyncio.Future[None]] = {}
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._sweep_at_s = float("inf")

    async def start(self) -> None:
        """Listen, and be ready to reach peers. Raises OSError if the port is taken."""
        if self._carriage is not None:
            self._router = self._routing(self._carriage.transports, {})
            return
        names, absent = self._config.transports, {}
        self._reactors = [
            Reactor(f"transfer-{number}") for number in range(num_reactors(self._config.connections))
        ]
        transports: list[Transport] = []
        if "shm" in names:
            transports.append(ShmTransport())
        if "cuda_ipc" in names:
            # By name, because it imports torch: seconds that a process without a GPU
            # need not spend.
            try:
                transports.append(importlib.import_module("transfer.gpu.transport").CudaTransport())
            except ImportError as error:
                absent["cuda_ipc"] = f"not installed: {error}"
        if "rdma" in names:
            driver = CudaDriver()
            rails, absent["rdma"] = open_rails(driver)
            if rails:
                # What is said of the others is of no use while some rails work.
                del absent["rdma"]
                self._registrations = Registrations(
                    rails,
                    functools.partial(memory_place, driver),
                    functools.partial(device_refusal_or_none, driver),
                )
                self._one_sided = RdmaTarget(self._registrations, self._holdings)
        if "tcp" in names or self._one_sided is not None:
            host, port = self._config.host, self._config.port
            key = PeerKey(self._secret, self._epoch)
            self._server = TcpServer(host, port, key, self._holdings, self._reactors, self._one_sided)
        # Behind all that may fail: it watches descriptors of the rails, and nobody would close it.
        if self._registrations is not None:
            transports.append(RdmaTransport(self._registrations, self._clock))
        if "tcp" in names:
            transports.append(TcpTransport(self._reactors, self._config.connections))
        self._wires = [transport for transport in transports if transport.name in ("rdma", "tcp")]
        for name, reason in absent.items():
            event(log, "transport absent", level=logging.WARNING, transport=name, reason=reason)
        self._router = self._routing(transports, absent)

    def _routing(self, transports: Sequence[Transport], absent: dict[str, str]) -> Router:
        return Router(list(map(self._wrap, transports)), self._clock, absent, self._observers)

    async def close(self) -> None:
        """End every batch and grant, and release every segment."""
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        if self._router is not None:
            await self._router.close()
        if self._server is not None:
            self._server.close()
        for reactor in self._reactors:
            await asyncio.to_thread(reactor.stop)
        if self._registrations is not None:
            self._registrations.close()
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
        endpoints = [] if self._carriage is None else list(self._carriage.endpoints)
        if self._board is not None:
            on_host = [name for name in ("shm", "cuda_ipc") if name in self._config.transports]
            endpoints += [Endpoint(name, self._board.address) for name in on_host]
        if self._server is not None and self._one_sided is not None:
            endpoints.append(Endpoint("rdma", self._server.address))
        if self._server is not None and "tcp" in self._config.transports:
            endpoints.append(Endpoint("tcp", self._server.address))
        return PeerDescriptor(self._node_id, self._epoch, tuple(endpoints), self._secret)

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

    def register(self, memory: memoryview | bytearray) -> Segment:
        """Return a segment over existing memory, which must not move; shm does not reach it.

        Raises:
            ValueError: it is read-only, empty or not contiguous.
        """
        return self._pinned(self._holdings.register(memory))

    def register_device(self, memory: DeviceMemory) -> Segment:
        """Return a segment over memory of a GPU, described by `transfer/gpu/transport.py`. May take seconds.

        Raises:
            ValueError: the configuration allows no transport that reaches it.
        """
        segment = self._holdings.register_device(memory, is_served=self._server is not None)
        while self._wires:
            staged = StagedTransport(self._wires.pop(), self._holdings.register)
            self._started().add(self._wrap(staged))
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
        them may be. Either way our memory is no longer read. `deadline_s`: from now;
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

        When it has returned or raised, our memory is no longer written.
        """
        await self._move(Operation.READ, peer, grant, pieces, deadline_s, priority)

    async def read_summed(
        self,
        peer: PeerDescriptor,
        grant: Grant,
        pieces: Pieces,
        deadline_s: float | None = None,
        priority: Priority = Priority.FOREGROUND,
    ) -> Sequence[int]:
        """`read` into host memory; return the checksum of what lies there for each piece, in order.

        Cheaper than to sum afterwards where the transport has the bytes in its hands.
        """
        pieces = pieces.with_sums()
        await self._move(Operation.READ, peer, grant, pieces, deadline_s, priority)
        return pieces.sums if pieces.sums is not None else await asyncio.to_thread(sums_of, pieces)

    def route(self, peer: PeerDescriptor, grant: Grant, device: int | None = None) -> Route:
        """Return how a batch of memory on `device` would travel to this peer (None: of the host).

        Raises:
            TransferFailedError: nothing reaches it.
        """
        route = self._started().choose(peer, grant.segment_id, device)
        if route.transport == RdmaTransport.name and self._registrations is not None:
            return replace(route, by=self._registrations.told(device))
        return route

    def totals(self) -> tuple[Totals, ...]:
        """Return what each transport has carried since the start, for metrics."""
        return self._started().totals()

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
        has_turn = self._turns.take()
        try:
            work = self._started().move(peer, grant, pieces, priority)
            rest = begin(work if has_turn else self._in_turn(work, priority))
            if rest is not None:
                await finish_within(timeout_s, rest)
        except TimeoutError as error:
            raise TransferFailedError(f"no end within {timeout_s:.3g} s") from error
        finally:
            if has_turn:
                self._turns.give_back()
        if rest is None and self._is_late():
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

    async def _in_turn(self, work: Coroutine[Any, Any, None], priority: Priority) -> None:
        try:
            await self._turns.wait(priority)
        except BaseException:
            work.close()
            raise
        try:
            await work
        finally:
            self._turns.give_back()

    def _pinned(self, segment: Segment) -> Segment:
        if self._registrations is not None:
            try:
                self._registrations.local(segment)
            except TransferFailedError as error:
                # Batches that would need it are told so again, and go by another transport.
                event(log, "not registered", level=logging.WARNING, reason=error)
        return segment

    def _started(self) -> Router:
        if self._router is None:
            raise RuntimeError("the agent is not started")
        return self._router

    def _drain(self, generation: int) -> asyncio.Future[None]:
        """Return what is done once nothing in flight can touch an ended grant's memory."""
        draining = self._draining.get(generation)
        if draining is None:
            draining = self._draining[generation] = asyncio.get_running_loop().create_future()
            latch = Latch(2, on_loop(lambda: self._drained(generation)))
            self._detach(generation, latch.count_down)
            self._holdings.drain_board(generation, latch.count_down)
        return draining

    def _detach(self, generation: int, done: Callable[[], None]) -> None:
        if self._carriage is not None:
            self._carriage.detach(generation, done)
            return
        if self._server is None:
            done()
            return
        self._server.detach(generation, done)
        if self._one_sided is not None:
            asyncio.get_running_loop().call_later(CUT_AFTER_S, self._cut, generation)

    def _cut(self, generation: int) -> None:
        if generation in self._draining and self._server is not None:
            self._server.cut(generation)

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
