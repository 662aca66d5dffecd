"""A streaming client of the OpenAI API that costs little: a load can be made on the server's machine.

One connection for each request, HTTP/1.1, by asyncio alone. What is measured is when bytes arrive;
of each event only as much is parsed as says whether it carries text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(slots=True)
class Outcome:
    """What came of one request; seconds are of this process's monotonic clock."""

    sent_at_s: float
    arrived_at_s: list[float] = field(default_factory=list)
    """When each event came that carried tokens."""
    ended_at_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    turn: int = 0
    """Place of the request in its session, from 0."""
    answer_ids: list[int] = field(default_factory=list)
    """Tokens of the answer, where they were asked for and the server says them."""
    error: str = ""
    """Why the request failed; empty where it was served."""

    @property
    def ttft_s(self) -> float:
        return self.arrived_at_s[0] - self.sent_at_s

    @property
    def tbt_s(self) -> float:
        """Mean time between two tokens; 0 for a single one."""
        after = self.output_tokens - 1
        return (self.ended_at_s - self.arrived_at_s[0]) / after if after > 0 else 0.0

    @property
    def latency_s(self) -> float:
        return self.ended_at_s - self.sent_at_s


@dataclass(frozen=True, slots=True)
class Server:
    """Where to send, and as whom."""

    url: str
    """http://host:port, with or without /v1."""
    model: str
    api_key: str = ""
    timeout_s: float = 600.0
    headers: tuple[tuple[str, str], ...] = ()
    """More of each request's."""

    def path(self, name: str) -> str:
        base = urlsplit(self.url).path.rstrip("/")
        return f"{base or '/v1'}/{name}"


async def complete(
    server: Server, token_ids: list[int], output_tokens: int, wants_ids: bool = False
) -> Outcome:
    """Ask for exactly `output_tokens` tokens after a prompt; a failure stands in the outcome."""
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": token_ids,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if wants_ids:
        body["return_token_ids"] = True
    outcome = Outcome(time.monotonic())
    try:
        async with asyncio.timeout(server.timeout_s):
            async for data in _events(server, "completions", json.dumps(body).encode()):
                _take(outcome, data)
    except (OSError, ValueError, asyncio.IncompleteReadError, TimeoutError) as error:
        outcome.error = str(error) or type(error).__name__
    outcome.ended_at_s = outcome.arrived_at_s[-1] if outcome.arrived_at_s else time.monotonic()
    if not outcome.error and not outcome.output_tokens:
        outcome.error = "the answer held no token, or no usage"
    return outcome


def _take(outcome: Outcome, data: bytes) -> None:
    if data == b"[DONE]":
        return
    now_s = time.monotonic()
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        raise ValueError(event["error"].get("message", data.decode()))
    if any(choice.get("text") or choice.get("finish_reason") for choice in event.get("choices", [])):
        outcome.arrived_at_s.append(now_s)
    for choice in event.get("choices", []):
        outcome.answer_ids += choice.get("token_ids") or ()
    if usage := event.get("usage"):
        outcome.prompt_tokens = usage["prompt_tokens"]
        outcome.output_tokens = usage["completion_tokens"]
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def _events(server: Server, name: str, body: bytes) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event."""
    url = urlsplit(server.url)
    secure = url.scheme == "https"
    port = url.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(url.hostname, port, ssl=secure or None, limit=1 << 20)
    try:
        head = (
            f"POST {server.path(name)} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        if server.api_key:
            head += f"Authorization: Bearer {server.api_key}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in server.headers)
        writer.write(f"{head}\r\n".encode() + body)
        await writer.drain()
        status, is_chunked = await _read_head(reader)
        if status != 200:
            raise ValueError(f"HTTP {status}: {await _body_of(reader)}")
        async for line in _lines(reader, is_chunked):
            if line.startswith(b"data: "):
                yield line[6:]
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
    return int(lines[0].split()[1]), any(
        line.startswith(b"transfer-encoding:") and b"chunked" in line for line in lines
    )


async def _body_of(reader: asyncio.StreamReader) -> str:
    text = (await reader.read(2000)).decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text[text.index("{") : text.rindex("}") + 1])["error"]["message"])
    return text[:200]


async def _lines(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[bytes]:
    rest = b""
    while piece := await (_chunk(reader) if is_chunked else reader.read(1 << 16)):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
    return (await reader.readexactly(size + 2))[:-2]
