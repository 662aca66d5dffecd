"""Token stream: what one sequence generates, on its way to the conductor.

Steps may go on before their tokens may be sent: the KV that the sequence came with is not proven yet, or
its first token travels in another message. Until the stream is opened, their tokens are kept here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from base.errors import InvalidRequestError, LostError, ServeError
from base.messages import Tokens
from base.request import FinishReason, RequestId
from engine.sequence import Sequence
from engine.step import SequenceOutput


class TokenStream:
    """The generated tokens of one sequence. Belongs to the event loop."""

    def __init__(self, request_id: RequestId, send: Callable[[Tokens], None]) -> None:
        self._request_id = request_id
        self._send = send
        self._kept: list[Tokens] | None = []
        self._finished = asyncio.Event()
        self._failed: Sequence | None = None

    def on_output(self, output: SequenceOutput) -> None:
        """Take one output of the engine, as its listener."""
        if output.finish_reason is FinishReason.ERROR:
            self._failed = output.sequence
        elif output.tokens or output.finish_reason is not None:
            tokens = Tokens(self._request_id, output.tokens, output.finish_reason)
            if self._kept is None:
                self._send(tokens)
            else:
                self._kept.append(tokens)
        if output.finish_reason is not None:
            self._finished.set()

    def open(self) -> None:
        """Send what was kept, and from now on whatever comes."""
        kept, self._kept = self._kept or [], None
        for tokens in kept:
            self._send(tokens)

    async def ended(self) -> None:
        """Return when the last token is sent.

        Raises:
            LostError: the engine gave the sequence up.
            InvalidRequestError: its grammar cannot be followed.
        """
        await self._finished.wait()
        if self._failed is not None:
            raise failure_of(self._failed)


def failure_of(sequence: Sequence) -> ServeError:
    """Return what to raise for a sequence that the engine gave up."""
    if sequence.constraint is not None and sequence.constraint.error:
        return InvalidRequestError(sequence.constraint.error, "grammar")
    return LostError("the engine gave this sequence up; see the node's log")
