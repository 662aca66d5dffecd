"""`conductor profile`: what prefill and decode cost on this device, as placement and replay read it.

Prefill is timed on a grid of new tokens and prefix, decode on a grid of batch and
context, each varied by itself, and steps that have both on one of chunk, prefix and batch, through the
whole engine of a node. The profile holds the
fitted coefficients, the points, and the error at each point of a fit to the others. What
one device cannot tell, the rate of its links, the size of the host's cache and what a request takes
outside of the engine, is given on the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from base.clock import SystemClock, wall_clock_s
from base.config import EngineConfig
from base.errors import ConfigError
from bench.about_run import current_commit, processor_name
from bench.engine_shapes import SHAPES, build_model
from bench.engine_work import Driver, Prompts
from bench.profile_fit import Measured, MeasuredStep, fitted, with_steps
from bench.profile_log import profile_from_run
from bench.profile_steps import profile_from_steps
from conductor.placing.profile import Evidence, Profile, profile_json
from conductor.replay.conformance import read_run
from engine.build import Engine, assemble_engine, build_engine
from engine.cuda_graph import MIXED_TOKENS
from engine.long_chunks import MIN_TOKENS
from engine.model import PagedModel
from engine.model_store import prepare

MIN_LONG_ROWS = MIN_TOKENS // 2
"""From here on a chunk after a prefix is computed as a whole prompt is; without one, from twice as many."""

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
    chunks: tuple[int, ...]
    """Tokens of a step with a part of a prompt, the sequences that decode in it included."""
    chunk_prefixes: tuple[int, ...]
    chunk_batches: tuple[int, ...]
    chunk_context: int
    """Of each sequence that decodes beside a chunk."""
    chunk_steps: int


GRIDS = {
    "cpu": Grid(
        (16, 64, 256, 512),
        (0, 512, 1024),
        (1, 4, 12),
        (128, 512, 1536),
        steps=4,
        repeats=2,
        chunks=(64, 256),
        chunk_prefixes=(0, 512),
        chunk_batches=(0, 1, 8),
        chunk_context=256,
        chunk_steps=3,
    ),
    "cuda": Grid(
        (128, 512, 2048, 8192, 32_768),
        (0, 2048, 8192, 24_576),
        (1, 8, 32, 64, 128, 256),
        (512, 2048, 8192),
        steps=16,
        repeats=3,
        chunks=(256, 512, 768),
        chunk_prefixes=(0, 8192, 24_576),
        chunk_batches=(0, 1, 8, 32),
        chunk_context=4096,
        chunk_steps=8,
    ),
}

ENGINES = {
    "cpu": EngineConfig(device="cpu", kv_cache_gib=1.5, chunk_tokens=512, max_batch=16),
    "cuda": EngineConfig(device="cuda", dtype="bfloat16", chunk_tokens=32_768),
}


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="conductor profile",
        description="Time prefill and decode on this device and write a profile.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="as in cluster.yaml")
    add("--shape", choices=sorted(SHAPES), help="random weights of this shape instead, on a GPU")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--from-log", type=Path, metavar="FILE", help="fit a decision log instead of measuring here")
    add("--timelines", type=Path, metavar="FOLDER", help="of the nodes of that log: fit their steps")
    add("--name", default="measured", help="of the profile")
    add("--max-batch", type=int, default=0, help="sequences in a step, as the nodes have it; 0: usual")
    add("--out", type=Path, default=Path("profile.json"))
    add("--commit", default="", help="where the checkout has no .git")
    add("--cache-dir", type=Path, default=Path("~/.cache/conductor-cluster"))
    add("--link-bytes-per-s", type=float, default=1.5e9, help="of one node, each way; not measured here")
    add("--link-latency-s", type=float, default=0.002, help="of a hand-off; not measured here")
    add(
        "--request-s",
        type=float,
        default=0.0,
        help="of a prefill node, beside each prefill; not measured here",
    )
    add("--start-s", type=float, default=0.0, help="of a hand-off, until it decodes; not measured here")
    add("--join-s", type=float, default=0.0, help="the same, of its first step; not measured here")
    add("--dispatch-s", type=float, default=0.0, help="of TTFT, outside of nodes; not measured here")
    add("--dispatch-token-s", type=float, default=0.0, help="the same, for each token of the prompt")
    add("--host-kv-tokens", type=int, default=0, help="KV in a node's share of host memory; 0: as on it")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = make_parser().parse_args(argv)
    if options.from_log:
        return _from_log(options)
    is_gpu = options.device != "cpu" and torch.cuda.is_available()
    kind = "cuda" if is_gpu else "cpu"
    config = ENGINES[kind]
    if options.max_batch:
        config = dataclasses.replace(config, max_batch=options.max_batch)
    try:
        engine = _engine(options, config)
    except ConfigError as error:
        sys.stderr.write(f"conductor profile: {error}\n")
        return 1
    profile = make_profile(options, engine, asyncio.run(measure(engine, GRIDS[kind])))
    options.out.write_text(profile_json(profile))
    print_profile(profile)
    print(f"written to {options.out}")
    return 0


def _from_log(options: argparse.Namespace) -> int:
    try:
        run = read_run(options.from_log)
        if options.timelines:
            profile = profile_from_steps(run, options.timelines, options.name)
        else:
            profile = profile_from_run(run, options.name)
    except ConfigError as error:
        sys.stderr.write(f"conductor profile: {error}\n")
        return 1
    options.out.write_text(profile_json(profile))
    print_profile(profile)
    print(f"written to {options.out}")
    return 0


def _engine(options: argparse.Namespace, config: EngineConfig) -> Engine:
    if options.shape:
        return assemble_engine(
            config, PagedModel(build_model(SHAPES[options.shape])), config.dtype, SystemClock()
        )
    prepared = prepare(options.model, options.cache_dir, lambda line: print(line, flush=True))
    return build_engine(config, prepared.path, SystemClock())


@dataclasses.dataclass(frozen=True, slots=True)
class Points:
    """Each the shortest of its repeats after a warm-up."""

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
            seconds = await _least(lambda: driver.prefill_s(new, 1, prefix), grid.repeats)  # noqa: B023
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
            seconds = await _least(
                lambda: driver.decode_step_s(batch, context, grid.steps),  # noqa: B023
                grid.repeats,
            )
            points.append(Measured(batch, context + grid.steps // 2, seconds))
            print(f"decode {batch:5} x {context:7,}: {1e3 * seconds:9.2f} ms", flush=True)
    return points


async def _measure_steps(driver: Driver, engine: Engine, grid: Grid) -> list[MeasuredStep]:
    context, steps, num_blocks = grid.chunk_context, grid.chunk_steps, engine.layout.num_blocks
    points = []
    for prefix, chunk, batch in itertools.product(grid.chunk_prefixes, grid.chunks, grid.chunk_batches):
        longest = max(prefix + chunk * steps, context + steps)
        blocks = num_blocks(prefix + chunk * steps) + batch * num_blocks(context + steps)
        fits = blocks <= engine.cache.num_blocks and batch < engine.scheduler.max_batch
        if longest < engine.max_model_len and fits:
            seconds = await _least(
                lambda: driver.chunk_step_s(chunk, prefix, batch, context, steps),  # noqa: B023
                grid.repeats,
            )
            tokens = chunk - batch
            points.append(
                MeasuredStep(tokens, prefix + tokens * steps / 2, batch, context + steps / 2, seconds)
            )
            print(f"chunk {chunk:6,} after {prefix:7,} + {batch:3}: {1e3 * seconds:9.2f} ms", flush=True)
    return points


async def _least(run: Callable[[], Awaitable[float]], repeats: int) -> float:
    """Return the shortest of some runs after one to warm up: what disturbs a run only adds to it."""
    await run()
    return min([await run() for _ in range(repeats)])


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
        request_s=options.request_s,
        start_s=options.start_s,
        join_s=options.join_s,
        dispatch_s=options.dispatch_s,
        dispatch_token_s=options.dispatch_token_s,
        step_tokens=MIXED_TOKENS if engine.cache.tensor.is_cuda else (),
        launches_ahead=engine.cache.tensor.is_cuda,
        long_chunk_tokens=MIN_LONG_ROWS if engine.cache.tensor.is_cuda else 0,
    )
    profile = fitted(make, points.prefill, points.decode, _origin(options, engine))
    profile = with_steps(profile, points.steps)
    # The prefix was on the device: its load from host memory is no part of what was measured.
    return dataclasses.replace(profile, prefix_token_s=_load_s(engine) * layout.token_bytes)


def _origin(options: argparse.Namespace, engine: Engine) -> Evidence:
    is_gpu = engine.cache.tensor.is_cuda
    device = torch.cuda.get_device_name() if is_gpu else f"{processor_name()}, {engine.num_threads} threads"
    layout = engine.layout
    return Evidence(
        device=device,
        model=f"{engine.family}, {layout.num_layers} layers, {layout.num_kv_heads} KV heads of "
        f"{layout.head_dim}, vocabulary {engine.vocab_size}, {layout.dtype}",
        versions=f"torch {torch.__version__}, transformers {version('transformers')}",
        commit=options.commit or current_commit(),
        date=time.strftime("%Y-%m-%d", time.gmtime(wall_clock_s())),
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


def print_profile(profile: Profile) -> None:
    """Print each point with what the fit says to it, and the errors."""
    evidence = profile.evidence
    for phase, points in (("prefill", evidence.prefill), ("decode", evidence.decode)):
        print(f"{phase:8} {'tokens':>8} {'context':>8} {'measured ms':>12} {'fitted ms':>10} {'error':>6}")
        for item in points:
            error = item.predicted_s / item.measured_s - 1
            print(
                f"{'':8} {item.tokens:8,.0f} {item.context:8,.0f} {1e3 * item.measured_s:12.2f} "
                f"{1e3 * item.predicted_s:10.2f} {error:6.1%}"
            )
    if evidence.steps:
        heads = ("chunk", "after", "batch", "measured ms", "fitted ms", "error")
        print(f"{'step':8}" + "".join(f"{head:>12}" for head in heads))
    for step in evidence.steps:
        error = step.predicted_s / step.measured_s - 1
        print(
            f"{'':8}{step.chunk_tokens:12,}{step.prefix_tokens:12,.0f}{step.batch:12}"
            f"{1e3 * step.measured_s:12.2f}{1e3 * step.predicted_s:12.2f}{error:12.1%}"
        )
    print(
        f"left out one by one: prefill {evidence.prefill_left_out_error:.1%}, decode "
        f"{evidence.decode_left_out_error:.1%} in the mean, {evidence.worst_left_out_error:.1%} at worst; "
        f"steps {evidence.steps_left_out_error:.1%}"
    )
