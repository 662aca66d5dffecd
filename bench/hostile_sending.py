"""A client that sends whatever bytes it is given, and reads of the answer no more than for some seconds."""

from __future__ import annotations

import http.client
import time
from typing import Any

import grpc

PATIENCE_S = 20.0
"""For the first byte of an answer."""
READ_S = 4.0
"""Of an answer that streams; the client then goes."""
PART_BYTES = 1 << 20
READY_S = 60.0
READY_BODY = b'{"model":"smollm2","prompt":"a","max_tokens":1}'


class Sender:
    """One connection of HTTP and one of gRPC, made again where the server closed it."""

    def __init__(self, http_port: int, grpc_address: str) -> None:
        self._http_port = http_port
        self._connection: http.client.HTTPConnection | None = None
        unbounded = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self._channel = grpc.insecure_channel(grpc_address, options=unbounded)

    def close(self) -> None:
        self._drop()
        self._channel.close()

    def wait_ready(self) -> None:
        """Return when the conductor serves; raises TimeoutError."""
        end_s = time.monotonic() + READY_S
        while time.monotonic() < end_s:
            if self.send("/v1/completions", READY_BODY, False, False)[0] == "200":
                return
            time.sleep(0.2)
        raise TimeoutError("the conductor does not serve")

    def send(self, path: str, data: bytes, is_message: bool, is_stream: bool) -> tuple[str, int]:
        """Return the answer's status, in a word, and its length as far as it was read."""
        if is_message:
            return self._called(path, data, is_stream)
        try:
            return self._posted(path, data)
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            return type(error).__name__, 0

    def _posted(self, path: str, data: bytes) -> tuple[str, int]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=PATIENCE_S)
        self._connection.request("POST", path, data, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        num_bytes, end_s = 0, time.monotonic() + READ_S
        while part := answer.read1(PART_BYTES):
            num_bytes += len(part)
            if time.monotonic() > end_s:
                self._drop()
                return str(answer.status), num_bytes
        answer.read()  # nothing, and so it is known to be at its end
        return str(answer.status), num_bytes

    def _called(self, path: str, data: bytes, is_stream: bool) -> tuple[str, int]:
        num_bytes = 0
        make: Any = self._channel.stream_stream if is_stream else self._channel.unary_stream
        call = make(path)(iter([data]) if is_stream else data, timeout=READ_S)
        try:
            for part in call:
                num_bytes += len(part)
        except grpc.RpcError as error:
            return str(error.code().name), num_bytes
        return "OK", num_bytes

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
