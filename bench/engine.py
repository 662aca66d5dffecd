"""`python -m bench.engine`: the engine on one GPU against vLLM's figures for the same work.

Models have the shape of a known one (`engine_shapes.py`) and random weights, built on the GPU
from a configuration; nothing is downloaded. Everything runs through the whole engine:
scheduler, event loop, device thread, sampling. Each row is run once to warm up and then
`--repeats` times; its median is printed beside its bar (`engine_rows.py`) on the same kind of
GPU, with the share of the GPU's arithmetic (MFU) and bandwidth that it used.

    python -m bench.engine --model 8b --out bench/results/engine_gpu_8b.json
    python -m bench.engine --model 8b --quantization fp8 --kv-dtype fp8 --profile 1 256
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from base.clock import SystemClock
from base.config import WEIGHT_FORMATS, EngineConfig
from base.request import SamplingParams
from bench.about_run import current_commit, today, write_result
from bench.engine_rank import build_rank
from bench.engine_rows import Row, rows_of, work_of
from bench.engine_shapes import SHAPES
from bench.engine_work import GREEDY, Driver, Prompts, Worker
from bench.launch_times import LaunchTimes
from bench.step_profile import StepProfile, step_profile
from engine.build import Engine, assemble_engine
from engine.rank_group import GroupShape
from engine.ranks import start_ranks

PEAK_FLOPS = 792e12
"""bf16 matrix product of 8192^3 on an H200, measured."""

PEAK_BYTES_PER_S = 4.22e12
"""Copy within the memory of an H200, bytes read and written, measured."""

ENGINE = EngineConfig(
    device="cuda", dtype="bfloat16", block_size=64, kv_cache_gib=70, chunk_tokens=32_768, max_batch=256
)


SAMPLINGS = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    "top-k and top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row as measured."""

    workload: str
    unit: str
    value: float
    all_values: list[float]
    vllm: float | None
    must: float | None
    aim: float | None
    times_vllm: float | None
    """Above 1: better than vLLM."""
    meets: bool
    """Whether what must be is; True where nothing must be."""
    mfu: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Card:
    """What the card at hand does: cards of one kind differ by several percent under load."""

    gemm_tflops: float
    """bf16 8192^3, ten products from idle."""
    sustained_gemm_tflops: float
    """The same after two seconds of them: the power limit holds by then."""
    copy_tb_per_s: float
    """Within memory, bytes read and written."""


def measure_card() -> Card:
    left, right = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    flops = 2 * 8192**3
    for _ in range(3):
        left @ right
        target.copy_(source)
    cold = flops * 10 / _seconds(lambda: left @ right, 10)
    _seconds(lambda: left @ right, 1400)
    warm = flops * 100 / _seconds(lambda: left @ right, 100)
    copied = 2 * 2 * source.numel() * 10 / _seconds(lambda: target.copy_(source), 10)
    return Card(cold / 1e12, warm / 1e12, copied / 1e12)


def _seconds(run: Callable[[], object], times: int) -> float:
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return time.perf_counter() - started_s


def build_bench_engine(shape: str, config: EngineConfig, same_experts: bool = False) -> Engine:
    """Return an engine of as many ranks, and of weights and KV in the formats, as the configuration says."""
    if config.tensor_parallel == 1:
        model = build_rank(shape, None, config.quantization, same_experts)
        return assemble_engine(config, model, SystemClock())
    spec = {"engine": asdict(config), "shape": shape}
    ranks, group = start_ranks(
        "bench.engine_rank", spec, GroupShape(tensor=config.tensor_parallel), is_gpu=True
    )
    model = build_rank(shape, group.tensor, config.quantization)
    engine = assemble_engine(config, model, SystemClock(), group=group, ranks=ranks)
    ranks.is_starting = False
    return engine


async def run_row(row: Row, worker: Worker, repeats: int) -> Outcome:
    await row.measure(worker)
    seconds = [await row.measure(worker) for _ in range(repeats)]
    values = [row.tokens / item if row.unit == "tok/s" else 1e3 * item for item in seconds]
    value, middle_s = statistics.median(values), statistics.median(seconds)
    bar, is_rate = row.bar, row.unit == "tok/s"
    ratio = None if bar.vllm is None else value / bar.vllm if is_rate else bar.vllm / value
    meets = bar.must is None or (value >= bar.must if is_rate else value <= bar.must)
    return Outcome(
        row.workload,
        row.unit,
        value,
        values,
        bar.vllm,
        bar.must,
        bar.aim,
        ratio,
        meets,
        row.flops / middle_s / PEAK_FLOPS,
        row.bytes_read / middle_s / PEAK_BYTES_PER_S,
    )


async def run_rows(
    options: argparse.Namespace, engine: Engine, keep: Callable[[list[Outcome]], None]
) -> tuple[list[Outcome], dict[str, float], list[StepProfile]]:
    """Return the rows, milliseconds of a step for each sampling, and profiles, as the options ask for.

    `keep` is called with the rows so far after each of them: a run that is cut off loses one row."""
    prompts = Prompts(engine.vocab_size, 0)
    formats = options.quantization, options.kv_dtype
    work = work_of(SHAPES[options.model], options.ranks, *formats)
    if options.same_experts:
        work = replace(work, num_experts=work.num_chosen)
    driver = Driver(engine, prompts)
    outcomes = []
    try:
        for row in rows_of(options.model, work, prompts, *formats):
            if not options.rows or any(name in row.workload for name in options.rows):
                outcomes.append(await run_row(row, driver, options.repeats))
                print_table(outcomes[-1:])
                keep(outcomes)
        is_asked = not options.rows or "sampling" in options.rows
        sampled_ms = await sampling_ms(driver, options.repeats) if is_asked else {}
        profiles = [await step_profile(driver, batch) for batch in options.profile]
    finally:
        await driver.close()
    return outcomes, sampled_ms, profiles


async def sampling_ms(driver: Driver, repeats: int) -> dict[str, float]:
    """Return the milliseconds of a decode step at batch 256 for each way to sample, in turn."""
    times: dict[str, list[float]] = {name: [] for name in SAMPLINGS}
    for _ in range(repeats + 1):
        for name, sampling in SAMPLINGS.items():
            times[name].append(1e3 * await driver.decode_step_s(256, 1024, 64, sampling))
    result = {name: statistics.median(values[1:]) for name, values in times.items()}
    for name, value in result.items():
        print(f"decode step, batch 256, {name:24} {value:8.3f} ms  {value / result['greedy'] - 1:6.2%}")
    return result


def print_table(outcomes: list[Outcome]) -> None:
    print(f"{'workload':45} {'measured':>12} {'vLLM':>9} {'x vLLM':>7} {'must':>9} {'aim':>9}  MFU  bandw.")
    for item in outcomes:
        bars = (
            f"{'-' if figure is None else format(figure, ',.5g'):>{width}}"
            for figure, width in ((item.vllm, 8), (item.times_vllm, 7), (item.must, 9), (item.aim, 9))
        )
        print(
            f"{item.workload:45} {item.value:9,.2f} {item.unit:5} {' '.join(bars)} "
            f"{item.mfu:4.0%} {item.bandwidth:6.0%} {'' if item.meets else '  SHORT'}",
            flush=True,
        )


def print_profile(profile: StepProfile) -> None:
    print(f"a step of {profile.batch}: {profile.step_us:.0f} us, {profile.busy:.1%} of it in kernels")
    for kernel in profile.kernels:
        print(f"{kernel.us:10.1f} us {kernel.count:7.1f} x {kernel.name}")


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=sorted(SHAPES), default="8b")
    add("--quantization", choices=WEIGHT_FORMATS, default="none", help="of the weights")
    add("--kv-dtype", choices=("auto", "fp8"), default="auto")
    add("--kv-cache-gib", type=float, default=ENGINE.kv_cache_gib)
    add("--repeats", type=int, default=3)
    add("--rows", nargs="*", default=[], help="only rows with one of these in their name; 'sampling' is one")
    add("--profile", nargs="*", type=int, default=[], help="batches whose decode step is profiled too")
    add("--ranks", type=int, default=1, help="GPUs that hold the model together")
    add("--chunk-tokens", type=int, default=ENGINE.chunk_tokens)
    add("--same-experts", action="store_true", help="every token goes to the same experts")
    add("--commit", default="", help="where the checkout has no .git")
    add("--out", type=Path)
    return parser


def started(options: argparse.Namespace) -> tuple[Engine, float]:
    """Return an engine as the options say, and how many seconds it took to start."""
    began_s = time.perf_counter()
    config = replace(
        ENGINE,
        chunk_tokens=options.chunk_tokens,
        tensor_parallel=options.ranks,
        quantization=options.quantization,
        kv_dtype=options.kv_dtype,
        kv_cache_gib=options.kv_cache_gib,
    )
    engine = build_bench_engine(options.model, config, options.same_experts)
    torch.cuda.synchronize()
    start_up_s = time.perf_counter() - began_s
    print(f"{options.model}: start-up (build, check, compile, capture) {start_up_s:.1f} s", flush=True)
    return engine, start_up_s


def measured(options: argparse.Namespace, engine: Engine, start_up_s: float) -> dict[str, Any]:
    """Measure and print what the options ask for; return the report."""
    launches = LaunchTimes(engine.runner)
    about = about_engine(options, engine, start_up_s)
    outcomes, sampled_ms, profiles = asyncio.run(
        run_rows(options, engine, lambda rows: write_result(options.out, about | rows_of_report(rows)))
    )
    card = measure_card()
    print(
        f"this card: {card.gemm_tflops:.0f} TFLOP/s, {card.sustained_gemm_tflops:.0f} sustained, "
        f"{card.copy_tb_per_s:.2f} TB/s",
        flush=True,
    )
    if engine.ranks is not None:
        engine.ranks.close()
    launch_s = launches.total_s / launches.num_launches
    print(f"\nCPU time of a launch: {1e3 * launch_s:.2f} ms (mean of {launches.num_launches} steps)")
    print_table(outcomes)
    for profile in profiles:
        print_profile(profile)
    return about | {
        "card": asdict(card),
        "memory_gib": torch.cuda.max_memory_reserved() / 2**30,
        "launch_cpu_ms": 1e3 * launch_s,
        "sampling_step_ms_at_256": sampled_ms,
        **rows_of_report(outcomes),
        "profiles": [asdict(profile) for profile in profiles],
    }


def about_engine(options: argparse.Namespace, engine: Engine, start_up_s: float) -> dict[str, Any]:
    """Return what the report says of the engine, its versions and its start."""
    return {
        "model": options.model,
        "quantization": options.quantization,
        "kv_dtype": options.kv_dtype,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "transformers": version("transformers"),
        "commit": options.commit or current_commit(),
        "date": today(),
        "start_up_s": start_up_s,
        "ranks": options.ranks,
        "chunk_tokens": options.chunk_tokens,
        "logits_off_by": engine.quantization.error,
    }


def rows_of_report(outcomes: list[Outcome]) -> dict[str, Any]:
    return {"rows": [asdict(outcome) for outcome in outcomes]}


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    if options.same_experts and options.ranks > 1:
        parser.error("--same-experts: one rank alone can do it")
    write_result(options.out, measured(options, *started(options)))


if __name__ == "__main__":
    main()
