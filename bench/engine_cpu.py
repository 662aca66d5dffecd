"""`python -m bench.engine_cpu`: our engine against transformers' `generate_batch`, on this CPU.

8 requests of 200 tokens in and 64 out, all at once, SmolLM2 in float32, prompts that share
nothing. The two run in turn in one process, so that a noisy machine disturbs both alike;
what counts is the ratio of the medians. Loading and a warm-up of each are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from base.block_hash import chain_root
from base.clock import SystemClock
from base.config import EngineConfig
from base.request import RequestId, StopParams
from bench.about_run import about_run, write_result
from bench.engine_work import GREEDY, run_to_end, stepping
from bench.local_cluster import smollm2
from engine.build import Engine, build_engine
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Workload:
    """What both are asked for."""

    num_requests: int
    prompt_tokens: int
    new_tokens: int

    def prompts(self, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        return [
            [rng.randrange(100, 40_000) for _ in range(self.prompt_tokens)] for _ in range(self.num_requests)
        ]


async def run_ours(engine: Engine, workload: Workload, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of each prompt; the engine is empty afterwards."""
    root, stop = chain_root(str(prompts[0][0]), "bench"), StopParams(workload.new_tokens)
    sequences = [
        Sequence(RequestId(f"{index:03}"), list(prompt), len(prompt), root, GREEDY, stop)
        for index, prompt in enumerate(prompts)
    ]
    async with stepping(engine.loop):
        await run_to_end(engine.loop, sequences)
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


def run_theirs(model: AutoModelForCausalLM, workload: Workload, prompts: list[list[int]]) -> list[list[int]]:
    """As `run_ours`."""
    config = GenerationConfig(
        max_new_tokens=workload.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    outputs = model.generate_batch(prompts, generation_config=config, warmup=False)
    return [output.generated_tokens for output in outputs.values()]


async def measure(workload: Workload, rounds: int, threads: int) -> dict[str, object]:
    prepared = smollm2()
    config = EngineConfig(device="cpu", threads=threads, kv_cache_gib=0.5)
    engine = build_engine(config, prepared.path, SystemClock())
    theirs = AutoModelForCausalLM.from_pretrained(
        prepared.path, dtype=torch.float32, attn_implementation="sdpa"
    )
    seconds: dict[str, list[float]] = {"ours": [], "generate_batch": []}
    equal = 0
    # The first round is a warm-up and a small one.
    for index, asked in enumerate([Workload(2, 32, 4), *[workload] * rounds]):
        prompts = asked.prompts(seed=index)
        begin = time.perf_counter()
        our_tokens = await run_ours(engine, asked, prompts)
        middle = time.perf_counter()
        their_tokens = run_theirs(theirs, asked, prompts)
        end = time.perf_counter()
        print(f"round {index}: ours {middle - begin:.2f} s, generate_batch {end - middle:.2f} s")
        if index:
            seconds["ours"].append(middle - begin)
            seconds["generate_batch"].append(end - middle)
            equal += sum(a == b for a, b in zip(our_tokens, their_tokens, strict=True))
    return report(workload, seconds, equal / (rounds * workload.num_requests))


def report(workload: Workload, seconds: dict[str, list[float]], equal: float) -> dict[str, object]:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    out_tokens = workload.num_requests * workload.new_tokens
    return {
        "bench": "engine_cpu",
        "about": about_run("torch", "transformers"),
        "threads": torch.get_num_threads(),
        "workload": {
            "requests": workload.num_requests,
            "in": workload.prompt_tokens,
            "out": workload.new_tokens,
        },
        "seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "output_tokens_per_s": {name: round(out_tokens / value, 1) for name, value in medians.items()},
        "ratio": round(medians["generate_batch"] / medians["ours"], 3),
        "equal_outputs": equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine_cpu", description=__doc__)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results/engine_cpu.json"))
    arguments = parser.parse_args()
    workload = Workload(arguments.requests, arguments.prompt_tokens, arguments.new_tokens)
    result = asyncio.run(measure(workload, arguments.rounds, arguments.threads))
    write_result(arguments.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
