"""A connection of the event loop's own, for what somebody waits for: small batches, short calls.

Nothing changes threads, which twice and back would cost more than 64 KiB do.
"""

from __future__ import annotations

from collections.abc import Callable

from base.errors import ServeError
from transfer.completion import Completion
from transfer.tcp.frame import Kind
from transfer.tcp.greeting import PeerKey
from transfer.tcp.link import Frame, LinkState, TcpLink
from transfer.tcp.reactor import LoopPoller

MAX_CAUGHT_UP = 256
"""Frames at once, each of some 10 us. By the clock a slow machine would not get to the end of two."""


class Single:
    """The owner of one frame on such a link."""

    def __init__(self) -> None:
        self.completion = Completion()

    def frame_ended(self, error: ServeError | None) -> None:
        self.completion.end(error)


class Call:
    """A frame on such a link, and the wait for its answer."""

    def __init__(self, kind: Kind, answer_bytes: int) -> None:
        self._single = Single()
        self.answer = bytearray(answer_bytes)
        self.frame = Frame(self._single, kind, incoming=[memoryview(self.answer)])

    async def answered(self, link: ExpressLink) -> bytes:
        """Send it and return the answer; raises what the peer refused it with."""
        await link.carry(self._single, self.frame)
        return bytes(self.answer)


class ExpressLink:
    """Owns one link, from `connect` on: frames may be carried then, whatever becomes of it."""

    def __init__(
        self,
        address: str,
        key: PeerKey,
        on_closed: Callable[[], None] = lambda: None,
        on_recalled: Callable[[int], None] = lambda generation: None,
    ) -> None:
        self._poller = LoopPoller()
        self._link = TcpLink(address, key, self._poller, on_closed, on_recalled)

    def connect(self) -> None:
        """Begin to connect. Where that is out of the question, `on_closed` is called within this call."""
        self._link.connect()

    @property
    def is_closed(self) -> bool:
        return self._link.state is LinkState.CLOSED

    async def carry(self, single: Single, frame: Frame) -> None:
        """Send the frame that `single` owns, and return or raise as it ends."""
        self._link.submit((frame,))
        await single.completion.wait(lambda: self._link.detach(single))

    def catch_up(self) -> None:
        """Take in what came while the loop had no turn, the end of the connection too."""
        for _ in range(MAX_CAUGHT_UP):
            if not self._poller.is_ready():
                return
            self._poller.turn()

    def let_go(self, hold: Frame) -> None:
        """Tell the peer that what was held is touched no more."""
        self._link.let_go(hold)

    def close(self) -> None:
        self._link.close()
