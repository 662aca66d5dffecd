"""A program that writes blocks until it is killed, again and again, on the same folder.

    python -m tests.kvstore.disk_writer FOLDER KILLS SEED

Each round a fork opens the slots, reads every block back, says how many were right, wrong
and damaged, and writes at random until SIGKILL. A block's bytes follow from its hash.
"""

import asyncio
import mmap
import os
import random
import select
import signal
import sys
from pathlib import Path

from base.block_hash import BlockHash
from base.checksum import checksum
from base.clock import SystemClock
from kvstore.disk import opened

BLOCK_BYTES = 64 << 10
NUM_SLOTS = 64
NUM_NAMES = 200


def name_of(number):
    return BlockHash(number.to_bytes(16, "little"))


def payload_of(block_hash):
    return random.Random(bytes(block_hash)).randbytes(BLOCK_BYTES)


def page_aligned(num_bytes):
    return memoryview(mmap.mmap(-1, num_bytes))


async def read_back(tier):
    """Return (right, wrong, missed)."""
    counts = [0, 0, 0]
    into = page_aligned(BLOCK_BYTES)
    for block_hash in tier.hashes:
        if await tier.read(block_hash, into) is None:
            counts[2] += 1
        else:
            counts[bytes(into) != payload_of(block_hash)] += 1
    tier.check()
    return counts


async def write_for_ever(folder, seed, report):
    tier = opened(folder, BLOCK_BYTES, NUM_SLOTS, SystemClock())
    await tier.recover()
    print(*await read_back(tier), file=report, flush=True)
    rng = random.Random(seed)

    async def writer():
        buffer = page_aligned(BLOCK_BYTES)
        while True:
            block_hash = name_of(rng.randrange(NUM_NAMES))
            buffer[:] = payload_of(block_hash)
            await tier.write(block_hash, buffer, checksum(buffer))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(writer())


def main():
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    for kill in range(kills):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            with open(writer, "w") as report:
                asyncio.run(write_for_ever(folder, seed * 1_000 + kill, report))
        os.close(writer)
        with open(reader) as report:
            print(report.readline().strip(), flush=True)
            select.select([report], [], [], rng.random() * 0.03)  # it stays silent: this is a wait
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
