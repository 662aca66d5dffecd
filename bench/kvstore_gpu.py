"""What the block cache moves between a GPU's paged cache and the host's pool. Needs a GPU.

    python -m bench.kvstore_gpu [--rounds 15] [--json OUT]

One process with what a node has: a paged cache on the GPU, a store in host memory, and
`BlockCache.save` and `load` between them by the transfer layer's cuda_ipc transport. Against
each, in the same rounds, one bare copy of as many bytes between the GPU and pinned memory.
Loads take the checksum of every block on the GPU; the bare copies do not. Bytes are compared
before anything is timed. How long it takes to pin the pool is said too: a node does it
before it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from base.block_hash import BlockHash
from base.clock import SystemClock
from base.config import GIB, TransferConfig
from base.kv_layout import head_layout
from bench.about_run import about_run, write_result
from bench.engine_work import randomize
from engine.block_sums import block_sums
from engine.paged_cache import PagedCache
from kvstore.hosting import HostedStore, hosted_store
from kvstore.settings import StoreProcess
from node.store import pin_pool
from transfer.agent import TransferAgent
from transfer.gpu.transport import described
from transfer.owned.segment import Segment

LAYOUT = head_layout(
    num_layers=32, block_size=16, num_heads=8, head_dim=128, dtype="bfloat16"
)  # 2 MiB: the shape of Llama-3.1-8B
NUM_BLOCKS = 256
"""In one save or load: 512 MiB, a prompt of 4,096 tokens."""
POOL_GIB = 8.0


class Beside:
    """A GPU's cache, the store beside it, and a pinned buffer to compare with."""

    def __init__(self, cache: PagedCache, segment: Segment, hosted: HostedStore) -> None:
        self._cache = cache
        self._segment = segment
        self._hosted = hosted
        self._ids = list(range(NUM_BLOCKS))
        self._pinned = torch.empty(cache.tensor[:NUM_BLOCKS].shape, dtype=cache.tensor.dtype, pin_memory=True)

    @property
    def offsets(self) -> list[int]:
        return [block_id * LAYOUT.block_bytes for block_id in self._ids]

    async def sums(self, offsets: Sequence[int]) -> list[int]:
        return await block_sums(self._cache, [offset // LAYOUT.block_bytes for offset in offsets])

    async def save(self, chain: Sequence[BlockHash], sums: Sequence[int]) -> float:
        began_at_s = time.perf_counter()
        stored = await self._hosted.cache.save(chain, self._segment, self.offsets, sums)
        assert stored == NUM_BLOCKS, f"{stored} of {NUM_BLOCKS} blocks saved"
        return time.perf_counter() - began_at_s

    async def load(self, chain: Sequence[BlockHash]) -> float:
        began_at_s = time.perf_counter()
        loaded = await self._hosted.cache.load(chain, self._segment, self.offsets, sums=self.sums)
        assert loaded == NUM_BLOCKS, f"{loaded} of {NUM_BLOCKS} blocks loaded"
        return time.perf_counter() - began_at_s

    def copy(self, to_host: bool) -> float:
        blocks = self._cache.tensor[:NUM_BLOCKS]
        began_at_s = time.perf_counter()
        if to_host:
            self._pinned.copy_(blocks, non_blocking=True)
        else:
            blocks.copy_(self._pinned, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began_at_s

    async def check(self, chain: Sequence[BlockHash]) -> None:
        """Assert that what was saved comes back, and what was damaged does not."""
        before = self._cache.tensor[:NUM_BLOCKS].clone()
        await self.save(chain, await self.sums(self.offsets))
        self._cache.tensor.zero_()
        torch.cuda.synchronize()
        await self.load(chain)
        assert torch.equal(self._cache.tensor[:NUM_BLOCKS], before), "other bytes came back"
        store = self._hosted.store
        store.segment.memory[store.pool.record(chain[3]).block_id * LAYOUT.block_bytes] ^= 1
        loaded = await self._hosted.cache.load(chain, self._segment, self.offsets, sums=self.sums)
        assert (loaded, store.num_damaged) == (3, 1), "a damaged block was not found out"


def fresh_chain() -> list[BlockHash]:
    return [BlockHash(random.randbytes(16)) for _ in range(NUM_BLOCKS)]


async def measure(rounds: int) -> dict[str, object]:
    """Return GB/s of both ways, bare and by the store: medians over the rounds."""
    cache = PagedCache(LAYOUT, NUM_BLOCKS, torch.device("cuda", 0))
    randomize(cache)
    torch.cuda.synchronize()
    config = TransferConfig(transports=("cuda_ipc", "shm", "tcp"))
    settings = StoreProcess("node", LAYOUT.block_bytes, POOL_GIB, policy="lru", transfer=config)
    clock = SystemClock()
    times: dict[str, list[float]] = {"save": [], "to host": [], "load": [], "to GPU": []}
    async with (
        TransferAgent("node", random.getrandbits(60), config, clock) as agent,
        hosted_store(settings, agent, clock) as hosted,
    ):
        segment = agent.register_device(described(cache.tensor))
        began_at_s = time.perf_counter()
        await pin_pool(hosted.store, agent, segment)
        pinned_s = time.perf_counter() - began_at_s
        beside = Beside(cache, segment, hosted)
        await beside.check(fresh_chain())
        for _ in range(rounds + 2):
            chain, sums = fresh_chain(), await beside.sums(beside.offsets)
            times["save"].append(await beside.save(chain, sums))
            times["to host"].append(beside.copy(to_host=True))
            times["load"].append(await beside.load(chain))
            times["to GPU"].append(beside.copy(to_host=False))
    total_gb = NUM_BLOCKS * LAYOUT.block_bytes / 1e9
    rates = {name: total_gb / statistics.median(taken[2:]) for name, taken in times.items()}
    return {
        "gpu": torch.cuda.get_device_name(0),
        "rounds": rounds,
        "gb_per_s": rates,
        "save_ratio": rates["save"] / rates["to host"],
        "load_ratio": rates["load"] / rates["to GPU"],
        "pinning_s_per_gib": pinned_s / (settings.num_blocks * LAYOUT.block_bytes / GIB),
    }


def main() -> None:
    """Print the figures; with --json also keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this process sees no GPU")
    result = {"run": about_run("torch", "triton"), **asyncio.run(measure(options.rounds))}
    print(json.dumps(result, indent=1))
    write_result(options.json, result)


if __name__ == "__main__":
    main()
