"""LMCache's backend in host memory behind a pipe, so that `bench/kvstore.py` can measure it beside ours.

Run by the Python of an environment that has the wheel and torch for a CPU, with this file's
path: it imports nothing of ours. Answers each line `BLOCK BATCH` with the seconds to put a
batch of blocks that nobody stored before, copied from memory of the caller's, and to get them
back into it: what its engine does with a backend, less the GPU.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

POOL_BYTES = 2 << 30


class Backend:
    """`LocalCPUBackend` with memory of its own and no engine around it."""

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        utils = importlib.import_module("lmcache.utils")
        config = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig.from_defaults(
            local_cpu=True, max_local_cpu_size=POOL_BYTES / (1 << 30)
        )
        allocators = importlib.import_module("lmcache.v1.memory_allocators.mixed_memory_allocator")
        backends = importlib.import_module("lmcache.v1.storage_backend.local_cpu_backend")
        self._key = utils.CacheEngineKey
        allocator = allocators.MixedMemoryAllocator(POOL_BYTES)
        self._backend = backends.LocalCPUBackend(config, memory_allocator=allocator)
        self._memory: Any = None

    def measure(self, number: int, block: int, batch: int) -> dict[str, float]:
        torch = self._torch
        if self._memory is None:
            self._memory = torch.randint(0, 255, (batch, block), dtype=torch.uint8)
        keys = [self._key("model", 1, 0, number * batch + index, torch.uint8) for index in range(batch)]
        begun_s = time.perf_counter()
        objects = []
        for source in self._memory:
            held = self._backend.allocate(torch.Size([block]), torch.uint8)
            held.tensor.copy_(source)
            objects.append(held)
        self._backend.batched_submit_put_task(keys, objects)
        for held in objects:
            held.ref_count_down()
        put_s = time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        for key, target in zip(keys, self._memory, strict=True):
            found = self._backend.get_blocking(key)
            target.copy_(found.tensor)
            found.ref_count_down()
        get_s = time.perf_counter() - begun_s
        for key in keys:
            self._backend.remove(key)
        return {"put_s": put_s, "get_s": get_s, "put": batch, "got": batch}


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    backend = Backend()
    say({"ready": True})
    for number, line in enumerate(sys.stdin):
        block, batch = map(int, line.split())
        say(backend.measure(number, block, batch))


if __name__ == "__main__":
    main()
