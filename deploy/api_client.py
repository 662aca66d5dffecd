"""The conductor's HTTP API, as the command line needs it: the standard library suffices.

Calls block. `ChatStream.close` may be called from another thread, to end a call that is
waiting: the server then sees its client leave.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

TIMEOUT_S = 30.0
"""For an answer to a question about the cluster."""

SILENCE_S = 600.0
"""Between two pieces of a generated answer: the server's own limit is sooner."""


class ApiError(Exception):
    """The cluster did not answer, or answered with an error; the message says which."""


def read_json(address: str, path: str) -> Any:
    """Return what GET `path` answers.

    Args:
        address: `host:port`.

    Raises:
        ApiError: no answer, a status of 400 or above, or no JSON.
    """
    with contextlib.closing(http.client.HTTPConnection(address, timeout=TIMEOUT_S)) as connection:
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"http://{address}{path}: {error}") from error
    if response.status >= 400:
        raise ApiError(_told(address, response.status, body))
    try:
        return json.loads(body)
    except ValueError as error:
        raise ApiError(f"http://{address}{path}: no JSON: {error}") from error


def is_healthy(address: str) -> bool:
    """Return whether the conductor can serve: it answers /health, and not with an error."""
    try:
        read_json(address, "/health")
    except ApiError:
        return False
    return True


class ChatStream:
    """One chat completion, streamed."""

    def __init__(self, address: str, model: str, messages: list[dict[str, str]], **options: Any) -> None:
        """Take what to ask; nothing is sent yet.

        Args:
            options: Further keys of the request's body: `max_tokens`, `temperature`.
        """
        self._address = address
        self._connection = http.client.HTTPConnection(address, timeout=SILENCE_S)
        self._socket: socket.socket | None = None
        self._is_closed = False
        self._body = json.dumps({"model": model, "messages": messages, "stream": True, **options})

    def pieces(self) -> Iterator[str]:
        """Ask, and yield the answer's text as it comes.

        Raises:
            ApiError: no answer, an error, or an answer cut short.
        """
        try:
            self._connection.connect()
            # Kept: http.client forgets it once it has read a header that says "close".
            self._socket = self._connection.sock
            if self._is_closed:
                raise ApiError("closed before it was asked")
            self._connection.request(
                "POST", "/v1/chat/completions", self._body, {"Content-Type": "application/json"}
            )
            response = self._connection.getresponse()
            if response.status >= 400:
                raise ApiError(_told(self._address, response.status, response.read()))
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data:
                    yield self._piece(data)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ApiError(f"http://{self._address}: {error}") from error
        raise ApiError(f"http://{self._address}: the answer was cut short")

    def close(self) -> None:
        """Hang up. `pieces`, if it is waiting, raises ApiError. Idempotent."""
        self._is_closed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _piece(self, data: bytes) -> str:
        chunk = json.loads(data)
        if "error" in chunk:
            raise ApiError(chunk["error"].get("message", data.decode()))
        return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _told(address: str, status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")[:200]
    return f"http://{address} answered {status}: {message}"
