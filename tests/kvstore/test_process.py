"""The storage process: how it starts, serves, survives and ends."""

import asyncio
import json
import os
import signal
import sys
import urllib.request
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.access import RemoteAccess
from kvstore.context import connected
from tests.kvstore.cluster import BLOCK_BYTES, chain_of, load, patience, save

ROOT = Path(__file__).parent.parent.parent


STORE = ("-m", "kvstore")
WITH_A_DISK_THAT_HANGS = """
import sys, threading
from kvstore import disk, hosting
from kvstore.__main__ import main
disk.DirectFile.write = lambda *_: threading.Event().wait()
hosting.PERSIST_S = 0.1
sys.exit(main())
"""


class Process:
    """One `python -m kvstore`."""

    def __init__(self, child):
        self.child = child
        self.address = ""
        self.metrics_port = 0

    async def ended(self):
        async with asyncio.timeout(60):
            return await self.child.wait()


async def start(folder, program=STORE, **settings):
    config = {"node_id": "s", "block_bytes": BLOCK_BYTES, "pool_gib": 8 * BLOCK_BYTES / (1 << 30), **settings}
    path = folder / "store.json"
    path.write_text(json.dumps(config))
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, *program, "--config", str(path)),
        cwd=ROOT,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    )
    return Process(child)


@asynccontextmanager
async def running(folder, program=STORE, **settings):
    process = await start(folder, program, **settings)
    try:
        async with asyncio.timeout(60):
            line = await process.child.stdout.readline()
        assert json.loads(line)["event"] == "ready", await process.child.stderr.read()
        process.address = json.loads(line)["address"]
        process.metrics_port = json.loads(line)["metrics_port"]
        with patience():
            yield process
    finally:
        if process.child.returncode is None:
            process.child.kill()
        await process.child.wait()


async def scraped(process):
    def read():
        with urllib.request.urlopen(f"http://127.0.0.1:{process.metrics_port}/metrics", timeout=60) as answer:
            return answer.read().decode()

    return await asyncio.to_thread(read)


async def test_blocks_on_disk_outlive_a_killed_process(tmp_path):
    settings = {
        "disk": {"folder": str(tmp_path / "disk"), "gib": 0.01},
        "high_watermark": 0.5,
        "low_watermark": 0.1,
    }
    async with running(tmp_path, **settings) as process, connected([process.address]) as cache:
        assert await save(cache, "abcdef") == 6
        access = RemoteAccess(process.address)
        async with asyncio.timeout(60):
            while (await access.match(chain_of("abcdef"))).num_in_memory == 6:
                pass  # each look is a round trip, and the process is at work meanwhile
        await access.close()
        assert await load(cache, "abcdef") == 6  # waits for what is on its way to disk
        os.kill(process.child.pid, signal.SIGKILL)
        await process.ended()
        assert await load(cache, "abcdef") == 0
    async with running(tmp_path, **settings) as process, connected([process.address]) as cache:
        assert await cache.match(chain_of("abcdef")) == 6
        assert await load(cache, "abcdef") == 6


async def test_memory_goes_to_disk_when_a_process_is_told_to_end(tmp_path):
    settings = {"disk": {"folder": str(tmp_path / "disk"), "gib": 0.01}}
    async with running(tmp_path, **settings) as process, connected([process.address]) as cache:
        assert await save(cache, "abcde") == 5
        process.child.send_signal(signal.SIGTERM)
        assert await process.ended() == 0
    async with running(tmp_path, **settings) as process, connected([process.address]) as cache:
        assert await load(cache, "abcde") == 5


async def test_its_accounts_can_be_scraped(tmp_path):
    async with running(tmp_path) as process, connected([process.address]) as cache:
        assert await save(cache, "abc") == 3
        async with asyncio.timeout(60):
            while 'kvstore_tier_blocks{place="cached",tier="host"} 3.0' not in await scraped(process):
                pass  # each look is a round trip
        assert 'kvstore_unaccounted_blocks{tier="host"} 0.0' in await scraped(process)


@pytest.mark.parametrize("kill_after", [0, 1, 5])
async def test_killing_a_store_within_puts_and_gets_raises_nothing_and_mixes_up_no_byte(tmp_path, kill_after):
    async with running(tmp_path) as process, connected([process.address]) as cache:
        assert await save(cache, "abc") == 3
        done = asyncio.Semaphore(0)

        async def work(number):
            while process.child.returncode is None:
                await save(cache, f"{number}bcd")
                done.release()
                await load(cache, f"{number}bcd")
                done.release()

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(work(number))
            await asyncio.sleep(0)
            for _ in range(kill_after):
                await done.acquire()
            process.child.kill()
            await process.ended()
        assert await load(cache, "abc") == 0


async def test_stores_that_know_each_others_address_share_their_blocks(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with running(tmp_path / "a") as one, running(tmp_path / "b", peers=[one.address]) as two:
        async with connected([one.address]) as cache:
            assert await save(cache, "abc") == 3
        async with connected([one.address, two.address]) as cache:
            assert await load(cache, "abc") == 3


@pytest.mark.parametrize("how", ["stdin", "sigterm"])
async def test_it_ends_when_told_to(tmp_path, how):
    async with running(tmp_path) as process:
        if how == "stdin":
            process.child.stdin.close()
        else:
            process.child.send_signal(signal.SIGTERM)
        assert await process.ended() == 0


async def test_a_wrong_configuration_ends_it_with_the_key_named(tmp_path):
    process = await start(tmp_path, policy="best")
    assert await process.ended() == 2
    assert b"policy: one of lru" in await process.child.stderr.read()


async def test_a_folder_in_use_ends_it_with_the_key_named(tmp_path):
    settings = {"disk": {"folder": str(tmp_path / "disk"), "gib": 0.01}}
    async with running(tmp_path, **settings):
        second = await start(tmp_path, **settings)
        assert await second.ended() == 2
        assert b"disk.folder" in await second.child.stderr.read()


async def test_a_disk_that_hangs_does_not_keep_a_process_that_is_to_end(tmp_path):
    disk = {"folder": str(tmp_path / "disk"), "gib": 0.01}
    async with (
        running(tmp_path, ("-c", WITH_A_DISK_THAT_HANGS), disk=disk) as process,
        connected([process.address]) as cache,
    ):
        assert await save(cache, "abc") == 3
        process.child.send_signal(signal.SIGTERM)
        assert await process.ended() == 1
        assert "the disk hangs" in (await process.child.stderr.read()).decode()
