"""Answers that nobody reads, or reads a byte a minute: their connections end, and make room before that."""

import asyncio
import logging
import socket

import pytest
import uvicorn
from starlette.responses import Response
from uvicorn.server import ServerState

from base.arrivals import OpenConnections
from bench import virtual_loop
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


class UnreadTransport(asyncio.Transport):
    """Holds what its peer has not read yet."""

    def __init__(self):
        super().__init__()
        self.unread_bytes = 100_000
        self.is_aborted = False

    def get_write_buffer_size(self):
        return self.unread_bytes

    def pause_reading(self):
        pass

    resume_reading = close = pause_reading

    def write(self, data):
        self.unread_bytes += len(data)

    def is_closing(self):
        return self.is_aborted

    def abort(self):
        self.is_aborted = True


def connected(loop, arrivals=None):
    """Return a connection, and the transport that it has."""
    config = uvicorn.Config(Response(), ws="none", log_config=None)
    config.load()
    connection = http_connection.BoundedConnection(config, ServerState(), {}, loop, arrivals=arrivals)
    transport = UnreadTransport()
    connection.connection_made(transport)
    return connection, transport


def passed(loop, num_periods):
    done = loop.create_future()
    loop.call_later(num_periods * http_connection.READ_TIMEOUT_S, done.set_result, None)
    return done


def test_a_client_that_reads_slowly_is_waited_for_until_it_stops(monkeypatch):
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", 1e6)

    async def main(loop):
        connection, transport = connected(loop)
        connection.pause_writing()
        for _ in range(5):
            transport.unread_bytes -= 1
            await passed(loop, 1)
        connection.resume_writing()
        await passed(loop, 3)
        assert not transport.is_aborted
        connection.pause_writing()
        await passed(loop, 1.1)
        assert transport.is_aborted

    virtual_loop.run(main)


def test_a_client_that_reads_a_byte_a_minute_is_not_waited_for_until_it_has_read_all(monkeypatch):
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", 1e6)

    async def main(loop):
        connection, transport = connected(loop)
        connection.pause_writing()
        for num_periods in range(http_connection.READ_PERIODS + 1):
            assert transport.is_aborted == (num_periods == http_connection.READ_PERIODS)
            transport.unread_bytes -= 1
            await passed(loop, 1)

    virtual_loop.run(main)


CALL = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("said_later", [b"", CALL, 3 * CALL])
def test_who_asks_and_does_not_read_makes_room_until_it_reads(said_later):
    async def main(loop):
        arrivals = OpenConnections(2)
        (slow, unread), (other, served) = (connected(loop, arrivals) for _ in range(2))
        for connection in (slow, other):
            connection.data_received(CALL)
        slow.pause_writing()
        slow.resume_writing()
        _, late = connected(loop, arrivals)
        assert [each.is_aborted for each in (unread, served, late)] == [False, False, True]
        slow.pause_writing()
        slow.data_received(said_later)
        _, late = connected(loop, arrivals)
        assert [each.is_aborted for each in (unread, served, late)] == [True, False, False]
        slow.connection_lost(None)

    virtual_loop.run(main)
