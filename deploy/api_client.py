"""The conductor's HTTP API, as the command line needs it: the standard library suffices.

An address is `host:port`, or `https://host:port`, with or without a client's `/v1`; who signed
the server's certificate is then said by the environment, as for all programs of OpenSSL:
SSL_CERT_FILE. The API key, where one is needed, is CONDUCTOR_API_KEY there: not an argument,
which every user of the host can read.

Calls block. `ChatStream.close` may be called from another thread, to end a call that is
waiting: the server then sees its client leave.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
from collections.abc import Iterator
from typing import Any, NamedTuple

TIMEOUT_S = 30.0
"""The longest that an answer to a question about the cluster may take."""

SILENCE_S = 600.0
"""The longest pause between two pieces of a generated answer: the server's own limit is sooner."""


class ApiError(Exception):
    """The cluster did not answer, or answered with an error; the message says which."""


def split_address(address: str) -> tuple[str, str]:
    """Return http or https, and `host:port`; raises ApiError for what is no address."""
    scheme, found, bare = address.rpartition("://")
    bare = bare.rstrip("/").removesuffix("/v1")
    host, _, port = bare.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) > 65535:
        raise ApiError(f"--address: host:port of the conductor's HTTP API is wanted, not {address!r}")
    return (scheme if found else "http"), bare


def url(address: str) -> str:
    return "://".join(split_address(address))


def _connection(address: str, timeout_s: float, check: bool = True) -> http.client.HTTPConnection:
    scheme, bare = split_address(address)
    if scheme == "http":
        return http.client.HTTPConnection(bare, timeout=timeout_s)
    context = ssl.create_default_context()
    if not check:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(bare, timeout=timeout_s, context=context)


def _headers() -> dict[str, str]:
    key = os.environ.get("CONDUCTOR_API_KEY")
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


def read_json(address: str, path: str) -> Any:
    """Return what GET `path` answers; raises ApiError: no answer, a status of 400 or above, or no JSON."""
    try:
        return json.loads(_read(address, path))
    except ValueError as error:
        raise ApiError(f"{url(address)}{path}: no JSON: {error}") from error


def read_text(address: str, path: str) -> str:
    """Return what GET `path` answers; raises ApiError as `read_json`."""
    return _read(address, path).decode(errors="replace")


def require_server(address: str) -> None:
    """Raise ApiError where nobody answers. An answer that is an error is one."""
    _asked(address, "GET", "/health", TIMEOUT_S, is_secret=False)


def _read(address: str, path: str, is_secret: bool = True) -> bytes:
    response, body = _asked(address, "GET", path, TIMEOUT_S, is_secret=is_secret)
    if response.status >= 400:
        raise ApiError(_refusal(address, response.status, body))
    return body


def _asked(
    address: str, method: str, path: str, timeout_s: float, body: bytes | None = None, is_secret: bool = True
) -> tuple[http.client.HTTPResponse, bytes]:
    """Return an answer and its body; raises ApiError: nobody gave one."""
    with contextlib.closing(_connection(address, timeout_s, check=is_secret)) as connection:
        try:
            connection.request(method, path, body, _headers() if is_secret else {})
            response = connection.getresponse()
            return response, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(_unanswered(f"{url(address)}{path}", error)) from error


class Answer(NamedTuple):
    """The whole answer to one call."""

    status: int
    request_id: str
    retry_after_s: float | None
    body: bytes


def post(address: str, path: str, body: bytes) -> Answer:
    """Return what POST `path` answers, refusals too; raises ApiError: nobody did."""
    response, text = _asked(address, "POST", path, SILENCE_S, body)
    after = response.headers.get("retry-after", "")
    request_id = response.headers.get("x-request-id", "")
    return Answer(response.status, request_id, float(after) if after.isdecimal() else None, text)


def is_healthy(address: str) -> bool:
    """Return whether the conductor can serve: it answers /health, and not with an error.

    Nothing secret is sent, so nobody's certificate is checked.
    """
    try:
        _read(address, "/health", is_secret=False)
    except ApiError:
        return False
    return True


class ChatStream:
    """One chat completion, streamed."""

    def __init__(self, address: str, model: str, messages: list[dict[str, Any]], **options: Any) -> None:
        """Take what to ask, and further keys of the request's body; nothing is sent yet."""
        self.calls: list[dict[str, Any]] = []
        """The calls of tools that came so far, as a later message has them."""
        self._address = address
        self._connection = _connection(address, SILENCE_S)
        self._socket: socket.socket | None = None
        self._is_closed = False
        self._body = json.dumps({"model": model, "messages": messages, "stream": True, **options})

    def pieces(self) -> Iterator[str]:
        """Ask, and yield the answer's text as it comes; raises ApiError for none, or one cut short."""
        try:
            self._connection.connect()
            # Kept: http.client forgets it once it has read a header that says "close".
            self._socket = self._connection.sock
            if self._is_closed:
                raise ApiError("closed before it was asked")
            self._connection.request("POST", "/v1/chat/completions", self._body, _headers())
            response = self._connection.getresponse()
            if response.status >= 400:
                raise ApiError(_refusal(self._address, response.status, response.read()))
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data:
                    yield self._piece(data)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ApiError(_unanswered(url(self._address), error)) from error
        raise ApiError(f"{url(self._address)}: the answer was cut short")

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
        for choice in chunk["choices"]:
            for delta in choice["delta"].get("tool_calls") or ():
                self._add_call(delta)
        return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])

    def _add_call(self, delta: dict[str, Any]) -> None:
        function = delta["function"]
        if delta["index"] == len(self.calls):
            named = {"name": function["name"], "arguments": ""}
            self.calls.append({"id": delta["id"], "type": "function", "function": named})
        self.calls[delta["index"]]["function"]["arguments"] += function.get("arguments") or ""


def _unanswered(where: str, error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"{where}: nothing listens there; `conductor up` starts a cluster, --address names another one"
    if isinstance(error, ssl.SSLCertVerificationError):
        mend = "SSL_CERT_FILE names the authority that signed its certificate"
        return f"{where}: {error.verify_message}; {mend}"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return f"{where}: no TLS is spoken there; without https:// it is asked without"
    if isinstance(error, http.client.BadStatusLine):  # it hung up, too
        mend = "is it the port of HTTP, not gRPC's, and without TLS? Else https://host:port"
        return f"{where}: no HTTP is spoken there; {mend}"
    return f"{where}: {error}"


def _refusal(address: str, status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")[:200]
    return f"{url(address)} answered {status}: {message}"
