"""`python -m bench.prefix_load`: a cached prefix that comes from host memory while the prompt is computed.

One engine on one GPU (or the CPU: `--model tiny`), and its store in pinned host memory, which holds
the leading `--cached` share of a prompt. In turn, `--repeats` times over, milliseconds of

    load       the prefix alone, from the store into the engine's cache, checksums and all
    compute    the rest alone, after a prefix that is there; `launch_ms` of it are the CPU's
    together   the whole prompt, the engine waiting for each layer's part of the prefix
    in turn    the same with the whole prefix loaded first

`together` should be max(load, compute) + min(load, compute) / layers, and 5 % at most on top.

    python -m bench.prefix_load --tokens 32768 --out bench/results/prefix_load.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from base.block_hash import BlockHash, hash_chain
from base.clock import SystemClock
from base.config import GIB, EngineConfig, TransferConfig
from base.messages import Work
from base.request import RequestId, SamplingParams, StopParams
from bench.about_run import about_run, write_result
from bench.launch_times import LaunchTimes
from bench.shapes import about, write_model
from engine.block_sums import block_sums
from engine.build import Engine, build_engine
from engine.step import SequenceOutput
from kvstore.block_mover import SegmentMover
from kvstore.engine_store import EngineStore
from kvstore.hosting import hosted_store
from kvstore.settings import StoreProcess
from node.kv import node_segment
from node.store import pin_pool
from prefill_node.prefix_loader import loaded_prefix
from prefill_node.role import one_token_sequence
from transfer.agent import TransferAgent
from transfer.owned.segment import Segment

ROOT = BlockHash(bytes(16))
NO_LIMIT = 1e15


@dataclass(slots=True)
class Bench:
    """An engine with a store beside it, and one prompt whose prefix the store has."""

    engine: Engine
    segment: Segment
    beside: EngineStore
    tokens: list[int]
    num_cached: int
    """Blocks."""
    clock: SystemClock

    @property
    def chain(self) -> list[BlockHash]:
        return hash_chain(self.tokens, self.engine.cache.layout.block_size, ROOT)[: self.num_cached]

    async def fill(self) -> None:
        """Have the store save the prefix; what it is does not matter here."""
        pool = self.engine.loop.pool
        block_ids = pool.allocate(self.num_cached)
        for block_id, block_hash in zip(block_ids, self.chain, strict=True):
            self.engine.cache.heads()[block_id].normal_()
            pool.publish(block_id, block_hash)
        self.beside.offer(self.chain, ROOT)
        while self.beside.num_saved < self.num_cached:
            assert not self.beside.num_dropped, "the store did not take the prefix"
            await asyncio.sleep(0.01)
        pool.release(block_ids)

    def forget(self) -> None:
        pool = self.engine.loop.pool
        pool.release(pool.allocate(pool.num_blocks))

    async def load_s(self) -> float:
        """Return how long the prefix takes alone."""
        self.forget()
        pool = self.engine.loop.pool
        began_s = time.perf_counter()
        block_ids = pool.allocate(self.num_cached)
        count = await self.beside.load(self.chain, block_ids, 0)
        taken_s = time.perf_counter() - began_s
        assert count == self.num_cached, f"{count} of {self.num_cached} blocks came"
        pool.release(block_ids)
        return taken_s

    async def prompt_s(self, is_there: bool, parts: tuple[int, ...]) -> float:
        """Return how long the prompt takes.

        Args:
            is_there: The prefix is in the engine's cache.
            parts: In which it comes otherwise, layers of each; empty: before the prompt is computed.
        """
        self.forget()
        pool, block_size = self.engine.loop.pool, self.engine.cache.layout.block_size
        sources = [] if is_there else [self.beside]
        name = RequestId(f"r{time.perf_counter_ns()}")
        sampling, stop = SamplingParams(temperature=0.0), StopParams(max_tokens=1)
        tokens = tuple(self.tokens)
        work = Work(name, tokens, len(tokens), ROOT, sampling, stop, None, 0, 60.0)
        sequence = one_token_sequence(work, self.clock.now_s())
        if is_there:
            sequence.block_table += pool.allocate(self.num_cached)
            sequence.num_computed_tokens = self.num_cached * block_size
        ended = asyncio.Event()

        def listen(output: SequenceOutput) -> None:
            if output.finish_reason is not None:
                ended.set()

        began_s = time.perf_counter()
        async with loaded_prefix(pool, block_size, work, sources, self.clock, parts) as prefix:
            prefix.give_to(sequence, block_size)
            self.engine.loop.add(sequence, listen)
            await ended.wait()
            assert await prefix.is_intact(), "the prefix came damaged"
        taken_s = time.perf_counter() - began_s
        expected = self.num_cached * block_size
        assert is_there or sequence.num_matched_tokens == expected, "the prefix was not loaded"
        self.engine.loop.release(sequence)
        return taken_s


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the medians."""
    clock = SystemClock()
    is_gpu = torch.cuda.is_available()
    config = EngineConfig(
        block_size=options.block_size,
        kv_cache_gib=options.kv_cache_gib,
        chunk_tokens=options.chunk,
        max_batch=8,
        random_weights=True,
    )
    transfer = TransferConfig(transports=("cuda_ipc", "shm", "tcp") if is_gpu else ("shm", "tcp"))
    async with TransferAgent("node", random.getrandbits(60), transfer, clock) as agent:
        engine, segment = node_segment(
            agent, lambda allocate: build_engine(config, str(folder), clock, allocate=allocate)
        )
        layout = engine.cache.layout
        num_cached = int(options.tokens * options.cached) // layout.block_size
        pool_gib = 1.3 * num_cached * layout.block_bytes / GIB
        settings = StoreProcess("node", layout.block_bytes, pool_gib, policy="lru", transfer=transfer)
        async with hosted_store(settings, agent, clock) as hosted:
            if is_gpu:
                await pin_pool(hosted.store, agent, segment)
            sums = partial(block_sums, engine.cache)
            mover = SegmentMover(hosted.cache, segment, layout.block_bytes, sums)
            beside = EngineStore(engine.loop.pool, layout, mover, hosted.store, NO_LIMIT, clock)
            tokens = [random.randrange(engine.vocab_size) for _ in range(options.tokens)]
            bench = Bench(engine, segment, beside, tokens, num_cached, clock)
            tasks = [asyncio.create_task(engine.loop.run()), asyncio.create_task(beside.run())]
            await bench.fill()
            row = await rounds(bench, options.repeats)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    return {**row, "tokens": options.tokens, "cached_tokens": num_cached * layout.block_size}


async def rounds(bench: Bench, repeats: int) -> dict[str, Any]:
    """Return the medians of all ways in turn; the first round warms up."""
    parts = bench.engine.loop.prefix_parts or (1,) * bench.engine.cache.layout.num_layers
    taken: dict[str, list[float]] = {"load": [], "compute": [], "together": [], "in_turn": []}
    launches = LaunchTimes(bench.engine.runner)
    launch_s: list[float] = []
    for _ in range(repeats + 1):
        taken["load"].append(await bench.load_s())
        launched_s = launches.total_s
        taken["compute"].append(await bench.prompt_s(is_there=True, parts=()))
        launch_s.append(launches.total_s - launched_s)
        taken["together"].append(await bench.prompt_s(is_there=False, parts=parts))
        taken["in_turn"].append(await bench.prompt_s(is_there=False, parts=()))
    row = {f"{name}_ms": 1e3 * statistics.median(values[1:]) for name, values in taken.items()}
    less, more = sorted((row["load_ms"], row["compute_ms"]))
    row["num_parts"] = len(parts)
    row["launch_ms"] = 1e3 * statistics.median(launch_s[1:])
    row["ideal_ms"] = more + less / bench.engine.cache.layout.num_layers
    row["together_to_ideal"] = row["together_ms"] / row["ideal_ms"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.prefix_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="8b", help="8b, 0.6b or tiny")
    add("--tokens", type=int, default=32_768)
    add("--cached", type=float, default=0.95)
    add("--chunk", type=int, default=8192)
    add("--block-size", type=int, default=64)
    add("--kv-cache-gib", type=float, default=12.0)
    add("--repeats", type=int, default=7)
    add("--commit", default="")
    add("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        prepared = write_model(options.model, Path(made) / "model")
        row = asyncio.run(measure(options, Path(prepared.path)))
    print(json.dumps(row), flush=True)
    report = {**about_run("torch"), **about(options.commit), **row}
    write_result(options.out, report)


if __name__ == "__main__":
    main()
