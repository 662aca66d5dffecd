"""A connection of the event loop's own, for what somebody waits for: small batches, short calls.

Nothing changes threads, which twice and back would cost more than 64 KiB do.
"""

from __future__ import annotations

from collections.abc import Callable

from transfer.completion import Completion
from transfer.tcp.frame import FrameKind
from transfer.tcp.greeting import PeerKey
from transfer.tcp.link import ClientLink, Frame, LinkState
from transfer.tcp.reactor import LoopPoller

MAX_CAUGHT_UP = 256
"""Frames taken in at once, each of some 10 us; by the clock a slow machine would not get beyond two."""


class Call:
    """A frame on such a link, and the wait for its answer."""

    def __init__(self, kind: FrameKind, answer_bytes: int) -> None:
        self._completion = Completion()
        self._answer = bytearray(answer_bytes)
        self.frame = Frame(self._completion, kind, incoming=[memoryview(self._answer)])

    async def answered(self, link: ExpressLink) -> bytes:
        """Send it and return the answer; raises what the peer refused it with."""
        await link.carry(self._completion, self.frame)
        return bytes(self._answer)


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
        self._link = ClientLink(address, key, self._poller, on_closed, on_recalled)

    def connect(self) -> None:
        """Begin to connect. Where that is out of the question, `on_closed` is called within this call."""
        self._link.connect()

    @property
    def is_closed(self) -> bool:
        return self._link.state is LinkState.CLOSED

    async def carry(self, completion: Completion, frame: Frame) -> None:
        """Send the frame that `completion` owns, and return or raise as it ends."""
        self._link.submit((frame,))
        await completion.wait(lambda: self._link.detach(completion))

    def catch_up(self) -> None:
        """Take in what came while the loop had no turn, the end of the connection too."""
        for _ in range(MAX_CAUGHT_UP):
            if not self._poller.is_ready():
                return
            self._poller.turn()

    def let_go(self, hold: Frame) -> None:
        """Notify the peer that what was held is not touched any more."""
        self._link.let_go(hold)

    def close(self) -> None:
        self._link.close()
