"""A client of /v1/completions so cheap that ten times too much load leaves the server its processor.

One callback for what the socket brings, prompts that differ in their first token alone (so that
nothing of them is cached), and nothing parsed but the status and where an answer ends: a tenth of
what a request costs the conductor. It keeps its connections, as clients' libraries do.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import cast

from base.request import Slo

END = b"\r\n0\r\n\r\n"
"""Of a stream's last chunk."""


@dataclass(slots=True)
class Call:
    """One request as it goes. Seconds on this process's monotonic clock."""

    sent_at_s: float
    status: int = 0
    """0: no answer."""
    first_at_s: float = 0.0
    last_at_s: float = 0.0
    is_whole: bool = False
    said: bytes = b""
    """The end of the answer: what a failed one ended with."""


class _Connection(asyncio.Protocol):
    """One call after another."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.call: Call | None = None
        self.ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def begin(self, request: bytes, call: Call) -> asyncio.Future[None]:
        self.call = call
        self.ended = asyncio.get_running_loop().create_future()
        assert self.transport is not None
        self.transport.write(request)
        return self.ended

    def data_received(self, data: bytes) -> None:
        call, now_s = self.call, time.monotonic()
        if call is None:
            return
        if not call.status:
            call.status = int(data[9:12])
            call.first_at_s = now_s
        elif b'"token_ids"' in data:
            call.last_at_s = now_s
        call.said = (call.said + data)[-2_000:]
        if call.status == 200:
            call.is_whole = call.said.endswith(END) and b"[DONE]" in call.said
            if call.is_whole:
                self._end()
        elif _is_complete(call.said):
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._end()

    def _end(self) -> None:
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)
        self.call = None


def _is_complete(answer: bytes) -> bool:
    """Return whether an answer of a stated length is all there."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return bool(separator) and len(body) >= int(length or b"0")


class Client:
    """Sends prompts of `prompt_tokens` for `max_tokens` tokens each."""

    def __init__(self, port: int, prompt_tokens: int, max_tokens: int, slo: Slo) -> None:
        self._port = port
        self._rest = b",%s" % b",".join(b"%d" % (100 + number) for number in range(prompt_tokens - 2))
        self._tail = b'],"max_tokens":%d,"stream":true,"ignore_eos":true,"temperature":0,' % max_tokens
        # Of ids: a stub node's tokens need not be text, and what is no text yet is not sent.
        self._tail += b'"return_token_ids":true}'
        self._head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"x-slo-ttft-ms: %g\r\nx-slo-tpot-ms: %g\r\n" % (slo.ttft_slo_s * 1e3, slo.tbt_slo_s * 1e3)
        )
        self._idle: list[_Connection] = []
        self._number = 0

    async def ask(self, timeout_s: float) -> Call:
        """Take one answer to its end; one that takes longer is left as it is then."""
        self._number += 1
        first = b"%d,%d" % (100 + self._number % 20_000, 100 + self._number // 20_000)
        body = b'{"model":"smollm2","prompt":[%s%s%s' % (first, self._rest, self._tail)
        call = Call(time.monotonic())
        connection = await self._connection()
        ended = connection.begin(b"%sContent-Length: %d\r\n\r\n%s" % (self._head, len(body), body), call)
        done, _ = await asyncio.wait([ended], timeout=timeout_s)
        if done and connection.transport is not None:
            self._idle.append(connection)
        elif connection.transport is not None:
            connection.transport.abort()
        return call

    async def _connection(self) -> _Connection:
        while self._idle:
            # The last used first: the others' time at the server runs out, and they are closed.
            connection = self._idle.pop()
            if connection.transport is not None and not connection.transport.is_closing():
                return connection
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, "127.0.0.1", self._port)
        return made

    def close(self) -> None:
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.abort()
