"""`python -m bench.preemption`: what a cache that is too small costs, by what becomes of preempted sequences.

Requests arrive at once whose answers do not all fit; the youngest give way, and are recomputed or
moved to host memory and back. Both run on one engine in turn, and again where all fit.

    python -m bench.preemption --model 8b --out bench/results/preemption.json
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from base.clock import SystemClock
from base.config import EngineConfig
from bench.about_run import current_commit, today, write_result
from bench.engine_rank import build_rank
from bench.engine_shapes import SHAPES
from bench.engine_work import Driver, Prompts
from engine.build import Engine, assemble_engine
from engine.loop import EngineLoop
from engine.scheduler import Scheduler
from engine.swap_space import HostBlocks, SwapSpace


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run."""

    seconds: float
    preemptions: int
    swaps: int
    tokens_per_s: float


def with_space(engine: Engine, config: EngineConfig, space: SwapSpace | None) -> Engine:
    """Return the engine with a scheduler of its own over the same runner, cache and pool."""
    scheduler = Scheduler(
        engine.pool,
        config.block_size,
        config.chunk_tokens,
        config.max_batch,
        engine.max_model_len,
        engine.vocab_size,
        swap_space=space,
    )
    loop = EngineLoop(engine.runner, scheduler, engine.pool, SystemClock())
    return replace(engine, loop=loop, scheduler=scheduler)


async def run(engine: Engine, prompts: Prompts, lens: list[tuple[int, int]]) -> Outcome:
    driver = Driver(engine, prompts)
    try:
        seconds = await driver.throughput_s(lens)
    finally:
        await driver.close()
    tokens = sum(output for _, output in lens)
    scheduler = engine.scheduler
    return Outcome(seconds, scheduler.num_preemptions, scheduler.num_swaps, tokens / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=512)
    parser.add_argument("--share", type=float, default=0.75, help="of the requests' KV that the cache holds")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = EngineConfig(options.device, options.dtype, 64, swap_gib=4.0, chunk_tokens=2048, max_batch=64)
    model = build_rank(options.model, None)
    shape = model.shape
    needed_gib = options.requests * (options.prompt + options.answer) * shape.token_bytes / 2**30
    config = replace(config, kv_cache_gib=options.share * needed_gib)
    engine = assemble_engine(config, model, SystemClock())
    block_s = HostBlocks(engine.cache, 16).measure(SystemClock())
    print(
        f"a block of {engine.layout.block_bytes / 2**20:.2f} MiB moves in {1e3 * block_s:.3f} ms", flush=True
    )
    lens = [(options.prompt, options.answer)] * options.requests
    num_slots = (4 * 2**30) // engine.layout.block_bytes
    prompts = Prompts(engine.vocab_size, 0)
    found: dict[str, list[Outcome]] = {"recomputed": [], "moved": [], "all fit": []}
    for _ in range(options.repeats):
        for name, runs in found.items():
            space = SwapSpace(min(num_slots, engine.pool.num_blocks), block_s) if name == "moved" else None
            fitting = lens[: int(len(lens) * options.share)] if name == "all fit" else lens
            runs.append(asyncio.run(run(with_space(engine, config, space), prompts, fitting)))
            last = runs[-1]
            print(
                f"{name:12} {last.seconds:7.3f} s {last.tokens_per_s:9,.0f} tok/s  "
                f"{last.preemptions} preempted, {last.swaps} moved",
                flush=True,
            )
    medians = {name: statistics.median(item.tokens_per_s for item in runs) for name, runs in found.items()}
    print(f"moved against recomputed: {medians['moved'] / medians['recomputed']:.2f}x")
    report = {
        "model": options.model,
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "commit": options.commit or current_commit(),
        "date": today(),
        "block_ms": 1e3 * block_s,
        "tokens_per_s": medians,
        "preemptions": {name: runs[-1].preemptions for name, runs in found.items()},
    }
    write_result(options.out, report)


if __name__ == "__main__":
    main()
