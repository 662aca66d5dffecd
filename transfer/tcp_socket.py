"""How our TCP sockets are set up, on both sides."""

from __future__ import annotations

import socket

HEARTBEAT_S = 2
"""Between two keep-alive probes of a silent connection."""
DEAD_AFTER_MS = 8_000
"""Bytes that nobody acknowledges for this long: three heartbeats and one of grace."""


def tune(sock: socket.socket) -> None:
    """Make a socket non-blocking, prompt, and quick to notice that its peer is gone."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, HEARTBEAT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, HEARTBEAT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_MS)
    # One repeat of the first packet: a connection is there within 3 s or fails.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 1)
