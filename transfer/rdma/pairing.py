"""One peer over RDMA: a control connection, a queue pair on every rail, work spread over the nearest.

    lane   closed  --connected-->  open  --an error, the peer's end-->  closed  (for ever)

Work requests of a queue pair end in order, so only some of them are signalled and each
completion ends all before it. A lane that fails is destroyed before its work is posted
on another: two NICs never carry the same bytes at once, and nothing is touched late.
Each batch goes by the nearest rails that are open (`topology.py`), so work waits in one
line for each choice of rails. The event loop owns everything.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from base.clock import Clock
from base.errors import ProtocolError, ServeError, TransferFailedError
from base.resting import Resting
from transfer.batch import Pieces, Priority, Row
from transfer.completion import Completion
from transfer.rdma.holds import Holds
from transfer.rdma.registrations import Reach
from transfer.rdma.topology import Tiers, tiers
from transfer.rdma.verbs import (
    MAX_OUTSTANDING,
    SIGNAL_EVERY,
    Ended,
    QueuePair,
    QueuePairEnd,
    Rail,
    unpack_ends,
)
from transfer.tcp.frame import FrameKind
from transfer.tcp.greeting import PeerKey
from transfer.tcp.link import Call, ClientLink
from transfer.tcp.reactor import LoopPoller

WORK_BYTES = 1 << 20
"""One work request at most: 21 us on a 400 Gb/s link, several times the cost of posting it."""
STUCK_AFTER_S = 1.0
"""A lane that does not end cancelled work for this long is destroyed."""
BURST = 16
"""Work requests that are posted on one lane before the next has its turn."""
MAX_FAILURES = 3
"""Errors within 10 s that make a rail rest: for REST_S first, and for five minutes at most."""
REST_S = 30.0


def resting_rails(clock: Clock) -> Resting:
    """Return a memory of the rails (NICs) that failed, by their names."""
    return Resting(clock, REST_S, 300.0, MAX_FAILURES, window_s=10.0)


class WorkBatch:
    """Counts down the work requests of one batch."""

    def __init__(self, is_write: bool, ours: Reach, theirs: Reach) -> None:
        self.is_write = is_write
        self.ours = ours
        self.theirs = theirs
        self.tiers = tiers(ours.distances, theirs.distances)
        """The rails that may carry it, nearest first."""
        self.left = 0
        self.is_over = False
        self.error: ServeError | None = None
        self._completion: Completion | None = None

    def work_ended(self, error: ServeError | None = None) -> None:
        """Note that one work request is over: nothing touches its bytes any more."""
        self.error = self.error or error
        self.left -= 1
        if self.left == 0:
            self.is_over = True
            if self._completion is not None:
                self._completion.end(self.error)

    async def ended(self, cancel: Callable[[], None]) -> None:
        """Return or raise as the work does, and never before it has ended: `Completion.wait`."""
        # Small batches are over before anybody waits, and need none.
        self._completion = Completion()
        if self.is_over:
            self._completion.end(self.error)
        await self._completion.wait(cancel)


Work = tuple[WorkBatch, Row]


class Lane:
    """One queue pair and what is under way on it, in order."""

    def __init__(self, pairing: Pairing, index: int, pair: QueuePair) -> None:
        self.pairing = pairing
        self.index = index
        self.pair = pair
        self.is_open = False
        self.is_lost = False
        self.under_way: deque[tuple[int, WorkBatch, Row]] = deque()
        self._ids = count(1)

    @property
    def key(self) -> tuple[str, int]:
        """The rail's name and the queue pair's number: every rail numbers its own."""
        return self.pair.rail.name, self.pair.end.number

    def post(self, work: Sequence[Work]) -> None:
        """Begin some work, all of it in one direction; raises TransferFailedError."""
        entries = []
        index, count, under_way = self.index, len(work), self.under_way
        for place, (batch, row) in enumerate(work, 1):
            work_id = next(self._ids)
            is_signalled = place == count or work_id % SIGNAL_EVERY == 0
            ours, theirs, (offset, peer_offset, length) = batch.ours, batch.theirs, row
            address, peer_address = ours.address + offset, theirs.address + peer_offset
            key, peer_key = ours.keys[index], theirs.keys[index]
            entries.append((work_id, is_signalled, address, length, key, peer_address, peer_key))
            under_way.append((work_id, batch, row))
        self.pair.post(entries, work[0][0].is_write)

    def take_back(self) -> list[Work]:
        """Destroy the queue pair; return the work that it had not ended."""
        self.is_open = False
        self.pair.close()
        work = [(batch, row) for _, batch, row in self.under_way]
        self.under_way.clear()
        return work


class _Line:
    """Work that goes by the same rails, in order."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self.urgent: deque[Work] = deque()
        self.background: deque[Work] = deque()
        self.lanes: frozenset[int] = frozenset()
        """Numbers of the lanes that carry it: the nearest that are open."""


class Pairing:
    """Owns the connection, the lanes and the queue of work to one epoch of one peer."""

    def __init__(
        self,
        address: str,
        key: PeerKey,
        rails: Sequence[Rail],
        resting_rails: Resting,
        lanes: dict[tuple[str, int], Lane],
        clock: Clock,
    ) -> None:
        self.epoch = key.epoch
        self._resting_rails = resting_rails
        self._all_lanes = lanes
        self._lanes = [Lane(self, index, rail.queue_pair()) for index, rail in enumerate(rails)]
        self._lines: dict[Tiers, _Line] = {}
        self._pairing = asyncio.Lock()
        self._is_paired = False
        self._has_lost = False
        self._poller = LoopPoller()
        self.link = ClientLink(
            address,
            key,
            self._poller,
            self._on_link_closed,
            lambda generation: self.holds.recall(generation),
        )
        self.holds = Holds(self.link, clock)
        self.link.connect()

    @property
    def is_whole(self) -> bool:
        """Whether every lane there ever was is open: then there is nothing to be ready for."""
        return self._is_paired and not self._has_lost and not self.link.is_closed

    @property
    def has_queued(self) -> bool:
        """Whether work waits for a lane."""
        return any(line.urgent or line.background for line in self._lines.values())

    def catch_up(self) -> None:
        """Take in what the peer sent while the loop had no turn: it may have ended the connection."""
        self._poller.catch_up()

    async def ready(self) -> None:
        """Return when the lanes are open; raises TransferFailedError or StaleError."""
        async with self._pairing:
            if not self._is_paired:
                await self._pair()
                self._is_paired = True
        if not any(lane.is_open for lane in self._lanes):
            raise TransferFailedError("no rail reaches the peer")

    def is_spent(self) -> bool:
        """Return whether another pairing would reach the peer better than this one."""
        if self.link.is_closed:
            return True
        is_revived = any(
            lane.is_lost and lane.pair.rail.name not in self._resting_rails for lane in self._lanes
        )
        return is_revived and not any(lane.under_way for lane in self._lanes)

    def add(self, batch: WorkBatch, pieces: Pieces, priority: Priority) -> None:
        """Take over the work of one batch."""
        line = self._line_of(batch)
        if (
            pieces.only is not None
            and pieces.num_bytes <= WORK_BYTES
            and self._began(line, batch, pieces.only)
        ):
            return
        parts = pieces.cut(WORK_BYTES)
        batch.left = len(parts)
        queue = line.urgent if priority is Priority.FOREGROUND else line.background
        queue.extend((batch, row) for row in parts.rows())
        if line.lanes:
            self.pump()
        else:
            _fail(line, TransferFailedError("no rail that is open reaches both memories"))

    def drop(self, batch: WorkBatch) -> None:
        """End the batch's work: what is not posted at once, what is posted within a second."""
        line = self._line_of(batch)
        for queue in (line.urgent, line.background):
            kept = [work for work in queue if work[0] is not batch]
            dropped = len(queue) - len(kept)
            queue.clear()
            queue.extend(kept)
            for _ in range(dropped):
                batch.work_ended(TransferFailedError("cancelled"))
        if batch.left:
            asyncio.get_running_loop().call_later(STUCK_AFTER_S, self._give_up, batch)

    def pump(self) -> None:
        """Post as much as lanes take, a burst to each in turn; a short queue is shared out evenly."""
        bursts = {
            id(queue): min(BURST, -(-len(queue) // len(line.lanes)))
            for line in self._lines.values()
            for queue in (line.urgent, line.background)
            if queue and line.lanes
        }
        is_moving = True
        while is_moving:
            is_moving = False
            for lane in self._lanes:
                capacity = MAX_OUTSTANDING - len(lane.under_way)
                queue = self._next_or_none(lane) if lane.is_open and capacity > 0 else None
                if queue:
                    self._post_burst(lane, queue, min(capacity, bursts.get(id(queue), BURST)))
                    is_moving = True

    def on_ended(self, lane: Lane, ended: Ended) -> None:
        """Take note of a completion."""
        while lane.under_way and lane.under_way[0][0] < ended.work_id:
            lane.under_way.popleft()[1].work_ended()
        if not ended.error:
            lane.under_way.popleft()[1].work_ended()
            self._resting_rails.succeeded(lane.pair.rail.name)
        elif lane.is_open:
            if ended.is_refused:
                lane.under_way.popleft()[1].work_ended(ProtocolError("the peer's NIC refused the access"))
            self._lost(lane, ended.error)

    def close(self) -> None:
        """Destroy every lane and end all work."""
        self.link.close()

    async def _pair(self) -> None:
        offer = b"".join(lane.pair.end.pack() for lane in self._lanes)
        call = Call(FrameKind.PAIR, len(offer))
        call.frame.num_bytes = len(offer)
        call.frame.outgoing = [memoryview(offer)]
        ends = unpack_ends(await call.answered(self.link))
        for lane, end in zip(self._lanes, ends, strict=True):
            # Number 0: the peer has fewer rails.
            if not end.number:
                continue
            if self._connected(lane, end):
                lane.is_open = True
                self._all_lanes[lane.key] = lane
            else:
                # Also one that rests: afterwards another pairing has it.
                lane.is_lost = self._has_lost = True

    def _connected(self, lane: Lane, end: QueuePairEnd) -> bool:
        rail = lane.pair.rail.name
        if rail in self._resting_rails:
            return False
        try:
            lane.pair.connect(end)
        except TransferFailedError:
            self._resting_rails.failed(rail)
            return False
        return True

    def _line_of(self, batch: WorkBatch) -> _Line:
        line = self._lines.get(batch.tiers)
        if line is None:
            # There are few; what a peer says of its rails must not make them many.
            self._lines = {key: each for key, each in self._lines.items() if each.urgent or each.background}
            line = self._lines[batch.tiers] = _Line(batch.tiers)
            line.lanes = self._nearest_open(line)
        return line

    def _nearest_open(self, line: _Line) -> frozenset[int]:
        for tier in line.tiers:
            usable = frozenset(index for index in tier if self._lanes[index].is_open)
            if usable:
                return usable
        return frozenset()

    def _next_or_none(self, lane: Lane) -> deque[Work] | None:
        """Return the queue that the lane takes from: what a request waits for first, lines by turns."""
        found: tuple[_Line, deque[Work]] | None = None
        for line in self._lines.values():
            if lane.index in line.lanes:
                if line.urgent:
                    found = line, line.urgent
                    break
                if line.background and found is None:
                    found = line, line.background
        if found is None:
            return None
        line, queue = found
        if len(self._lines) > 1:
            self._lines[line.tiers] = self._lines.pop(line.tiers)
        return queue

    def _began(self, line: _Line, batch: WorkBatch, row: Row) -> bool:
        """Post the only work of a batch, if nobody is before it: no queue, and no turns. False: not done."""
        if self.has_queued:
            return False
        least, lane = MAX_OUTSTANDING, None
        for index in line.lanes:
            count = len(self._lanes[index].under_way)
            if count < least:
                least, lane = count, self._lanes[index]
        if lane is None:
            return False
        batch.left = 1
        try:
            lane.post([(batch, row)])
        except TransferFailedError as error:
            self._lost(lane, str(error))
            self.pump()
        return True

    def _post_burst(self, lane: Lane, queue: deque[Work], capacity: int) -> None:
        is_write = queue[0][0].is_write
        burst: list[Work] = []
        while queue and len(burst) < capacity and queue[0][0].is_write is is_write:
            burst.append(queue.popleft())
        try:
            lane.post(burst)
        except TransferFailedError as error:
            self._lost(lane, str(error))

    def _lost(self, lane: Lane, reason: str) -> None:
        """Give the work of a broken lane to the others, or end it if there is none."""
        lane.is_lost = self._has_lost = True
        self._resting_rails.failed(lane.pair.rail.name)
        self._all_lanes.pop(lane.key, None)
        for work in reversed(lane.take_back()):
            self._line_of(work[0]).urgent.appendleft(work)
        error = TransferFailedError(f"{lane.pair.rail.name} failed: {reason}")
        for line in self._lines.values():
            line.lanes = self._nearest_open(line)
            if not line.lanes:
                _fail(line, error)

    def _give_up(self, batch: WorkBatch) -> None:
        for lane in self._lanes:
            if any(each is batch for _, each, _ in lane.under_way):
                self._lost(lane, "it did not end cancelled work")
        if batch.left:
            self.drop(batch)
        # What others had on a lane that was lost.
        self.pump()

    def _on_link_closed(self) -> None:
        self.holds.close()
        error = TransferFailedError("the peer's control connection ended")
        for lane in self._lanes:
            if lane.is_open:
                self._all_lanes.pop(lane.key, None)
                for batch, _ in lane.take_back():
                    batch.work_ended(error)
            else:
                lane.pair.close()
        for line in self._lines.values():
            _fail(line, error)
        self._lines.clear()


def _fail(line: _Line, error: ServeError) -> None:
    for queue in (line.urgent, line.background):
        while queue:
            queue.popleft()[0].work_ended(error)
