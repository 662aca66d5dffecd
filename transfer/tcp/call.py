"""One frame to a peer and its answer, on a link of the event loop's own."""

from __future__ import annotations

from transfer.completion import Completion
from transfer.tcp.frame import FrameKind
from transfer.tcp.link import ClientLink, Frame


class Call:
    """Owns a frame, and the memory of its answer."""

    def __init__(self, kind: FrameKind, answer_bytes: int) -> None:
        self._completion = Completion()
        self._answer = bytearray(answer_bytes)
        self.frame = Frame(self._completion, kind, incoming=[memoryview(self._answer)])

    async def answered(self, link: ClientLink) -> bytes:
        """Send it and return the answer; raises what the peer refused it with."""
        link.submit((self.frame,))
        await self._completion.wait(lambda: link.detach(self._completion))
        return bytes(self._answer)
