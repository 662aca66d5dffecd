"""Rails and queue pairs without a NIC, all in one process: what is posted is copied by whoever ends it."""

import ctypes
import os
from itertools import count

from base.errors import TransferFailedError
from transfer.owned.segment import Segment
from transfer.rdma.topology import Place
from transfer.rdma.verbs import Ended, QueuePairEnd

NOWHERE = Place()
_numbers = count(1)


class FakePair:
    """A queue pair that notes (id, peer's key) of what is posted. A test may make the key a batch's name."""

    def __init__(self, rail: "FakeRail") -> None:
        self.rail = rail
        self.end = QueuePairEnd(next(_numbers), 0, 0, 3, bytes(16))
        self.posted: list[tuple[int, int]] = []
        self.is_broken = self.is_closed = False

    def connect(self, peer: QueuePairEnd) -> None:
        if self.rail.is_down:
            raise TransferFailedError("down")

    def post(self, work, is_write: bool) -> None:
        if self.is_broken:
            raise TransferFailedError("broken")
        self.posted += [(work_id, key) for work_id, _, _, _, _, _, key in work]
        self.rail.under_way += [(self, is_write, each) for each in work]
        if self.rail.is_prompt:
            self.rail.finish()

    def close(self) -> None:
        self.is_closed = True


class FakeRail:
    """`finish` ends what is under way; with `is_prompt`, posting does so. Memory has `key`."""

    def __init__(self, name: str, key: int = 0) -> None:
        self.name = name
        self.key = key
        self.place = NOWHERE
        self.is_down = self.is_prompt = self.is_armed = False
        self.finishes_when_armed = False
        """Just before."""
        self.copies = False
        """Whether bytes move. The addresses must be true then."""
        self.pairs: list[FakePair] = []
        self.under_way: list = []
        self.ended: list[Ended] = []
        self.channel_fd = os.eventfd(0, os.EFD_NONBLOCK)

    def queue_pair(self) -> FakePair:
        self.pairs.append(FakePair(self))
        return self.pairs[-1]

    def finish(self) -> None:
        for pair, is_write, (work_id, is_signalled, address, length, _, peer_address, _) in self.under_way:
            if self.copies:
                ends = (peer_address, address) if is_write else (address, peer_address)
                ctypes.memmove(*ends, length)
            if is_signalled:
                self.tell(Ended(pair.end.number, work_id, "", False))
        self.under_way.clear()

    def tell(self, ended: Ended) -> None:
        self.ended.append(ended)
        if self.is_armed:
            self.is_armed = False
            os.eventfd_write(self.channel_fd, 1)

    def arm(self) -> bool:
        if self.finishes_when_armed:
            self.finish()
        is_new, self.is_armed = not self.is_armed, True
        return is_new

    def drain(self) -> list[Ended]:
        ended, self.ended = self.ended, []
        return ended

    def poll(self) -> list[Ended]:
        os.eventfd_read(self.channel_fd)
        return self.drain()

    def keys(self, segment: Segment) -> tuple[int, int]:
        return self.key, self.key

    def close(self) -> None:
        os.close(self.channel_fd)
