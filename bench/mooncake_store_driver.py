"""Mooncake's store behind two pipes, so that `bench/kvstore.py` can measure it beside ours.

Run by the Python of an environment that has the wheel, with this file's path: it imports
nothing of ours. `master` is started by the bench from the same wheel. `storage MASTER BYTES`
offers memory and waits; `client MASTER BYTES` then answers each line `BLOCK BATCH` with the
seconds of one batch_put_from and of one batch_get_into of blocks nobody stored before.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import sys
import time
from typing import Any


def started_store(master: str, offered: int, buffer: int, port: int) -> Any:
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    failed = store.setup(f"127.0.0.1:{port}", "P2PHANDSHAKE", offered, buffer, "tcp", "", master)
    if failed:
        raise RuntimeError(f"mooncake's store did not start: {failed}")
    return store


def offer(master: str, num_bytes: int) -> None:
    store = started_store(master, num_bytes, 16 << 20, int(sys.argv[4]))
    say({"ready": True})
    sys.stdin.readline()
    store.close()


def measure(master: str, num_bytes: int) -> None:
    store = started_store(master, 0, 256 << 20, int(sys.argv[4]))
    memory = mmap.mmap(-1, num_bytes)
    memory.write(os.urandom(1 << 20) * (num_bytes >> 20))
    pointer = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if store.register_buffer(pointer, num_bytes):
        raise RuntimeError("mooncake did not register the memory")
    say({"ready": True})
    for number, line in enumerate(sys.stdin):
        block, batch = map(int, line.split())
        keys = [f"{os.getpid()}-{number}-{index}" for index in range(batch)]
        pointers = [pointer + index * block for index in range(batch)]
        sizes = [block] * batch
        put_s, put = timed(store.batch_put_from, keys, pointers, sizes)
        get_s, got = timed(store.batch_get_into, keys, pointers, sizes)
        say(
            {
                "put_s": put_s,
                "get_s": get_s,
                "put": sum(not bad for bad in put),
                "got": sum(n == block for n in got),
            }
        )
        store.remove_all()


def timed(call: Any, *arguments: Any) -> tuple[float, Any]:
    begun_s = time.perf_counter()
    result = call(*arguments)
    return time.perf_counter() - begun_s, result


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    (offer if sys.argv[1] == "storage" else measure)(sys.argv[2], int(sys.argv[3]))
