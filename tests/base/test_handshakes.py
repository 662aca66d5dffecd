"""TLS handshakes: what thousands say in them is read a few in a turn, and all of them end somewhere."""

import asyncio
import contextlib
import gc
import random
import socket
import ssl
import struct
import weakref
from collections import Counter
from pathlib import Path

import pytest
import uvloop

from base.arrivals import HANDSHAKE_UNITS, HELLO_BYTES, OpenConnections, TlsListener
from base.tls import Certificates, dialling_context
from base.turns import TURN_UNITS
from tests.certificates import Authority

LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
NUM_PEERS, NUM_TALKS = 100, 20
REQUEST = bytes(range(256)) * 1024


class Said(asyncio.Protocol):
    """A connection that keeps what was said, and answers when all of `REQUEST` is there."""

    def __init__(self):
        self.said = bytearray()
        self.is_lost = False

    def connection_made(self, transport):
        self._transport = transport

    def data_received(self, data):
        self.said += data
        if len(self.said) == len(REQUEST):
            self._transport.write(b"done")

    def connection_lost(self, exc):
        self.is_lost = True


class Listening:
    """A listener with TLS, the connections that it made, and how often handshakes went on in each turn."""

    def __init__(self, authority, is_mutual=False, limit=NUM_PEERS, make=Said):
        tls = authority.issue("server", ca=is_mutual)
        self.context = Certificates(tls, "tls").context()
        self.context.sslobject_class = self._counted()
        self.arrivals = OpenConnections(limit)
        self.made = []
        self._make_one = make
        self.kept = weakref.WeakSet()
        """What OpenSSL keeps of handshakes and connections."""
        self.turn, self.went_on = 0, Counter()

    def _counted(self):
        listening = self

        class Counted(ssl.SSLObject):
            def do_handshake(self):
                listening.kept.add(self)
                listening.went_on[listening.turn] += 1
                super().do_handshake()

        return Counted

    def _make(self):
        self.made.append(self._make_one())
        return self.made[-1]

    async def __aenter__(self):
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=NUM_PEERS)
        self.address = self._socket.getsockname()
        self._listener = TlsListener(self._make, self._socket, lambda: self.context, self.arrivals)
        return self

    async def __aexit__(self, *error):
        self._listener.close()
        await self._listener.wait_closed()

    async def turns_until(self, condition):
        """Count turns of the event loop until something is."""
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0)
                self.turn += 1


def hello(authority):
    """Return what a client says first."""
    outgoing = ssl.MemoryBIO()
    client = dialling_context(authority.issue("client"), "tls")().wrap_bio(
        ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1"
    )
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


@LOOPS
@pytest.mark.parametrize("num_first", [1, 100])
def test_what_many_go_on_with_at_once_is_read_from_a_few_in_a_turn(run, num_first, tmp_path):
    authority = Authority(tmp_path)
    said = hello(authority)

    async def crowd():
        async with Listening(authority) as listening:
            with contextlib.ExitStack() as opened:
                peers = [
                    opened.enter_context(socket.create_connection(listening.address))
                    for _ in range(NUM_PEERS)
                ]
                for peer in peers:
                    peer.sendall(said[:num_first])
                # each is asked twice: before there is anything, and with what there is
                await listening.turns_until(lambda: listening.went_on.total() == 2 * NUM_PEERS)
                listening.went_on.clear()
                for peer in peers:
                    peer.sendall(said[num_first:])
                await listening.turns_until(lambda: listening.went_on.total() == NUM_PEERS)
        assert max(listening.went_on.values()) <= TURN_UNITS // HANDSHAKE_UNITS
        assert not listening.arrivals

    run(crowd())


@LOOPS
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("is_mutual", [False, True])
def test_all_that_is_said_behind_a_handshake_arrives(run, version, is_mutual, tmp_path):
    authority = Authority(tmp_path)
    own = authority.issue("client")
    with open(own.cert, "a") as chain:  # longer than what is read at once
        for number in range(20):
            with open(authority.issue(f"other{number}").cert) as other:
                chain.write(other.read())

    async def crowd():
        async with Listening(authority, is_mutual) as listening:
            context = dialling_context(own, "tls")()
            context.maximum_version = version
            talks = [asyncio.create_task(talk(listening.address, context)) for _ in range(NUM_TALKS)]
            assert await asyncio.gather(*talks) == [b"done"] * NUM_TALKS
            await listening.turns_until(lambda: all(each.is_lost for each in listening.made))
        assert [bytes(each.said) for each in listening.made] == [REQUEST] * NUM_TALKS

    async def talk(address, context):
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(*address, ssl=context)
            writer.write(REQUEST)
            answer = await reader.readexactly(4)
            writer.close()
            return answer

    assert Path(own.cert).stat().st_size > 2 * HELLO_BYTES
    run(crowd())


@LOOPS
@pytest.mark.parametrize("seed", range(10))
def test_who_leaves_anywhere_in_a_handshake_leaves_no_place_taken(run, seed, tmp_path):
    authority = Authority(tmp_path)
    said = hello(authority)
    rng = random.Random(seed)

    def leave(peer):
        if rng.random() < 0.5:  # it is reset
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()

    async def crowd():
        async with Listening(authority) as listening:
            peers = []
            for _ in range(NUM_PEERS):
                peer = socket.create_connection(listening.address)
                peer.sendall(said[: rng.choice([0, 1, 100, len(said)])])
                peers.append(peer)
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                if rng.random() < 0.5:
                    leave(peers.pop(rng.randrange(len(peers))))
            for peer in peers:
                leave(peer)
            await listening.turns_until(lambda: len(listening.arrivals) == 0)
        assert all(each.is_lost for each in listening.made)

    run(crowd())


@LOOPS
def test_nothing_is_kept_of_a_handshake_that_made_room_as_it_began(run, tmp_path):
    authority = Authority(tmp_path)
    said = hello(authority)

    async def crowd():
        async with Listening(authority, limit=1) as listening:
            with contextlib.ExitStack() as opened:
                for number in range(NUM_PEERS):
                    peer = opened.enter_context(socket.create_connection(listening.address))
                    peer.sendall(said)
                    for _ in range(number % 8):
                        await asyncio.sleep(0)
                await listening.turns_until(lambda: listening.went_on)
            await listening.turns_until(lambda: not listening.arrivals)
            for _ in range(NUM_PEERS):
                await asyncio.sleep(0)
            gc.collect()
            assert not listening.kept

    run(crowd())


class Refuses(Said):
    """A connection that fails at what is said."""

    def data_received(self, data):
        super().data_received(data)
        raise ValueError("a bug")


@LOOPS
def test_who_fails_at_what_is_said_with_the_end_of_a_handshake_is_closed(run, tmp_path):
    authority = Authority(tmp_path)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = dialling_context(authority.issue("client"), "tls")()
    client = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")

    def goes_on(peer):
        with contextlib.suppress(BlockingIOError):
            incoming.write(peer.recv(1 << 16))
        try:
            client.do_handshake()
        except ssl.SSLWantReadError:
            has_ended = False
        else:
            has_ended = True
            client.write(b"early")
        peer.sendall(outgoing.read())
        return has_ended

    async def talk():
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        async with Listening(authority, make=Refuses) as listening:
            with socket.create_connection(listening.address) as peer:
                peer.setblocking(False)
                await listening.turns_until(lambda: goes_on(peer))
                await listening.turns_until(lambda: listening.made and listening.made[0].said == b"early")
                await listening.turns_until(lambda: listening.made[0].is_lost)
                assert peer.recv(1 << 16)  # tickets
                assert not peer.recv(1)

    run(talk())
