"""What a connection sends between its calls, and behind them: it ends in time, and loses nobody's answer."""

import pytest

from bench import virtual_loop
from conductor.api import http_connection
from tests.conductor.api.test_unread_answers import CALL, connected

LENGTH = 40_000
assert LENGTH > http_connection.MAX_HEAD_BYTES
POST = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % LENGTH


async def passed(loop, seconds):
    done = loop.create_future()
    loop.call_later(seconds, done.set_result, None)
    await done


async def answered(loop, connection):
    for _ in range(1_000):
        await passed(loop, 0.0)
    assert connection.cycle.response_complete


@pytest.mark.parametrize(
    ("asked", "sent"),
    [(CALL, b""), (CALL, b"\r\n"), (CALL, b"G"), (CALL, CALL[:-3]), (POST, b""), (POST, b"the rest")],
    ids=["nothing", "an empty line", "a letter", "most of a head", "no body", "a part of a body"],
)
def test_what_is_no_call_does_not_keep_a_connection_open(asked, sent):
    async def main(loop):
        connection, transport = connected(loop)
        transport.close = transport.abort
        connection.data_received(asked)
        await answered(loop, connection)
        if sent:
            connection.data_received(sent)
        await passed(loop, 1.0 + max(connection.timeout_keep_alive, http_connection.HEAD_TIMEOUT_S))
        assert transport.is_aborted

    virtual_loop.run(main)


LONG_CALL = CALL[:-2] + b"A: %s\r\n\r\n" % (4_000 * b"a")


@pytest.mark.parametrize("before", [POST + LENGTH * b"a", 9 * LONG_CALL], ids=["a body", "nine heads"])
def test_the_beginning_of_a_head_behind_long_calls_is_no_long_head(before):
    async def main(loop):
        connection, transport = connected(loop)
        connection.data_received(before + CALL[:5])
        await answered(loop, connection)
        assert not transport.is_aborted
        connection.data_received(CALL[5:])
        await answered(loop, connection)
        assert not transport.is_aborted
        connection.data_received(CALL[:-2])
        for _ in range(9):
            connection.data_received(4_000 * b"a")
        assert transport.is_aborted, "parts that come later count"

    virtual_loop.run(main)
