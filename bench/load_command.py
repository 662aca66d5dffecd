"""`conductor bench`: open-loop load on a running cluster, or on any server of the OpenAI API."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from base.errors import ConfigError
from bench.load import LoadRun, run_load, warm_up
from bench.load_report import parse_goodput, report, table
from bench.sse_client import Server
from bench.workload import LoadRequest, gamma_arrivals, num_turns, sessions, synthetic_load, trace_load
from conductor.replay.trace_formats import read_trace


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="conductor bench",
        description="Measure a server under open-loop load: requests come when they are due.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server, with or without /v1")
    add("--model", default="smollm2", help="the name it is served under")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="sent as a bearer token")
    add("--requests", type=int, help="how many (100); with a trace: its first (all)")
    add("--rate", type=float, default=1.0, help="requests a second in the mean; inf: all at once")
    add("--burstiness", type=float, default=1.0, help="1: Poisson; less: bursts; more: even")
    add("--input-tokens", type=int, default=512, help="of a prompt, shared prefix included")
    add("--output-tokens", type=int, default=64, help="of an answer")
    add("--shared-prefix-tokens", type=int, default=0, help="with which all prompts begin")
    add(
        "--turns", type=int, default=1, help="requests of each session, each with all before it in its prompt"
    )
    add("--think", type=float, default=1.0, help="seconds from an answer to the session's next turn")
    add("--trace", type=Path, help="a Mooncake trace: arrivals, lengths, shared prefixes")
    add("--speed", type=float, default=1.0, help="the trace's times are divided by it")
    add("--block-tokens", type=int, help="for each hash id, instead of the trace's: scales lengths too")
    add("--max-concurrency", type=int, help="requests at once; without it, no bound")
    add("--warm-up", type=int, default=2, metavar="N", help="requests sent before, not counted")
    add("--goodput", metavar="BOUNDS", help="in seconds, as ttft:0.5,tbt:0.05")
    add("--seed", type=int, default=0, help="of arrivals and prompts")
    add("--report", type=Path, metavar="FILE", help="JSON, with the keys of `vllm bench serve`")
    add("--json", action="store_true", help="print that JSON instead of the table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 1 if nothing was served."""
    options = make_parser().parse_args(argv)
    try:
        bounds = parse_goodput(options.goodput) if options.goodput else None
        run = asyncio.run(_run(options, list(_load(options))))
    except (ConfigError, ValueError) as error:
        print(f"conductor bench: {error}", file=sys.stderr)
        return 2
    figures = report(run, bounds, _setting(options, len(run.outcomes)))
    if options.report is not None:
        options.report.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures) if options.json else table(figures))
    return 0 if figures["completed"] else 1


def _load(options: argparse.Namespace) -> Iterable[LoadRequest]:
    if options.trace is not None:
        return trace_load(read_trace(options.trace), options.speed, options.requests, options.block_tokens)
    if not 0 <= options.shared_prefix_tokens < options.input_tokens:
        raise ValueError("--shared-prefix-tokens: less than --input-tokens")
    if options.rate <= 0 or options.burstiness <= 0:
        raise ValueError("--rate, --burstiness: more than 0")
    if options.turns < 1 or options.think < 0:
        raise ValueError("--turns: at least 1; --think: not negative")
    rng = random.Random(options.seed)
    load = synthetic_load(
        100 if options.requests is None else options.requests,
        gamma_arrivals(options.rate, options.burstiness, rng),
        options.input_tokens,
        options.output_tokens,
        options.shared_prefix_tokens,
        rng,
    )
    return sessions(load, options.turns, options.think, rng)


async def _run(options: argparse.Namespace, load: list[LoadRequest]) -> LoadRun:
    server = Server(options.url, options.model, options.api_key)
    await warm_up(server, options.warm_up, options.input_tokens)
    total = sum(map(num_turns, load))
    with Console(stderr=True).status("") as shown:

        def progress(answered: int) -> None:
            shown.update(f"{answered} of {total} answered")

        return await run_load(server, load, options.max_concurrency, progress)


def _setting(options: argparse.Namespace, num_prompts: int) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai",
        "model_id": options.model,
        "num_prompts": num_prompts,
        "request_rate": "inf" if options.rate == float("inf") else options.rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "trace": options.trace.name if options.trace else None,
        "seed": options.seed,
    }
