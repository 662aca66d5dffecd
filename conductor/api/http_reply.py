"""The two ends of one HTTP call: its body coming in, its answer going out.

ASGI reports that a client left only to those who read its connection, so `while_connected` reads it while the
call is worked on. An answer is sent as soon as there is something to say, one write per event, and its status
line waits until then, so that a request rejected after it was queued still is a 429.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Send

from conductor.api.http_errors import OPENAI_ERRORS, ErrorForm, HttpError

# ASCII alone: some clients split events at Unicode's line separators.
to_json = json.JSONEncoder(separators=(",", ":")).encode
BODY_TIMEOUT_S = 30.0
"""The time from a call's first byte to its body's last. Calls in progress are bounded, so a body that
trickles in takes a place from others."""
JOINED_BYTES = 1 << 15
"""A shorter answer is written at once, a longer one in pieces of this size."""
JSON_HEADERS = {"content-type": "application/json"}
JSON_PART_HEADERS = [(b"content-type", b"application/json")]
"""The headers of an answer that is written in parts, whose length nobody knows before."""
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
WATCH_AFTER_S = 0.05
"""Work that lasts less goes unwatched: to watch a client costs as much as writing a short answer does."""

CutOff = Callable[[Callable[[], Exception]], None]
"""Ends a call with what its argument makes, in the turn after this one."""


def json_response(value: object, status: int = 200) -> Response:
    """Return an answer that was not streamed and has no request's id; bytes are JSON already."""
    content = value if isinstance(value, bytes) else to_json(value)
    return Response(content, status_code=status, media_type="application/json")


class ClientGoneError(Exception):
    """The client has closed its connection."""


class Reply:
    """The answer to one call. Owned by the event loop."""

    def __init__(self, send: Send, request_id: str, errors: ErrorForm = OPENAI_ERRORS) -> None:
        """Begin. `errors`: how the call's API words them."""
        self.request_id = request_id
        """Echoed in a header. May change until the first byte is sent."""
        self.when_started: Callable[[], object] = lambda: None
        """Called as the answer begins."""
        self._errors = errors
        self._send = send
        self._is_started = self._is_whole = False
        self._is_within = False
        """Whether the last piece that was sent has others after it."""
        # Choices write as their tokens come; a write that waits for a slow client must
        # not be overtaken.
        self._turn = asyncio.Lock()

    async def whole(
        self,
        parts: Sequence[bytes | bytearray],
        status: int = 200,
        headers: Mapping[str, str] = JSON_HEADERS,
    ) -> None:
        """Send an answer that does not stream, without ever holding a long one as one."""
        self._is_whole, num_bytes = True, sum(map(len, parts))
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._start(status, [*raw, (b"content-length", str(num_bytes).encode())])
        if num_bytes <= JOINED_BYTES:
            parts = [b"".join(parts)]
        for part in parts[:-1]:
            await self._write(part)
        await self._write(parts[-1], ends=True)

    async def event(self, events: str, headers: Sequence[tuple[bytes, bytes]] = STREAM_HEADERS) -> None:
        """Send a part of an event stream, or of what `headers` say; those of the first part count."""
        async with self._turn:
            if not self._is_started:
                await self._start(200, headers)
            await self._write(events.encode())

    async def end(self, events: str) -> None:
        """Send the last part of an event stream."""
        if not self._is_started:
            await self._start(200, STREAM_HEADERS)
        await self._write(events.encode(), ends=True)

    async def fail(self, error: HttpError) -> None:
        """Send an error: as the answer, or as the event that ends a stream."""
        if self._is_whole or self._is_within:
            return  # the connection is closed, and its client sees that something is missing
        if self._is_started:
            async with self._turn:
                await self.end(self._errors.in_stream(error, self.request_id))
        else:
            await self.whole([self._errors.body(error, self.request_id)], error.status, error.headers)

    async def _write(self, data: bytes | bytearray, ends: bool = False) -> None:
        """Send a part of the body in pieces, each when most of those before it have left.

        So a call lasts, and keeps its place, until the connection's buffers can hold its answer's rest."""
        for at in range(0, len(data) or 1, JOINED_BYTES):
            piece = bytes(data[at : at + JOINED_BYTES])
            more = not ends or at + JOINED_BYTES < len(data)
            await self._send({"type": "http.response.body", "body": piece, "more_body": more})
            self._is_within = at + JOINED_BYTES < len(data)

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._is_started = True
        self.when_started()
        headers = [*headers, (b"x-request-id", self.request_id.encode("latin-1"))]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


async def read_body(
    receive: Receive, declared_bytes: int, max_bytes: int, arrived: Callable[[int], None], cut_off: CutOff
) -> bytes:
    """Return the body of a call.

    Args:
        declared_bytes: The content-length; 0 where the call has none.
        max_bytes: More is refused, without reading it.
        arrived: Called with the number of bytes of each part; may raise ServeError.
        cut_off: Ends the call with a BodyError where the body comes too slowly.

    Raises:
        BodyError: the body is too long.
        ClientGoneError: the client left while sending it.
    """
    if declared_bytes > max_bytes:
        raise _too_long(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    timer = asyncio.get_running_loop().call_later(BODY_TIMEOUT_S, cut_off, _too_slow)
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(part := message.get("body", b""))
            num_bytes += len(part)
            arrived(len(part))
            if num_bytes > max_bytes:
                raise _too_long(max_bytes)
            if not message.get("more_body"):
                return b"".join(parts)
    finally:
        timer.cancel()


class BodyError(Exception):
    """A body that is not read to its end."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _too_long(max_bytes: int) -> BodyError:
    return BodyError(413, f"the body is longer than {max_bytes} bytes")


def _too_slow() -> BodyError:
    return BodyError(408, f"the body took longer than {BODY_TIMEOUT_S:g} s")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None], cut_off: CutOff) -> None:
    """Do `work` until it is done or the client leaves, which is noticed after `WATCH_AFTER_S`.

    Call when the body was read. `cut_off` ends the call with a ClientGoneError where the client has left.
    """
    watching: list[asyncio.Task[None]] = []

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        cut_off(ClientGoneError)

    loop = asyncio.get_running_loop()
    later = loop.call_later(WATCH_AFTER_S, lambda: watching.append(loop.create_task(watch())))
    try:
        await work
    finally:
        later.cancel()
        for task in watching:
            task.cancel()
