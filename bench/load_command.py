"""`conductor bench`: load on a running cluster, or on any server of the OpenAI API, open or by sessions."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from base.errors import ConfigError
from base.option_values import real, require_writable, whole
from bench.load import LoadRun, run_load, warm_up
from bench.load_report import parse_goodput, report, table
from bench.shown_defaults import ShownDefaults
from bench.sse_client import Server
from bench.workload import LoadRequest, gamma_arrivals, num_turns, sessions, synthetic_load, trace_load
from conductor.replay.command import name_bad_rows
from conductor.replay.trace_formats import FORMATS, read_trace
from conductor.replay.trace_rows import MAX_TOKENS


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="conductor bench",
        description="Measure a server under open-loop load: requests come when they are due.",
        formatter_class=ShownDefaults,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server, with or without /v1")
    add("--model", default="smollm2", help="the name it is served under")
    add("--api-key", default="", help="sent as a bearer token; else what OPENAI_API_KEY holds")
    count, factor, positive = whole(1, 1 << 40), real(0, 1e6, above=True), real(0, 1e9, above=True)
    add("--requests", type=count, help="how many (100); with a trace: its first, or first sessions (all)")
    every = real(0, above=True, finite=False)
    add("--rate", type=every, default=1.0, help="requests a second in the mean; inf: all at once")
    add("--burstiness", type=positive, default=1.0, help="1: Poisson; less: bursts; more: even")
    add("--input-tokens", type=whole(1, MAX_TOKENS), default=512, help="of a prompt, shared prefix included")
    add("--output-tokens", type=whole(1, MAX_TOKENS), default=64, help="of an answer")
    shared = whole(0, MAX_TOKENS)
    add("--shared-prefix-tokens", type=shared, default=0, help="with which all prompts begin")
    turns = "requests of each session, each with all before it in its prompt"
    add("--turns", type=whole(1, 10_000), default=1, help=turns)
    add("--think", type=real(0, 1e9), default=1.0, help="seconds from an answer to the session's next turn")
    add("--trace", type=Path, help="arrivals, lengths, shared prefixes, sessions: any file that replay reads")
    add("--format", choices=FORMATS, help="of the trace, where its rows do not show it")
    add("--block-size", type=whole(1, 1 << 20), metavar="N", help="tokens per hash id of the trace")
    add("--skip-bad", action="store_true", help="pass over bad rows instead of stopping")
    add("--speed", type=factor, default=1.0, help="the trace's times are divided by it")
    add("--sessions", type=count, metavar="N", help="at a time, the next when one ends, whatever their times")
    add("--session-rate", type=factor, metavar="R", help="a trace's sessions that begin a second")
    tokens = whole(1, 1 << 20)
    add("--block-tokens", type=tokens, help="for each hash id, instead of the trace's: scales lengths too")
    add("--max-concurrency", type=count, help="requests at once; without it, no bound")
    warm_up_help = "requests sent before, not counted"
    add("--warm-up", type=whole(0, 10_000), default=2, metavar="N", help=warm_up_help)
    add("--goodput", metavar="BOUNDS", help="in seconds, as ttft:0.5,tbt:0.05")
    add("--seed", type=whole(0, 1 << 40), default=0, help="of arrivals and prompts")
    add("--report", type=Path, metavar="FILE", help="JSON, with the keys of `vllm bench serve`")
    add("--json", action="store_true", help="print that JSON instead of the table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 1 if nothing was served."""
    options = make_parser().parse_args(argv)
    try:
        bounds = parse_goodput(options.goodput) if options.goodput else None
        if options.report is not None:
            require_writable("--report", options.report)
        run = uvloop.run(_run(options, list(_load(options))))
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
        trace = read_trace(options.trace, options.block_size, options.skip_bad, options.format)
        name_bad_rows(trace)
        return trace_load(
            trace,
            options.speed,
            options.requests,
            options.block_tokens,
            options.session_rate,
            options.seed,
        )
    if not 0 <= options.shared_prefix_tokens < options.input_tokens:
        raise ValueError("--shared-prefix-tokens: less than --input-tokens")
    if options.session_rate is not None:
        raise ValueError("--session-rate: of a trace; without one --rate says it")
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
    server = Server(options.url, options.model, options.api_key or os.environ.get("OPENAI_API_KEY", ""))
    await warm_up(server, options.warm_up, options.input_tokens)
    total = sum(map(num_turns, load))
    with Console(stderr=True).status("") as shown:

        def progress(answered: int) -> None:
            shown.update(f"{answered} of {total} answered")

        return await run_load(server, load, options.max_concurrency, progress, options.sessions)


def _setting(options: argparse.Namespace, num_prompts: int) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai",
        "model_id": options.model,
        "num_prompts": num_prompts,
        "request_rate": "inf" if options.rate == float("inf") else options.rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "sessions": options.sessions,
        "trace": options.trace.name if options.trace else None,
        "seed": options.seed,
    }
