"""One HTTP connection, bounded where uvicorn leaves it open: the head of a call.

A head that is longer than `MAX_HEAD_BYTES`, or not there within `HEAD_TIMEOUT_S` of the
connection's opening or of its own first byte, ends the connection; so does one connection too
many, if none that asks nothing makes room (`base/arrivals.py`), a call that comes while
`MAX_PIPELINED` others wait for the answers before theirs, and a client that reads nothing of its
answer for `READ_TIMEOUT_S` once buffers are full, or a byte in each of `READ_PERIODS`: its request would
be held until it does. While buffers are full it is one of those that make room.
Between two calls uvicorn's own timeout counts, in a body `http_reply.BODY_TIMEOUT_S`.

A client that closes its side of the connection may have left: that looks the same until it is
written to. So it gets what is answered within `LEFT_S`, and all of an answer whose length is known
by then; for whoever else nothing more is generated, and what came behind that call is not begun.
Over TLS asyncio closes at once.

A transport that closes waits until all is read, so who reads nothing is given up then too.

What is written in one turn of the event loop goes out together: an answer is written in up to
four parts, and a system call costs more than all that makes them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from base.arrivals import OpenConnections, num_allowed
from base.logs import event
from base.seldom import Seldom

log = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 32 << 10
HEADER_OVERHEAD_BYTES = 32
"""The bytes that one more header counts as, as in HTTP/2: each is some objects here."""
MAX_PIPELINED = 32
"""Calls of one connection that wait for others of it: what is read at once may have 10,000."""
MAX_CORKED_BYTES = 32 << 10
READ_TIMEOUT_S = 60.0
READ_PERIODS = 10
"""Times that `READ_TIMEOUT_S` may begin again for a client that reads, and leaves buffers full."""
LEFT_S = 0.05
"""Time for an answer to begin once its client sends nothing more."""
SHARE_OF_DESCRIPTORS = 0.5
"""The listener's share; gRPC, nodes, and what the process opens itself have the rest."""


class Corked:
    """A transport that passes on what was written in a turn of the event loop at its end."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, when_closing: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._when_closing = when_closing
        self._written: list[bytes | bytearray | memoryview] = []
        self._num_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._written:
            self._loop.call_soon(self._flush)
        self._written.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > MAX_CORKED_BYTES:
            # The transport says when a slow client is to be waited for.
            self._flush()

    def close(self) -> None:
        self._flush()
        if not self._transport.is_closing():
            self._transport.close()
            self._when_closing()

    def abort(self) -> None:
        self._written.clear()
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._written and not self._transport.is_closing():
            self._transport.write(b"".join(self._written))
        self._written.clear()
        self._num_bytes = 0


class _SeldomLines:
    """A connection's logger: what clients can make uvicorn say, an answer cut off included, is no error."""

    level = logging.WARNING

    def __init__(self, seldom: Seldom) -> None:
        self._seldom = seldom

    def warning(self, said: str) -> None:
        self._seldom.event("http connection", said, said=said)

    def error(self, said: str, *values: object, exc_info: BaseException | None = None) -> None:
        if exc_info is None:
            self.warning(said % values if values else said)
        else:
            log.error(said, *values, exc_info=exc_info)


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection; the parser calls `on_message_begin` to `on_headers_complete`."""

    def __init__(self, *args: Any, arrivals: OpenConnections | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        # One that counts nobody yet is false.
        self._arrivals = OpenConnections(num_allowed(SHARE_OF_DESCRIPTORS)) if arrivals is None else arrivals
        self.logger = _SeldomLines(self._arrivals.seldom)  # type: ignore[assignment]
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """Timers of what is waited for: "head" and "read"."""

    _answered: RequestResponseCycle = None  # type: ignore[assignment] # as uvicorn's own
    """The call that is answered, or was last: `cycle` is the one that came last, and may wait for others."""
    _is_closing = False
    _is_in_head = True
    """Whether the next of a head is awaited; most come at once, and no timer is made for them."""
    _head_bytes = 0
    _arrived_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Corked(transport, self.loop, self._closes))  # type: ignore[arg-type]
        self._expect_head()
        self._await_head()
        self._arrivals.came(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop("head")
        self._stop("read")
        self._arrivals.gone(self.transport)
        self.cycle = self._answered  # uvicorn notifies this one
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._arrivals.ended(self.transport)  # who does not read makes room too
        self._expect_reading(READ_PERIODS)

    def resume_writing(self) -> None:
        if not self._is_closing:
            self._stop("read")
        super().resume_writing()
        self._has_asked()

    def _has_asked(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete and not self.flow.write_paused:
            self._arrivals.begun(self.transport)

    def data_received(self, data: bytes) -> None:
        before, is_body = self.cycle, self.cycle is not None and self.cycle.more_body
        super().data_received(data)
        if not self._is_in_head:
            if self.timeout_keep_alive_task is None and self.cycle and self.cycle.response_complete:
                # No call has begun with it: empty lines, or the rest of a body that was refused.
                self._await_call()
            return
        is_first = "head" not in self._timers
        if is_first:
            self._await_head()
            if is_body or self.cycle is not before:
                return  # its bytes are mostly those of calls before it
        # The parser keeps a header to itself until its end.
        self._arrived_bytes += len(data)
        if self._arrived_bytes > MAX_HEAD_BYTES:
            self._give_up("its head is too long")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open for an answer."""
        if self.scheme == "https" or self._answered is None or self._answered.response_complete:
            self.transport.close()  # with what is corked
            return False
        self.cycle.keep_alive = False
        self.loop.call_later(LEFT_S, self._left)
        return True

    def _left(self) -> None:
        self.pipeline.clear()
        self._answered.keep_alive = False
        if self._answered.chunked_encoding is not False:  # no answer has begun, or one of any length
            self.transport.close()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many calls at once")  # uvicorn answers 400
        super().on_message_begin()
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + HEADER_OVERHEAD_BYTES
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head is too long")  # uvicorn answers 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop("head")
        super().on_headers_complete()
        self._has_asked()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # and no other that came with it has begun
            self._arrivals.ended(self.transport)

    def _expect_head(self) -> None:
        self._stop("head")
        self._head_bytes = self._arrived_bytes = 0
        self._is_in_head = True

    def _await_call(self) -> None:
        """Have uvicorn's timeout between two calls count again: it ends with whatever comes."""
        later = self.loop.call_later
        self.timeout_keep_alive_task = later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _await_head(self) -> None:
        self._timers["head"] = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up, "its head is too slow")

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _closes(self) -> None:
        self._is_closing = True
        self._expect_reading(READ_PERIODS)

    def _expect_reading(self, num_periods: int) -> None:
        self._stop("read")
        seen = num_periods, self.transport.get_write_buffer_size()
        self._timers["read"] = self.loop.call_later(READ_TIMEOUT_S, self._look_at_reading, *seen)

    def _look_at_reading(self, num_periods: int, unread_bytes: int) -> None:
        if num_periods > 1 and self.transport.get_write_buffer_size() < unread_bytes:
            self._expect_reading(num_periods - 1)
        else:
            self._give_up("its client does not read")

    def _give_up(self, reason: str) -> None:
        event(log, "http connection closed", level=logging.DEBUG, reason=reason)
        self._stop("head")
        self.transport.abort()
