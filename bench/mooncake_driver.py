"""Mooncake's transfer engine behind two pipes, so that `bench/transfer.py` can measure it.

Run by the Python of an environment that has the wheel, with this file's path: it imports
nothing of ours. `target NUM_BYTES` prints its address and waits; `source` reads
`ADDRESS POINTER NUM_BYTES` once and then lines of JSON, a block's bytes and where the blocks of
each batch lie, and answers each line with the seconds that each batch took, as JSON.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import sys
import time
from typing import Any


def started_engine() -> Any:
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("mooncake did not start")
    return engine


def registered(engine: Any, num_bytes: int) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, num_bytes)
    memory.write(b"\1" * num_bytes)
    pointer = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if engine.register_memory(pointer, num_bytes):
        raise RuntimeError("mooncake did not register the memory")
    return memory, pointer


def serve_target(num_bytes: int) -> None:
    engine = started_engine()
    memory, pointer = registered(engine, num_bytes)
    say({"address": f"127.0.0.1:{engine.get_rpc_port()}", "pointer": pointer})
    sys.stdin.readline()
    del memory


def serve_source() -> None:
    address, target, size = sys.stdin.readline().split()
    engine = started_engine()
    memory, pointer = registered(engine, int(size))
    say({"ready": True})
    for line in sys.stdin:
        block, places = json.loads(line)
        elapsed_s = []
        for source_offsets, target_offsets in places:
            sources = [pointer + offset for offset in source_offsets]
            targets = [int(target) + offset for offset in target_offsets]
            lengths = [block] * len(sources)
            begun_s = time.perf_counter()
            if len(sources) == 1:
                failed = engine.transfer_sync_write(address, sources[0], targets[0], block)
            else:
                failed = engine.batch_transfer_sync_write(address, sources, targets, lengths)
            elapsed_s.append(time.perf_counter() - begun_s)
            if failed:
                raise RuntimeError(f"mooncake failed: {failed}")
        say({"elapsed_s": elapsed_s})
    del memory


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "target":
        serve_target(int(sys.argv[2]))
    else:
        serve_source()
