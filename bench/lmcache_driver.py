"""LMCache's CPU backend behind two pipes, so that `bench/kvstore.py` can measure it beside ours.

Run by the Python of an environment that has the `lmcache` wheel, with this file's path: it
imports nothing of ours. Answers each line `BLOCK BATCH` with the seconds of one batch of
puts (allocate, copy in, insert) and of one batch of gets (look up, copy out), in this one
process: the backend serves no other. No checksums are taken.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

POOL_GIB = 1.0


def started_backend() -> Any:
    """Return a backend that holds `POOL_GIB` of host memory."""
    torch = importlib.import_module("torch")
    config = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig.from_defaults(
        chunk_size=256, local_cpu=True, max_local_cpu_size=POOL_GIB, lmcache_instance_id="bench"
    )
    metadata = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata(
        model_name="m",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(32, 2, 256, 8, 128),
    )
    module = importlib.import_module("lmcache.v1.storage_backend.local_cpu_backend")
    return module.LocalCPUBackend(config, metadata, dst_device="cpu")


def main() -> None:
    torch = importlib.import_module("torch")
    kinds = importlib.import_module("lmcache.v1.memory_management").MemoryFormat
    key_of = importlib.import_module("lmcache.utils").CacheEngineKey
    backend = started_backend()
    say({"ready": True})
    for number, line in enumerate(sys.stdin):
        block, batch = map(int, line.split())
        shape = torch.Size([2, 1, 256, block // 1024])
        source = torch.randint(-100, 100, (batch, *shape), dtype=torch.int16).view(torch.bfloat16)
        target = torch.empty_like(source)
        keys = [key_of("m", 1, 0, number * batch + index, torch.bfloat16) for index in range(batch)]
        begun_s = time.perf_counter()
        for key, blocks in zip(keys, source, strict=True):
            held = backend.allocate(shape, torch.bfloat16, kinds.KV_2LTD)
            held.tensor.copy_(blocks)
            backend.submit_put_task(key, held)
            held.ref_count_down()
        middle_s = time.perf_counter()
        for key, blocks in zip(keys, target, strict=True):
            held = backend.get_blocking(key)
            blocks.copy_(held.tensor)
            held.ref_count_down()
        ended_s = time.perf_counter()
        same = torch.equal(source.view(torch.int16), target.view(torch.int16))
        count = batch if same else 0
        say({"put_s": middle_s - begun_s, "get_s": ended_s - middle_s, "put": count, "got": count})
        for key in keys:
            backend.remove(key)


def say(answer: dict[str, Any]) -> None:
    # Its logs go to standard output too: a line of ours begins where a line begins.
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    main()
