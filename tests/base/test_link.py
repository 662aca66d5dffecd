"""Messages over a real socket, whole and in order however they arrive, and what ends a link."""

import asyncio
import ssl
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from base.errors import ForeignPeerError, ProtocolError
from base.link import FREE_BYTES, LENGTH_BYTES, MAX_FIRST_BYTES, MAX_MESSAGE_BYTES, TURN_BYTES, dial, listen
from base.tls import Certificates
from conductor.api.server import tcp_listener
from tests.certificates import Authority


class End:
    """Keeps what it is told; `fails_on` is a message that it raises for."""

    def __init__(self, fails_on=None):
        self.link = None
        self.messages, self.closings = [], []
        self.num_writable = 0
        self._fails_on = fails_on

    def opened(self, link):
        self.link = link

    def received(self, message):
        if message == self._fails_on:
            raise ProtocolError("not that")
        self.messages.append(message)

    def writable(self):
        self.num_writable += 1

    def closed(self, error):
        self.closings.append(error)


def framed(message):
    return len(message).to_bytes(LENGTH_BYTES, "little") + message


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


@asynccontextmanager
async def listening(*ends, secured=None):
    """A listener whose connections have `ends`, one after the other; gives its port."""
    left = list(ends)
    with tcp_listener("127.0.0.1", 0, "port") as listener:
        server = await listen(lambda: left.pop(0), listener, secured)
        yield listener.getsockname()[1]
        server.close()


async def test_messages_arrive_whole_and_in_order_in_both_directions():
    here, there = End(), End()
    sizes = (0, 1, 10, 70_000, 3, 5_000_000)
    sent = [bytes([number]) * size for number, size in enumerate(sizes)]
    async with listening(there) as port:
        await dial(here, f"127.0.0.1:{port}")
        await until(lambda: there.link)
        for end, other in ((here, there), (there, here)):
            for message in sent:
                end.link.send(message)
            await until(lambda other=other: len(other.messages) == len(sent))
            assert other.messages == sent
        assert here.num_writable  # 5 MB did not leave at once
        here.link.close()
        await until(lambda: there.closings)
    assert here.closings == there.closings == [None]


@pytest.mark.parametrize("secured", [False, True])
async def test_of_what_came_together_so_much_is_handed_over_in_a_turn_whoever_sent_it(tmp_path, secured):
    turns, handed_over = [0], Counter()

    class Counting(End):
        def received(self, message):
            super().received(message)
            handed_over[turns[0]] += len(message)

    async def count() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    authority = Authority(tmp_path)
    certificates = Certificates(authority.issue("server", ca=False), "tls") if secured else None
    client = ssl.create_default_context(cadata=authority.pem.decode()) if secured else None
    ends = [Counting() for _ in range(3)]
    sent = [bytes([number]) * (1_000 if number % 5 else 12_000) for number in range(60)]
    async with listening(*ends, secured=certificates and certificates.context) as port:
        writers, counting = [], asyncio.create_task(count())
        for _ in ends:
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
            writers.append(writer)
            writer.write(b"".join(map(framed, sent)))
        await until(lambda: all(len(end.messages) == len(sent) for end in ends))
        counting.cancel()
        for writer in writers:
            writer.write(framed(b"more"))
        await until(lambda: all(end.messages[-1] == b"more" for end in ends))
        for writer in writers:
            writer.close()
    assert all(end.messages[:-1] == sent for end in ends)
    # What waited, and what came in the turn after it was let go on.
    assert max(handed_over.values()) <= 2 * TURN_BYTES + len(ends) * FREE_BYTES


async def test_a_message_longer_than_a_turn_has_one_of_its_own():
    here, there = End(), End()
    sent = [b"a" * (2 * TURN_BYTES), b"b" * 100, b"c" * (3 * TURN_BYTES), b"d" * TURN_BYTES]
    async with listening(there) as port:
        await dial(here, f"127.0.0.1:{port}")
        await until(lambda: there.link)
        there.link.send(b"hello")
        await until(lambda: here.messages)
        for message in sent:
            there.link.send(message)
        await until(lambda: len(here.messages) == 1 + len(sent))
        here.link.close()
    assert here.messages[1:] == sent


@pytest.mark.parametrize("step", [1, 3, 5, 100])
async def test_a_message_may_come_in_any_parts(step):
    there = End()
    sent = [b"a", b"", b"bcdefgh", b"x" * 20]
    stream = b"".join(map(framed, sent))
    async with listening(there) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        for at in range(0, len(stream), step):
            writer.write(stream[at : at + step])
            await writer.drain()
            await asyncio.sleep(0)
        await until(lambda: len(there.messages) == len(sent))
        writer.close()
    assert there.messages == sent


@pytest.mark.parametrize(
    ("before", "length"),
    [(b"", MAX_FIRST_BYTES + 1), (b"", 2**32 - 1), (framed(b"hello"), MAX_MESSAGE_BYTES + 1)],
)
async def test_a_message_that_is_too_long_ends_the_link_before_it_came(before, length):
    there = End()
    async with listening(there) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(before + length.to_bytes(LENGTH_BYTES, "little"))
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
    (error,) = there.closings
    assert str(length) in str(error)
    assert there.messages == ([b"hello"] if before else [])


@pytest.mark.parametrize(
    ("greeting", "protocol"),
    [
        (b"\x00\x00\x18\x04\x00\x00\x00\x00\x00\x00\x04\x00\x40\x00\x00", "HTTP/2, as a gRPC port does"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP/1.1"),
        (b"GET / HTTP/1.1\r\n\r\n", "HTTP/1.1"),
        (b"\x15\x03\x03\x00\x02\x02\x46", "TLS"),
    ],
)
async def test_a_peer_of_another_protocol_is_named(greeting, protocol):
    there = End()
    async with listening(there) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(greeting)
        assert await reader.read() == b""
        writer.close()
    (error,) = there.closings
    assert isinstance(error, ForeignPeerError)
    assert protocol in str(error)


async def test_what_an_end_raises_ends_the_link_and_what_came_with_it_is_dropped():
    here, there = End(), End(fails_on=b"bad")
    async with listening(there) as port:
        await dial(here, f"127.0.0.1:{port}")
        await until(lambda: there.link)
        for message in (b"good", b"bad", b"late"):
            here.link.send(message)
        await until(lambda: here.closings)
    assert there.messages == [b"good"]
    assert [str(error) for error in there.closings] == ["not that"]


async def test_a_bug_ends_the_link_and_is_told():
    here, there = End(), End(fails_on=b"bad")
    there.messages = None  # it cannot append
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
    async with listening(there) as port:
        await dial(here, f"127.0.0.1:{port}")
        here.link.send(b"x")
        await until(lambda: here.closings)
    assert [type(error) for error in told] == [type(error) for error in there.closings] == [AttributeError]


async def test_a_bug_in_a_message_that_waited_for_its_turn_ends_the_link_and_is_told():
    class Faulty(End):
        def received(self, message):
            super().received(message)
            assert message != b"bad"

    here, there = End(), Faulty()
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
    async with listening(there) as port:
        await dial(here, f"127.0.0.1:{port}")
        here.link.send(b"hello")
        await until(lambda: there.messages)
        sent = [b"x" * (2 * TURN_BYTES), b"bad", b"late"]
        for message in sent:
            here.link.send(message)
        await until(lambda: here.closings)
    assert there.messages == [b"hello", *sent[:2]]
    assert ([type(error) for error in told], there.closings) == ([AssertionError], [None])


async def test_who_does_not_read_is_cut_off_when_the_link_is_closed():
    there = End()
    async with listening(there) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.pause_reading()
        await until(lambda: there.link)
        num_sent = 0
        while not there.link.is_choked:
            there.link.send(b"x" * 100_000)
            num_sent += 100_000 + LENGTH_BYTES
        there.link.close(TimeoutError("silent"))
        assert [str(error) for error in there.closings] == ["silent"]
        writer.transport.resume_reading()
        assert len(await asyncio.wait_for(reader.read(), 60)) < num_sent
        writer.close()
