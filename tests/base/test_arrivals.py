"""Connections that ask nothing make room for others, the oldest first, and those at work for nobody."""

import asyncio
import contextlib
import resource
import socket
import ssl
from collections import Counter

import pytest
import uvloop

from base.arrivals import MAX_CONNECTIONS, OpenConnections, TlsListener, num_allowed


class Connection:
    is_aborted = False

    def abort(self):
        self.is_aborted = True


def arrived(arrivals, count):
    connections = [Connection() for _ in range(count)]
    for connection in connections:
        arrivals.came(connection)
    return connections


def test_the_oldest_that_asks_nothing_makes_room():
    arrivals = OpenConnections(3)
    connections = arrived(arrivals, 5)
    assert [connection.is_aborted for connection in connections] == [True, True, False, False, False]
    assert len(arrivals) == 3


def test_who_is_at_work_keeps_its_place_and_gives_it_up_when_answered():
    arrivals = OpenConnections(2)
    first, second = arrived(arrivals, 2)
    arrivals.begun(first)
    (third,) = arrived(arrivals, 1)
    assert (first.is_aborted, second.is_aborted, third.is_aborted) == (False, True, False)
    arrivals.begun(third)
    (fourth,) = arrived(arrivals, 1)
    assert fourth.is_aborted
    arrivals.ended(first)
    arrived(arrivals, 1)
    assert first.is_aborted
    assert not third.is_aborted


def test_who_is_gone_counts_no_more():
    arrivals = OpenConnections(2)
    first, second = arrived(arrivals, 2)
    arrivals.begun(second)
    arrivals.gone(first)
    arrivals.gone(second)
    arrivals.ended(second)
    assert len(arrivals) == 0


@pytest.mark.parametrize(
    ("soft", "expected"), [(600, 300), (1 << 20, MAX_CONNECTIONS), (resource.RLIM_INFINITY, MAX_CONNECTIONS)]
)
def test_a_listener_has_a_part_of_the_descriptors(soft, expected, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda which: (soft, soft))
    assert num_allowed(0.5) == expected


NUM_PEERS = 200
MAX_HANDSHAKES, MAX_ACCEPTED = 10, 100
"""The most that one turn of the event loop may begin."""


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("is_early", [True, False], ids=["who connect and speak", "who all speak later"])
def test_handshakes_of_many_who_come_at_once_are_begun_a_few_in_a_turn(run, is_early):
    async def crowd():
        arrivals, begun, accepted = OpenConnections(NUM_PEERS), Counter(), Counter()
        turn = 0

        def secured():
            begun[turn] += 1
            return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

        def speak():
            for peer in peers:
                peer.sendall(b"\x16\x03\x01")

        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=NUM_PEERS))
            address = listener.getsockname()
            peers = [opened.enter_context(socket.create_connection(address)) for _ in range(NUM_PEERS)]
            if is_early:
                speak()
            listening = TlsListener(asyncio.Protocol, listener, secured, arrivals)
            async with asyncio.timeout(60):
                while begun.total() < NUM_PEERS:
                    before = len(arrivals)
                    await asyncio.sleep(0)
                    turn += 1
                    accepted[turn] = len(arrivals) - before
                    if not is_early and before < NUM_PEERS == len(arrivals):
                        assert not begun
                        speak()
            listening.close()
            await listening.wait_closed()
        assert max(begun.values()) <= MAX_HANDSHAKES
        assert max(accepted.values()) <= MAX_ACCEPTED

    run(crowd())
