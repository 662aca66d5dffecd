"""Where a node's metrics are read: GET /metrics on a port of its own, from threads beside its event loop.

Nobody shows a key here, so what anybody may hold is bounded: `MAX_CONNECTIONS` at once, each a thread, of
which the oldest makes room for a new one, and each ends when it says nothing for `TIMEOUT_S`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from base.metrics import CONTENT_TYPE

MAX_CONNECTIONS = 32
"""A scrape takes some 10 ms, and few look at once."""
TIMEOUT_S = 10.0
"""Limit of each read and each write of a connection."""


class MetricsServer(ThreadingMixIn, TCPServer):
    """Listens, and has a thread for each connection."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, read: Callable[[], bytes], host: str, port: int) -> None:
        """Begin to listen; raises OSError."""
        self.read = read
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._open: dict[socket.socket, None] = {}
        """Oldest first; the thread that accepts adds, each connection's own removes."""
        self._lock = threading.Lock()
        super().__init__((host, port), _Reading)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that leaves is no event, and anybody could fill the log with them."""


class _Reading(BaseHTTPRequestHandler):
    """One connection: one answer, of which HTTP/1.0's end is the connection's."""

    server: MetricsServer
    timeout = TIMEOUT_S

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        body = self.server.read()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve_metrics(read: Callable[[], bytes], host: str, port: int) -> int:
    """Answer GET /metrics with what `read` returns, for the life of the process; return the port.

    Raises OSError if the port is taken; 0 is a free one.
    """
    server = MetricsServer(read, host, port)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_address[1])
