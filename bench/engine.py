"""`python -m bench.engine`: the engine on one GPU against vLLM's figures for the same work.

Models have the shape of Llama-3.1-8B and Qwen3-0.6B and random weights, built on the GPU
from a configuration; nothing is downloaded. Everything runs through the whole engine:
scheduler, event loop, device thread, sampling. Each row is run once to warm up and then
`--repeats` times; its median is printed beside vLLM 0.26.0's figure on the same kind of
GPU, with the share of the GPU's arithmetic (MFU) and bandwidth that it used.

    python -m bench.engine --model 8b --out bench/results/engine_gpu_8b.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from base.clock import SystemClock, wall_clock_s
from base.config import EngineConfig
from base.request import SamplingParams
from bench.about_run import current_commit
from bench.engine_rank import build_rank
from bench.engine_shapes import SHAPES
from bench.engine_work import GREEDY, Driver, Prompts, Worker
from bench.launch_times import LaunchTimes
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
class Row:
    """One line of the bar."""

    workload: str
    unit: str
    """"tok/s": more is better; "ms": less is."""
    vllm: float
    must: float
    aim: float
    measure: Callable[[Worker], Awaitable[float]]
    """Seconds that the work took."""
    tokens: int
    """Output tokens if the unit is tok/s."""
    flops: float
    bytes_read: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row as measured."""

    workload: str
    unit: str
    value: float
    all_values: list[float]
    vllm: float
    must: float
    aim: float
    times_vllm: float
    """Above 1: better than vLLM."""
    meets: bool
    mfu: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a model of a shape costs."""

    layer_params: int
    head_params: int
    num_layers: int
    heads_dim: int
    kv_token_bytes: int

    def flops(self, new_tokens: int, sampled: int, seen: int) -> float:
        """Arithmetic of new tokens, of sampled ones' logits, and of `seen` (query, key) pairs."""
        return (
            2.0 * self.layer_params * new_tokens
            + 2.0 * self.head_params * sampled
            + 4.0 * self.num_layers * self.heads_dim * seen
        )

    def bytes_read(self, steps: int, context_tokens: int) -> float:
        """Weights once a step, and the KV of every token a query sees."""
        weights = 2.0 * (self.layer_params + self.head_params) * steps
        return weights + float(self.kv_token_bytes) * context_tokens


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


def build_bench_engine(shape: str, config: EngineConfig) -> Engine:
    """Return an engine of as many ranks as the configuration says."""
    if config.tensor_parallel == 1:
        return assemble_engine(config, build_rank(shape, None), SystemClock())
    spec = {"engine": asdict(config), "shape": shape}
    ranks, group = start_ranks(
        "bench.engine_rank", spec, GroupShape(tensor=config.tensor_parallel), is_gpu=True
    )
    model = build_rank(shape, group.tensor)
    engine = assemble_engine(config, model, SystemClock(), group=group, ranks=ranks)
    ranks.is_starting = False
    return engine


def work_of(config: PreTrainedConfig, num_ranks: int) -> Work:
    """Return what a model costs each of its ranks."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_attention_heads * head_dim
    kv_heads = config.num_key_value_heads * head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
    return Work(
        config.num_hidden_layers * layer // num_ranks,
        config.vocab_size * config.hidden_size,
        config.num_hidden_layers,
        heads // num_ranks,
        2 * 2 * config.num_hidden_layers * kv_heads // num_ranks,
    )


def decode_row(work: Work, batch: int, vllm_ms: float, aim_ms: float) -> Row:
    seen = batch * (1024 + 64)
    return Row(
        f"decode step, batch {batch}, context 1,024..1,152",
        "ms",
        vllm_ms,
        vllm_ms,
        aim_ms,
        lambda worker: worker.decode_step_s(batch, 1024, 128),
        0,
        work.flops(batch, batch, seen),
        work.bytes_read(1, seen),
    )


def prefill_row(work: Work, length: int, count: int, vllm_ms: float) -> Row:
    return Row(
        f"prefill {length:,} x {count}",
        "ms",
        vllm_ms,
        vllm_ms,
        0.9 * vllm_ms,
        lambda worker: worker.prefill_s(length, count),
        0,
        work.flops(length * count, count, count * length * length // 2),
        work.bytes_read(1, length * count),
    )


def throughput_row(
    work: Work, name: str, lens: list[tuple[int, int]], vllm: float, must: float, aim: float
) -> Row:
    new = sum(prompt + output for prompt, output in lens)
    seen = sum((prompt + output) ** 2 // 2 for prompt, output in lens)
    read = sum(output * prompt + output**2 // 2 for prompt, output in lens)
    tokens = sum(output for _, output in lens)
    return Row(
        name,
        "tok/s",
        vllm,
        must,
        aim,
        lambda worker: worker.throughput_s(lens),
        tokens,
        work.flops(new, tokens, seen),
        work.bytes_read(max(output for _, output in lens), read),
    )


def rows_of(name: str, work: Work, prompts: Prompts) -> list[Row]:
    if name == "8b":
        return [
            throughput_row(work, "256 x 512 in / 128 out, at once", [(512, 128)] * 256, 6779, 6800, 8000),
            *(
                decode_row(work, batch, vllm, aim)
                for batch, vllm, aim in ((1, 4.98, 4.4), (8, 5.35, 4.8), (64, 7.72, 7.0), (256, 18.5, 15.0))
            ),
            *(
                prefill_row(work, length, count, vllm)
                for length, count, vllm in (
                    (4096, 1, 104.0),
                    (16_384, 1, 491.0),
                    (32_768, 1, 1206.0),
                    (8192, 8, 1722.0),
                )
            ),
        ]
    lens = prompts.uniform_lens(256, 100, 1024)
    return [
        throughput_row(work, "256 x 100..1,024 in and out, at once", lens, 24_434, 24_500, 30_000),
        *(decode_row(work, batch, vllm, 0.85 * vllm) for batch, vllm in ((1, 1.64), (64, 3.77), (256, 10.4))),
    ]


async def run_row(row: Row, worker: Worker, repeats: int) -> Outcome:
    await row.measure(worker)
    seconds = [await row.measure(worker) for _ in range(repeats)]
    values = [row.tokens / item if row.unit == "tok/s" else 1e3 * item for item in seconds]
    value, middle_s = statistics.median(values), statistics.median(seconds)
    ratio = value / row.vllm if row.unit == "tok/s" else row.vllm / value
    meets = value >= row.must if row.unit == "tok/s" else value <= row.must
    return Outcome(
        row.workload,
        row.unit,
        value,
        values,
        row.vllm,
        row.must,
        row.aim,
        ratio,
        meets,
        row.flops / middle_s / PEAK_FLOPS,
        row.bytes_read / middle_s / PEAK_BYTES_PER_S,
    )


async def run_rows(
    name: str, work: Work, engine: Engine, repeats: int, wanted: str
) -> tuple[list[Outcome], dict[str, float]]:
    """Return the rows whose workload contains `wanted`, and milliseconds of a step for each sampling."""
    prompts = Prompts(engine.vocab_size, 0)
    rows = rows_of(name, work, prompts)
    driver = Driver(engine, prompts)
    outcomes = []
    try:
        for row in rows:
            if wanted in row.workload:
                outcomes.append(await run_row(row, driver, repeats))
                print_table(outcomes[-1:])
        sampled_ms = await sampling_ms(driver, repeats) if wanted in "sampling" else {}
    finally:
        await driver.close()
    return outcomes, sampled_ms


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
        print(
            f"{item.workload:45} {item.value:9,.2f} {item.unit:5}{item.vllm:7,.6g} {item.times_vllm:7.2f} "
            f"{item.must:9,.6g} {item.aim:9,.6g} {item.mfu:4.0%} {item.bandwidth:6.0%} "
            f"{'' if item.meets else '  SHORT'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", default="", help="only rows with this in their name; 'sampling' is one")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that hold the model together")
    parser.add_argument("--chunk-tokens", type=int, default=ENGINE.chunk_tokens)
    parser.add_argument("--commit", default="", help="where the checkout has no .git")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started_s = time.perf_counter()
    engine_config = replace(ENGINE, chunk_tokens=options.chunk_tokens, tensor_parallel=options.ranks)
    engine = build_bench_engine(options.model, engine_config)
    work = work_of(SHAPES[options.model], options.ranks)
    torch.cuda.synchronize()
    start_up_s = time.perf_counter() - started_s
    print(f"{options.model}: start-up (build, check, compile, capture) {start_up_s:.1f} s", flush=True)
    launches = LaunchTimes(engine.runner)
    outcomes, sampled_ms = asyncio.run(run_rows(options.model, work, engine, options.repeats, options.rows))
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
    report = {
        "model": options.model,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "transformers": version("transformers"),
        "commit": options.commit or current_commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime(wall_clock_s())),
        "card": asdict(card),
        "start_up_s": start_up_s,
        "memory_gib": torch.cuda.max_memory_reserved() / 2**30,
        "launch_cpu_ms": 1e3 * launch_s,
        "ranks": options.ranks,
        "chunk_tokens": options.chunk_tokens,
        "sampling_step_ms_at_256": sampled_ms,
        "rows": [asdict(outcome) for outcome in outcomes],
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
