"""Answer: what one sequence generates, as it is told to the conductor.

Steps may go on before anything may be told: the KV that the sequence came with is not proven yet, or
its first token is on its way by another message. What they give is kept until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from base.errors import LostError
from base.messages import Tokens
from base.request import FinishReason, RequestId
from engine.step import SequenceOutput


class Answer:
    """One sequence's. Belongs to the event loop."""

    def __init__(self, request_id: RequestId, send: Callable[[Tokens], None]) -> None:
        self._request_id = request_id
        self._send = send
        self._untold: list[Tokens] | None = []
        self._finished = asyncio.Event()
        self._is_broken = False

    def on_output(self, output: SequenceOutput) -> None:
        """The engine's listener."""
        if output.finish_reason is FinishReason.ERROR:
            self._is_broken = True
        elif output.tokens or output.finish_reason is not None:
            tokens = Tokens(self._request_id, output.tokens, output.finish_reason)
            if self._untold is None:
                self._send(tokens)
            else:
                self._untold.append(tokens)
        if output.finish_reason is not None:
            self._finished.set()

    def open(self) -> None:
        """Tell what was kept, and whatever comes from now on."""
        untold, self._untold = self._untold or [], None
        for tokens in untold:
            self._send(tokens)

    async def ended(self) -> None:
        """Return when the last token is told; raises LostError if the engine gave the sequence up."""
        await self._finished.wait()
        if self._is_broken:
            raise LostError("the step that this sequence was in failed; see the node's log")
