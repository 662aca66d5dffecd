"""`python -m bench.cpp`: time to the first token of long prompts, by the number of pipeline stages.

For each number of stages an engine of as many ranks is built (a GPU each, or shares of the
CPU), and each prompt computed alone, `--repeats` times, the engine warm. Then `--short-count`
prompts of `--short` tokens are handed over at once, which gives prompts a second: of all of them,
and at load, between the first tenth and the last, without what it takes to fill a pipeline once.

One stage is measured on as many GPUs as the most stages have, all at once, because two cards of
one kind differ by up to 7 %: X separate nodes do the sum of their prompts a second, and one GPU
takes the mean of their times. Ratios are to these.

    python -m bench.cpp --model 8b --stages 1,2,4 --prompts 32768,131072 --chunk 8192 --out cpp.json
    python -m bench.cpp --model tiny --stages 1,2 --prompts 2048 --chunk 256 --kv-cache-gib 0.05
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

from base.clock import SystemClock
from base.config import EngineConfig
from base.request import RequestId, StopParams
from bench.about_run import about_run, write_result
from bench.engine_work import GREEDY, ROOT, run_to_end, stepping
from bench.shapes import about, profile_of, write_model
from deploy.plan import chunk_attention
from engine.build import Engine, build_engine
from engine.sequence import Sequence
from engine.step import SequenceOutput

RATES = ("short_prompts_per_s", "short_prompts_per_s_at_load")
"""Keys of a row that hold rates."""


def prompt_of(length: int, vocab_size: int, rng: random.Random) -> list[int]:
    """Return a prompt whose first block nobody has computed before."""
    return [rng.randrange(vocab_size) for _ in range(length)]


async def first_tokens(engine: Engine, prompts: Items[list[int]]) -> list[float]:
    """Hand over all prompts at once; return the seconds until each one's first token, the last one's last."""
    came_after_s = []

    def heard(output: SequenceOutput) -> None:
        if output.finish_reason is not None:
            came_after_s.append(time.perf_counter() - started_s)

    stop, started_s = StopParams(max_tokens=1), time.perf_counter()
    sequences = [
        Sequence(RequestId(f"r{index}"), prompt, len(prompt), ROOT, GREEDY, stop)
        for index, prompt in enumerate(prompts)
    ]
    await run_to_end(engine.loop, sequences, heard)
    return came_after_s


def at_load(came_after_s: Items[float]) -> float:
    """Return prompts a second between the first tenth of them and the last."""
    tenth = len(came_after_s) // 10
    begin_s, end_s = came_after_s[tenth], came_after_s[-1 - tenth]
    return sum(begin_s < at_s <= end_s for at_s in came_after_s) / (end_s - begin_s)


async def measure(engine: Engine, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return the medians of one engine."""
    rng = random.Random(seed)
    row: dict[str, Any] = {"stages": options.now, "ttft_s": {}}
    for length in options.prompts:
        # The first is a warm-up: kernels compile, links are made.
        times = [
            (await first_tokens(engine, [prompt_of(length, engine.vocab_size, rng)]))[-1]
            for _ in range(options.repeats + 1)
        ][1:]
        row["ttft_s"][str(length)] = statistics.median(times)
        print(f"{options.now} stages, {length:,} tokens: {row['ttft_s'][str(length)]:.3f} s", flush=True)
    rates, rates_at_load = [], []
    for _ in range(options.repeats + 1):
        short = [
            prompt_of(options.short, engine.vocab_size, rng) for _ in range(options.short_count * options.now)
        ]
        came_after_s = await first_tokens(engine, short)
        rates.append(len(short) / came_after_s[-1])
        rates_at_load.append(at_load(came_after_s))
    row["short_prompts_per_s"] = statistics.median(rates[1:])
    row["short_prompts_per_s_at_load"] = statistics.median(rates_at_load[1:])
    return row


async def _measured(engine: Engine, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    async with stepping(engine.loop):
        return await measure(engine, options, seed)


def measure_stages(options: argparse.Namespace, folder: Path, stages: int) -> dict[str, Any]:
    """Build an engine of so many stages, measure it, and end it."""
    options.now = stages
    config = EngineConfig(
        chunk_tokens=options.chunk,
        kv_cache_gib=options.kv_cache_gib,
        max_batch=64,
        random_weights=True,
        threads=options.threads,
        pipeline_parallel=stages,
    )
    config = replace(config, chunk_attention=chunk_attention(config, profile_of(options.model)))
    if options.split:
        splits = {len(split): split for split in options.split}
        config = replace(config, stage_layers=splits.get(stages, ()))
    engine = build_engine(config, str(folder), SystemClock(), rank_module="bench.built_rank")
    try:
        return asyncio.run(_measured(engine, options, seed=stages))
    finally:
        if engine.ranks is not None:
            engine.ranks.close()


def in_processes(arguments: Items[str], stages: int, count: int) -> dict[str, Any]:
    """Return the mean of what `count` runs of this bench, all at once, say of one number of stages.

    Each is a process; of more than one, each has a GPU of its own. A process gives the GPUs' memory back
    as nothing else does: links to ranks that have ended can hang whoever collects them.
    """
    with tempfile.TemporaryDirectory() as made:
        outs = [Path(made) / f"{index}.json" for index in range(count)]
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.cpp", *arguments, "--stages", str(stages), "--out", str(out)],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": str(index)} if count > 1 else None,
            )
            for index, out in enumerate(outs)
        ]
        if any([process.wait() for process in running]):
            raise RuntimeError(f"{stages} stages could not be measured; see above")
        rows: list[dict[str, Any]] = [json.loads(out.read_text())["rows"][0] for out in outs]
    mean = rows[0] | {rate: statistics.mean(row[rate] for row in rows) for rate in RATES}
    mean["ttft_s"] = {
        length: statistics.mean(row["ttft_s"][length] for row in rows) for length in rows[0]["ttft_s"]
    }
    return mean | ({"of_each": rows} if count > 1 else {})


def compared(rows: list[dict[str, Any]]) -> None:
    """Add to each row what it is of one stage's."""
    base = next((row for row in rows if row["stages"] == 1), None)
    for row in rows:
        if base is None or row is base:
            continue
        row["ttft_ratio"] = {
            length: round(value / base["ttft_s"][length], 4) for length, value in row["ttft_s"].items()
        }
        row["short_ratios"] = {rate: round(row[rate] / (row["stages"] * base[rate]), 4) for rate in RATES}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cpp", description=__doc__)
    numbers = lambda text: tuple(map(int, text.split(",")))  # noqa: E731
    parser.add_argument("--model", default="8b", help="8b, 0.6b or tiny")
    parser.add_argument("--stages", type=numbers, default=(1, 2))
    parser.add_argument("--split", type=numbers, action="append", help="layers of each stage, such as 17,15")
    parser.add_argument("--prompts", type=numbers, default=(32_768, 131_072))
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--short", type=int, default=512)
    parser.add_argument("--short-count", type=int, default=64, help="for each stage")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--kv-cache-gib", type=float, default=0.0)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    arguments = sys.argv[1:]
    options = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "model"
        write_model(options.model, folder, max(options.prompts) + 1)
        for stages in options.stages:
            if len(options.stages) == 1:
                rows.append(measure_stages(options, folder, stages))
            else:
                count = max(options.stages) if stages == 1 else 1
                rows.append(in_processes(arguments, stages, count))
            compared(rows)
            print(json.dumps(rows[-1]), flush=True)
    report = {**about_run("torch"), **about(options.commit), "chunk": options.chunk, "rows": rows}
    write_result(options.out, report)
    sys.stdout.flush()
    os._exit(0)  # without destructors: see `in_processes`


if __name__ == "__main__":
    main()
