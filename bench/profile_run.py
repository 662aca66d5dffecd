"""Measuring a profile: prefill, decode and steps that have both, through the whole engine of a node.

Prefill is timed on a grid of new tokens and prefix, decode on a grid of batch and context, each varied by
itself, and steps that have both on one of chunk, prefix and batch. The profile holds the fitted coefficients,
the points, and the error at each point of a fit to the others. What one device does not show, the rate of its
links, the size of the host's cache and what a request takes outside of the engine, is given on the command
line.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version

import torch

from base.clock import SystemClock
from base.config import EngineConfig
from bench.about_run import current_commit, processor_name, today
from bench.engine_rank import build_rank
from bench.engine_work import Driver, Prompts
from bench.profile_fit import Measured, MeasuredStep, fitted, with_steps
from conductor.placing.profile import Evidence, Profile
from engine.build import Engine, assemble_engine, build_engine
from engine.cuda_graph import MIXED_TOKENS
from engine.long_chunks import MIN_TOKENS
from engine.model_store import prepare

MIN_LONG_ROWS = MIN_TOKENS // 2
"""Tokens from which a chunk after a prefix may be computed as a whole prompt is; twice as many without one.

Up to some thousand after a short one are captured (`engine/cuda_graph.py`), and attended as short chunks."""

COPY_BYTES = 1 << 28
"""Copied from pinned host memory to time the link."""


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """What is measured. Points that the cache or the model cannot hold are left out."""

    new_tokens: tuple[int, ...]
    prefixes: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    """Decode steps of a measurement."""
    repeats: int
    """Least runs of a measurement, after one to warm up."""
    busy_s: float
    """Least seconds for which each is run back to back: a busy node is no device that has rested."""
    chunks: tuple[int, ...]
    """Tokens of a step with a part of a prompt, the sequences that decode in it included."""
    chunk_prefixes: tuple[int, ...]
    beside: tuple[tuple[int, int], ...]
    """(sequences that decode beside a chunk, tokens of each), neither a multiple of the other: what both take
    has to be kept apart."""
    chunk_steps: int


GRIDS = {
    "cpu": Grid(
        (16, 64, 256, 512),
        (0, 512, 1024),
        (1, 4, 12),
        (128, 512, 1536),
        steps=4,
        repeats=3,
        busy_s=0.0,
        chunks=(64, 256),
        chunk_prefixes=(0, 512),
        beside=((0, 256), (1, 256), (8, 256), (8, 32)),
        chunk_steps=3,
    ),
    "cuda": Grid(
        (128, 512, 1024, 2048, 4096, 8192, 32_768),
        (0, 2048, 8192, 24_576),
        (1, 8, 32, 64, 128, 256),
        (512, 2048, 8192),
        steps=16,
        repeats=3,
        busy_s=1.0,
        chunks=(256, 512, 768),
        chunk_prefixes=(0, 8192, 24_576),
        beside=((0, 512), (1, 512), (8, 4096), (32, 4096), (32, 512), (128, 512)),
        chunk_steps=8,
    ),
}

ENGINES = {
    "cpu": EngineConfig(device="cpu", kv_cache_gib=1.5, chunk_tokens=512, max_batch=16),
    "cuda": EngineConfig(device="cuda", dtype="bfloat16", chunk_tokens=32_768),
}


def measured_profile(options: argparse.Namespace) -> Profile:
    """Return the profile of this device; raises ConfigError if the model cannot be had."""
    is_gpu = options.device != "cpu" and torch.cuda.is_available()
    kind = "cuda" if is_gpu else "cpu"
    config = ENGINES[kind]
    if options.max_batch:
        config = dataclasses.replace(config, max_batch=options.max_batch)
    config = dataclasses.replace(config, quantization=options.quantization, kv_dtype=options.kv_dtype)
    engine = _engine(options, config)
    return make_profile(options, engine, asyncio.run(measure(engine, GRIDS[kind])))


def _engine(options: argparse.Namespace, config: EngineConfig) -> Engine:
    if options.shape:
        return assemble_engine(config, build_rank(options.shape, None, options.quantization), SystemClock())
    prepared = prepare(options.model, options.cache_dir, lambda line: print(line, flush=True))
    return build_engine(config, prepared.path, SystemClock())


@dataclasses.dataclass(frozen=True, slots=True)
class Points:
    """Each the median of its runs, after one to warm up."""

    prefill: list[Measured]
    decode: list[Measured]
    steps: list[MeasuredStep]


async def measure(engine: Engine, grid: Grid) -> Points:
    """Return the points of `grid` that the cache and the model can hold."""
    driver = Driver(engine, Prompts(engine.vocab_size, 0))
    try:
        return Points(
            await _measure_prefill(driver, engine, grid),
            await _measure_decode(driver, engine, grid),
            await _measure_steps(driver, engine, grid),
        )
    finally:
        await driver.close()


async def _measure_prefill(driver: Driver, engine: Engine, grid: Grid) -> list[Measured]:
    capacity = engine.cache.num_blocks * engine.layout.block_size
    points = []
    for prefix, new in itertools.product(grid.prefixes, grid.new_tokens):
        if prefix + new < min(engine.max_model_len, capacity):
            seconds = await _usual(lambda: driver.prefill_s(new, 1, prefix), grid)  # noqa: B023
            points.append(Measured(new, prefix, seconds))
            print(f"prefill {new:7,} after {prefix:7,}: {1e3 * seconds:9.2f} ms", flush=True)
    return points


async def _measure_decode(driver: Driver, engine: Engine, grid: Grid) -> list[Measured]:
    points = []
    for context, batch in itertools.product(grid.contexts, grid.batches):
        longest = context + 2 * grid.steps
        blocks = batch * engine.layout.num_blocks(longest)
        fits = blocks <= engine.cache.num_blocks and batch <= engine.scheduler.max_batch
        if longest < engine.max_model_len and fits:
            seconds = await _usual(
                lambda: driver.decode_step_s(batch, context, grid.steps),  # noqa: B023
                grid,
            )
            points.append(Measured(batch, context + grid.steps // 2, seconds))
            print(f"decode {batch:5} x {context:7,}: {1e3 * seconds:9.2f} ms", flush=True)
    return points


async def _measure_steps(driver: Driver, engine: Engine, grid: Grid) -> list[MeasuredStep]:
    steps, num_blocks = grid.chunk_steps, engine.layout.num_blocks
    points = []
    for prefix, chunk, beside in itertools.product(grid.chunk_prefixes, grid.chunks, grid.beside):
        batch, context = beside
        longest = max(prefix + chunk * steps, context + steps)
        blocks = num_blocks(prefix + chunk * steps) + batch * num_blocks(context + steps)
        fits = blocks <= engine.cache.num_blocks and batch < engine.scheduler.max_batch
        if longest < engine.max_model_len and fits:
            seconds = await _usual(
                lambda: driver.chunk_step_s(chunk, prefix, batch, context, steps),  # noqa: B023
                grid,
            )
            tokens = chunk - batch
            points.append(
                MeasuredStep(tokens, prefix + tokens * steps / 2, batch, context + steps / 2, seconds)
            )
            what = f"chunk {chunk:6,} after {prefix:7,} beside {batch:3} x {context:5,}"
            print(f"{what}: {1e3 * seconds:9.2f} ms", flush=True)
    return points


async def _usual(run: Callable[[], Awaitable[float]], grid: Grid) -> float:
    """Return the median of runs back to back: a GPU that has rested computes 2 % faster for some seconds."""
    await run()
    measured: list[float] = []
    started_s = time.perf_counter()
    while len(measured) < grid.repeats or time.perf_counter() - started_s < grid.busy_s:
        measured.append(await run())
    return statistics.median(measured)


def make_profile(options: argparse.Namespace, engine: Engine, points: Points) -> Profile:
    """Return the profile that fits the points best."""
    layout = engine.layout
    device_tokens = engine.cache.num_blocks * layout.block_size
    make = partial(
        Profile,
        name=options.name,
        source="measured by conductor profile; link and host memory are given, not measured",
        kv_token_bytes=layout.token_bytes,
        num_layers=layout.num_layers,
        transfer_bytes_per_s=options.link_bytes_per_s,
        transfer_fixed_s=options.link_latency_s,
        device_kv_tokens=device_tokens,
        host_kv_tokens=options.host_kv_tokens or device_tokens,
        start_s=options.start_s,
        join_s=options.join_s,
        dispatch_s=options.dispatch_s,
        dispatch_token_s=options.dispatch_token_s,
        step_tokens=MIXED_TOKENS if engine.cache.tensor.is_cuda else (),
        quantization=engine.quantization.format,
        kv_dtype=layout.fields[0].dtype,
        launches_ahead=engine.cache.tensor.is_cuda,
        long_chunk_tokens=MIN_LONG_ROWS if engine.cache.tensor.is_cuda else 0,
    )
    profile = fitted(make, points.prefill, points.decode, _origin(options, engine))
    profile = with_steps(profile, points.prefill, points.steps)
    # The prefix was on the device: its load from host memory is no part of what was measured.
    return dataclasses.replace(profile, prefix_token_s=_load_s(engine) * layout.token_bytes)


def _origin(options: argparse.Namespace, engine: Engine) -> Evidence:
    is_gpu = engine.cache.tensor.is_cuda
    device = (
        torch.cuda.get_device_name() if is_gpu else f"{processor_name()}, {torch.get_num_threads()} threads"
    )
    layout = engine.layout
    return Evidence(
        device=device,
        model=f"{engine.family}, vocabulary {engine.vocab_size}, {layout.layout_id}",
        versions=f"torch {torch.__version__}, transformers {version('transformers')}",
        commit=options.commit or current_commit(),
        date=today(),
    )


def _load_s(engine: Engine) -> float:
    """Return the seconds to bring a byte from host memory to where attention reads it."""
    if not engine.cache.tensor.is_cuda:
        return 0.0
    host = torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device=engine.cache.tensor.device)
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()  # what is timed is the copy
        started_s = time.perf_counter()
        device.copy_(host)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
    return min(seconds) / COPY_BYTES
