"""The store's gRPC port: closed where nothing uses it, and bounded for each peer.

Who may call is swept by `tests/test_outsiders.py`.
"""

import asyncio
import dataclasses
import os
import secrets
from contextlib import asynccontextmanager

import pytest

from base.clock import SystemClock
from base.config import (
    EngineConfig,
    NodeProcess,
    StoreConfig,
    TlsConfig,
    TransferConfig,
)
from base.errors import CapacityError, LeaseExpiredError, ProtocolError
from base.tls import NODE_NAME
from kvstore import service as service_module
from kvstore.context import connected
from kvstore.hosting import hosted_store
from kvstore.service import StoreService
from kvstore.settings import StoreProcess, of_node
from protos import kvstore_pb2 as pb
from tests.certificates import Authority
from tests.kvstore.cluster import BLOCK_BYTES, chain_of, load, patience, save
from tests.manual_clock import ManualClock
from transfer.agent import TransferAgent

POOL_GIB = 8 * BLOCK_BYTES / (1 << 30)


@asynccontextmanager
async def hosted(**settings):
    """A store as a process of its own has it."""
    config = StoreProcess("s", BLOCK_BYTES, POOL_GIB, **settings)
    transfer = TransferConfig(transports=("tcp",))
    clock = SystemClock()
    with patience():
        async with (
            TransferAgent("s", secrets.randbits(63), transfer, clock) as agent,
            hosted_store(config, agent, clock) as store,
        ):
            yield store


def node(**store):
    return NodeProcess("n", ("prefill",), "", "", ("127.0.0.1:1",), EngineConfig(), TransferConfig(), **store)


def test_a_node_listens_only_where_a_directory_tells_others_of_it():
    def is_listening(**store):
        return of_node(node(store=StoreConfig(dram_gib=1.0, **store)), BLOCK_BYTES).is_listening

    assert not is_listening()
    assert not is_listening(peers=("127.0.0.1:2",))
    assert is_listening(redis_url="redis://127.0.0.1")


async def test_a_storage_process_that_only_conductors_know_has_no_port():
    async with hosted(conductor_addresses=("127.0.0.1:1",)) as store:
        assert store.member.address == ""
        assert await save(store.cache, "abc") == 3
    async with hosted() as store:
        assert store.member.address


def test_beyond_loopback_it_takes_tls_or_a_word():
    with pytest.raises(ValueError, match="host: beyond loopback it takes tls"):
        StoreProcess("s", BLOCK_BYTES, POOL_GIB, host="0.0.0.0")
    assert StoreProcess("s", BLOCK_BYTES, POOL_GIB, host="0.0.0.0", insecure=True).is_listening
    with pytest.raises(ValueError, match=r"tls\.ca"):
        StoreProcess("s", BLOCK_BYTES, POOL_GIB, tls=TlsConfig("c", "k"))


async def test_with_tls_a_node_puts_and_gets(tmp_path):
    authority = Authority(tmp_path)
    own, theirs = authority.issue("node", NODE_NAME), authority.issue("two", NODE_NAME)
    async with hosted(tls=own) as store, connected([store.member.address], tls=theirs) as cache:
        assert await save(cache, "abc") == 3
        assert await load(cache, "abc") == 3


async def test_a_store_is_dialled_with_the_certificate_that_its_files_have_by_then(tmp_path):
    """One that was renewed would be shown by nobody who has dialled before."""
    authority = Authority(tmp_path)
    theirs = Authority(tmp_path / "other", "other").issue("two", NODE_NAME)
    tls = dataclasses.replace(theirs, ca=authority.path)
    async with (
        hosted(tls=authority.issue("node", NODE_NAME)) as store,
        connected([store.member.address], tls=tls) as cache,
    ):
        assert await save(store.cache, "abc") == 3
        assert await load(cache, "abc") == 0
        renewed = authority.issue("renewed", NODE_NAME)
        for new, old in ((renewed.key, theirs.key), (renewed.cert, theirs.cert)):
            os.replace(new, old)
        async with asyncio.timeout(60):
            while await load(cache, "abc") != 3:  # whoever failed rests for a second
                await asyncio.sleep(0)


class Caller:
    """The context of a call from a host."""

    def __init__(self, host):
        self._host = host

    def peer(self):
        return f"ipv4:{self._host}:{secrets.randbelow(60000)}"


async def test_a_peer_holds_so_much_ends_only_its_own_and_all_of_it_runs_out(monkeypatch):
    monkeypatch.setattr(service_module, "MIN_BLOCKS", 1)
    one, two = Caller("10.0.0.1"), Caller("10.0.0.2")

    def asked(path):
        return pb.ReserveRequest(hashes=b"".join(chain_of(path)))

    async with hosted() as hosting:
        clock = ManualClock()
        service = StoreService(hosting.store, clock, lambda: hosting.member)
        mine = await service.Reserve(asked("abcdef"), one)
        assert list(mine.missing) == [0, 1, 2, 3]  # half of eight
        with pytest.raises(CapacityError):
            await service.Reserve(asked("xyz"), one)
        assert list((await service.Reserve(asked("xyz"), two)).missing) == [0, 1, 2]
        with pytest.raises(LeaseExpiredError):
            await service.Commit(pb.CommitRequest(ticket=mine.ticket, checksums=[1] * 4), two)
        await service.Abort(pb.Ticket(ticket=mine.ticket), two)
        assert hosting.store.pool.accounts().in_transfer == 7
        clock.advance(3600.0)
        assert list((await service.Reserve(asked("q"), one)).missing) == [0]


async def test_a_chain_with_a_block_twice_is_refused_and_nothing_is_reserved():
    async with hosted() as hosting:
        service = StoreService(hosting.store, ManualClock(), lambda: hosting.member)
        with pytest.raises(ProtocolError, match="twice"):
            await service.Reserve(pb.ReserveRequest(hashes=b"".join(chain_of("a") * 2)), Caller("10.0.0.1"))
        assert hosting.store.pool.accounts().in_transfer == 0
        hosting.store.check()


async def test_a_peer_has_so_many_leases(monkeypatch):
    monkeypatch.setattr(service_module, "MAX_TICKETS", 3)
    caller = Caller("10.0.0.1")
    async with hosted() as hosting:
        assert await save(hosting.cache, "ab") == 2
        service = StoreService(hosting.store, ManualClock(), lambda: hosting.member)
        request = pb.LeaseRequest(hashes=b"".join(chain_of("ab")))
        tickets = [(await service.Lease(request, caller)).ticket for _ in range(3)]
        with pytest.raises(CapacityError):
            await service.Lease(request, caller)
        await service.Release(pb.Ticket(ticket=tickets[0]), Caller("10.0.0.2"))
        with pytest.raises(CapacityError):
            await service.Lease(request, caller)
        await service.Release(pb.Ticket(ticket=tickets[0]), caller)
        assert (await service.Lease(request, caller)).num_blocks == 2


async def test_leases_that_come_together_are_no_more_than_a_peer_may_have(monkeypatch):
    monkeypatch.setattr(service_module, "MAX_TICKETS", 1)
    caller = Caller("10.0.0.1")
    async with hosted() as hosting:
        assert await save(hosting.cache, "ab") == 2
        service = StoreService(hosting.store, ManualClock(), lambda: hosting.member)
        request = pb.LeaseRequest(hashes=b"".join(chain_of("ab")))
        asking = (service.Lease(request, caller) for _ in range(2))
        one, two = await asyncio.gather(*asking, return_exceptions=True)
        assert (one.num_blocks, type(two)) == (2, CapacityError)
        await service.Release(pb.Ticket(ticket=one.ticket), caller)
        assert hosting.store.pool.accounts().held == 0


async def test_a_ticket_of_before_a_restart_ends_nothing_after_it():
    """A client's call that fails as its store restarts is followed by an end of its put, or of its lease."""
    caller = Caller("10.0.0.1")

    def asked(path):
        return b"".join(chain_of(path))

    async with hosted() as hosting:
        assert await save(hosting.cache, "ab") == 2
        service = StoreService(hosting.store, ManualClock(), lambda: hosting.member)
        put = await service.Reserve(pb.ReserveRequest(hashes=asked("xyz")), caller)
        lease = await service.Lease(pb.LeaseRequest(hashes=asked("ab")), caller)
    async with hosted() as hosting:
        assert await save(hosting.cache, "ab") == 2
        service = StoreService(hosting.store, ManualClock(), lambda: hosting.member)
        await service.Reserve(pb.ReserveRequest(hashes=asked("xyz")), caller)
        await service.Lease(pb.LeaseRequest(hashes=asked("ab")), caller)
        await service.Abort(pb.Ticket(ticket=put.ticket), caller)
        await service.Release(pb.Ticket(ticket=lease.ticket), caller)
        books = hosting.store.pool.accounts()
        assert (books.in_transfer, books.held) == (3, 2)
