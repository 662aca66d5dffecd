"""Answers that nobody reads, too short to fill a buffer: their connections end too."""

import asyncio
import logging
import socket

import pytest

from conductor.api import http_connection, server
from tests.conductor.fakes import serving


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_short_answer_that_is_not_read_ends_its_connection(model, monkeypatch, caplog, version):
    """It fills no buffer, and a transport that closes waits for as long as it takes."""
    caplog.set_level(logging.DEBUG, http_connection.__name__)
    monkeypatch.setattr(http_connection, "READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr("conductor.api.server.KEEP_ALIVE_S", 0)
    listen = server.tcp_listener

    def short_of_room(*where):
        listener = listen(*where)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return listener

    monkeypatch.setattr(server, "tcp_listener", short_of_room)
    async with serving(model, lambda request: []) as api:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.connect(("127.0.0.1", api.ports.http_port))
            client.sendall(f"GET /openapi.json HTTP/{version}\r\nHost: x\r\n\r\n".encode())
            async with asyncio.timeout(60):
                while "connection closed" not in caplog.text:
                    await asyncio.sleep(0)
            assert "its client does not read" in caplog.text
