"""The rdma transport: peers reach into memory through their NICs, under held grants.

A NIC checks keys and the bounds of whole segments, not our grants. So a batch first asks
the owner, over a connection to its one port, to hold the grant: the owner compares it with
its own and answers with the keys. A grant that is held is not drained before it is let go; a
peer that does not let go in time, or whose connection ends, loses its queue pairs, after
which its NIC touches nothing.

    PAIR    asker: a queue pair of each rail      owner: connects one of its own to each
    HOLD    asker: generation, a grant's checksum owner: compares; lease, address, keys, distances
    one-sided work over the nearest rails, batch by batch
    RECALL                                        owner: the grant has ended
    LET_GO  asker: no batch for a while, or recalled

How a hold is kept for the next batch, and ends, is in `transfer/rdma/holds.py`.

The asking side runs on the event loop, because the bindings hold the interpreter in
whatever thread they run; the asked side on the thread of the tcp server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from base.clock import Clock
from base.errors import TransferFailedError
from base.grants import Grant, Operation, PeerDescriptor
from base.logs import event
from transfer.batch import Pieces, Priority
from transfer.owned.holdings import Holdings
from transfer.rdma.dma_buf import CudaDriver
from transfer.rdma.holds import Hold, pack_admission
from transfer.rdma.pairing import Lane, Pairing, WorkBatch, resting_rails
from transfer.rdma.registrations import Registrations, device_refusal_or_none, memory_place
from transfer.rdma.topology import Tiers, described_choice
from transfer.rdma.verbs import Ended, QueuePair, Rail, open_rails, unpack_ends
from transfer.tcp.greeting import key_of
from transfer.tcp.host import TransferHost
from transfer.transport import AbsentError, OfferedTransport, Transport

MAX_REMEMBERED = 4096
"""Choices of rails that are remembered as logged, and segments that a peer has not registered."""

log = logging.getLogger(__name__)


class RdmaTarget:
    """The asked side: connects peers' queue pairs and sends them the keys of segments.

    Called on the thread of the tcp server alone.
    """

    def __init__(self, registrations: Registrations, holdings: Holdings) -> None:
        self._registrations = registrations
        self._holdings = holdings
        self._pairs: dict[object, list[QueuePair]] = {}

    def pair(self, link: object, offer: bytes) -> bytes:
        self.cut(link)
        pairs = self._pairs.setdefault(link, [])
        for rail, end in zip(self._registrations.rails, unpack_ends(offer), strict=False):
            pair = rail.queue_pair()
            pairs.append(pair)
            pair.connect(end)
        # As long as the offer; an end of zeros says that there is no such rail here.
        return b"".join(pair.end.pack() for pair in pairs).ljust(len(offer), b"\0")

    def admit(self, generation: int, digest: int) -> bytes:
        segment, left_s = self._holdings.admitted(generation, digest)
        return pack_admission(left_s, self._registrations.remote(segment))

    def cut(self, link: object) -> None:
        for pair in self._pairs.pop(link, []):
            pair.close()


def offer(host: TransferHost) -> OfferedTransport:
    """Return the transport over the NICs of this host; our side of it listens.

    Raises:
        AbsentError: there is none that can be used.
        OSError: the port is taken.
    """
    driver = CudaDriver()
    rails, problem = open_rails(driver)
    if not rails:
        raise AbsentError(problem)
    registrations = Registrations(
        rails, partial(memory_place, driver), partial(device_refusal_or_none, driver)
    )
    host.at_end.append(registrations.close)
    # First what may fail: the transport watches descriptors of the rails, and nobody would close it.
    server = host.listen(RdmaTarget(registrations, host.holdings))
    transport = RdmaTransport(registrations, host.clock)
    return OfferedTransport(transport, server.address, is_wire=True, pin=registrations.local)


class RdmaTransport(Transport):
    """The asking side. Owns the pairings with peers; the event loop's."""

    name = "rdma"

    def __init__(self, registrations: Registrations, clock: Clock) -> None:
        self._registrations = registrations
        self._rails = registrations.rails
        self._logged: set[tuple[str, Tiers]] = set()
        self._refused: dict[tuple[str, int, int], str] = {}
        """Why a segment of a peer's epoch is not registered there. It is not asked for again."""
        self._clock = clock
        self._resting_rails = resting_rails(clock)
        self._pairings: dict[str, Pairing] = {}
        self._is_closed = False
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._waiting: set[WorkBatch] = set()
        self._loop = asyncio.get_running_loop()
        for rail in self._rails:
            self._loop.add_reader(rail.channel_fd, self._on_completions, rail)

    def refusal_or_none(self, peer: PeerDescriptor, segment_id: int, device: int | None) -> str | None:
        if device is not None and (ours := self._registrations.refusal_or_none(device)):
            return f"our memory: {ours}"
        if theirs := self._refused.get((peer.node_id, peer.epoch, segment_id)):
            return f"the peer's memory: {theirs}"
        if peer.address_or_none(self.name) is None:
            return "the peer does not offer it"
        if all(rail.name in self._resting_rails for rail in self._rails):
            return "every rail failed lately"
        return None

    async def move(self, peer: PeerDescriptor, grant: Grant, pieces: Pieces, priority: Priority) -> None:
        if self._is_closed:
            raise TransferFailedError("this process is stopping")
        ours = self._registrations.local(pieces.segment)
        pairing, hold = self._kept(peer, grant) or await self._asked(peer, grant)
        try:
            batch = WorkBatch(grant.operation is Operation.WRITE, ours, hold.reach)
            self._log_choice(peer.node_id, batch)
            pairing.add(batch, pieces.merged(), priority)
            if not batch.is_over:
                await self._woken(pairing, batch)
            elif batch.error is not None:
                raise batch.error
        finally:
            pairing.holds.release(hold)

    async def close(self) -> None:
        self._is_closed = True
        for pairing in self._pairings.values():
            pairing.close()
        self._pairings.clear()
        for rail in self._rails:
            self._loop.remove_reader(rail.channel_fd)

    def _kept(self, peer: PeerDescriptor, grant: Grant) -> tuple[Pairing, Hold] | None:
        pairing = self._pairings.get(peer.node_id)
        if pairing is None or pairing.epoch != peer.epoch or not pairing.is_whole:
            return None
        hold = pairing.holds.take(grant)
        return None if hold is None else (pairing, hold)

    async def _paired(self, peer: PeerDescriptor) -> Pairing:
        known = self._pairings.get(peer.node_id)
        if known is not None:
            known.catch_up()
        if known is None or known.epoch != peer.epoch or known.is_spent():
            if known is not None:
                known.close()
            address = peer.address_or_none(self.name)
            if address is None:
                raise TransferFailedError(f"{peer.node_id} has no rdma endpoint")
            for node_id, each in list(self._pairings.items()):
                if each.link.is_closed:
                    del self._pairings[node_id]
            known = Pairing(address, key_of(peer), self._rails, self._resting_rails, self._lanes, self._clock)
            self._pairings[peer.node_id] = known
        await known.ready()
        return known

    async def _asked(self, peer: PeerDescriptor, grant: Grant) -> tuple[Pairing, Hold]:
        pairing = await self._paired(peer)
        try:
            return pairing, await pairing.holds.ask(grant)
        except TransferFailedError as error:
            if not pairing.link.is_closed:
                # The peer's own word, which is all that it fails a hold with: no NIC of its registers this.
                if len(self._refused) >= MAX_REMEMBERED:
                    self._refused.clear()
                self._refused[peer.node_id, peer.epoch, grant.segment_id] = str(error)
            raise

    def _log_choice(self, node_id: str, batch: WorkBatch) -> None:
        """Log which rails a batch goes by, once for each choice."""
        choice = (node_id, batch.tiers)
        if choice not in self._logged:
            if len(self._logged) >= MAX_REMEMBERED:
                self._logged.clear()
            self._logged.add(choice)
            names = [rail.name for rail in self._rails]
            near_us, near_peer = (
                described_choice(names, side.distances) for side in (batch.ours, batch.theirs)
            )
            by = [",".join(names[rail] for rail in tier) for tier in batch.tiers]
            event(
                log, "rails chosen", peer=node_id, by=" then ".join(by), near_us=near_us, near_peer=near_peer
            )

    async def _woken(self, pairing: Pairing, batch: WorkBatch) -> None:
        """Sleep until the batch has ended; raises as it does."""
        self._waiting.add(batch)
        try:
            for rail in self._rails:
                self._arm(rail)
            await batch.ended(lambda: pairing.drop(batch))
        finally:
            self._waiting.remove(batch)

    def _arm(self, rail: Rail) -> None:
        # No event comes for what ended just before.
        if rail.arm():
            self._take(rail, rail.drain())

    def _on_completions(self, rail: Rail) -> None:
        self._take(rail, rail.poll())
        if not all(batch.is_over for batch in self._waiting):
            self._arm(rail)

    def _take(self, rail: Rail, completions: Sequence[Ended]) -> None:
        pairings: set[Pairing] = set()
        for ended in completions:
            # A lane that was destroyed leaves completions that concern nobody.
            lane = self._lanes.get((rail.name, ended.queue_pair))
            if lane is not None:
                lane.pairing.on_ended(lane, ended)
                if lane.pairing.has_queued:
                    pairings.add(lane.pairing)
        for pairing in pairings:
            pairing.pump()
