"""A connection of the event loop's own, for what somebody waits for: small batches, short calls.

Nothing changes threads, and for a moment the loop itself looks for the answer, because its own way to
sleep and back takes longer than a prompt peer does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from base.errors import ServeError
from transfer.completion import Completion
from transfer.tcp.frame import Kind
from transfer.tcp.greeting import PeerKey
from transfer.tcp.link import Frame, LinkState, TcpLink
from transfer.tcp.reactor import LoopPoller, Patience

PROMPT_S = 0.001
"""How long the loop waits for an answer."""
MAX_LATE = 2
"""A peer whose last answers all took longer is not waited for. After a single one the next is prompt where
somebody else had the processor meanwhile; it took 300 us without being waited for."""


MAX_CAUGHT_UP = 256
"""Frames at once, each of some 10 us. By the clock a slow machine would not get to the end of two."""

_WRITE = Kind.WRITE


class Single:
    """The owner of one frame on such a link, which mostly is over before anybody waits for it."""

    def __init__(self) -> None:
        self.is_over = False
        self.error: ServeError | None = None
        self.completion: Completion | None = None

    def frame_ended(self, error: ServeError | None) -> None:
        self.is_over = True
        self.error = error
        if self.completion is not None:
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
        self._num_late = 0
        self._patience = Patience()
        self._now_s = asyncio.get_running_loop().time

    def connect(self) -> None:
        """Begin to connect. Where that is out of the question, `on_closed` is called within this call."""
        self._link.connect()

    @property
    def is_closed(self) -> bool:
        return self._link.state is LinkState.CLOSED

    async def carry(self, single: Single, frame: Frame) -> None:
        """Send the frame that `single` owns, and return or raise as it ends."""
        begun_s = self._now_s()
        self._link.submit((frame,))
        if self._num_late < MAX_LATE and frame.is_urgent:
            self._wait_briefly(single, frame, begun_s + PROMPT_S)
        if not single.is_over:
            single.completion = Completion()
            await single.completion.wait(lambda: self._link.detach(single))
        elif single.error is not None:
            raise single.error
        self._num_late = 0 if self._now_s() - begun_s < PROMPT_S else self._num_late + 1

    def catch_up(self) -> None:
        """Take in what came while the loop had no turn, the end of the connection too."""
        for _ in range(MAX_CAUGHT_UP):
            if not self._poller.is_ready(0):
                return
            self._poller.turn()

    def let_go(self, hold: Frame) -> None:
        """Tell the peer that what was held is touched no more."""
        self._link.let_go(hold)

    def close(self) -> None:
        self._link.close()

    def _wait_briefly(self, single: Single, frame: Frame, until_s: float) -> None:
        """Keep the loop until the answer is there: its own way to sleep and back takes longer."""
        looks = self._patience.looks()
        while not single.is_over:
            if self._poller.is_ready(0 if looks else 1):
                if self._link.is_sending or frame.kind is not _WRITE:
                    self._poller.turn()
                else:
                    self._link.take_ack(frame)
            elif looks:
                looks -= 1
                if not looks:
                    self._patience.was_in_vain()
                continue
            # Also where there is always something, but not the end: large on a slow way, or a flood.
            if not single.is_over and self._now_s() >= until_s:
                return
        if looks:
            self._patience.paid()
