"""`python -m bench.goodput`: the highest rate of requests that a cluster serves within its bounds.

For each shape (`1p1d`, `2p2d`, `2c` for two colocated nodes of our own; `@1024` sets the chunk, which
colocated steps then have whatever decodes in them) the real processes are started, and an open loop of
requests is sent at rising rates. At each rate, and for each pair of bounds on TTFT and TPOT (the mean gap of
a request), the share of requests that meet both is counted; goodput is the highest rate at which 90 % do,
between two tried rates in proportion. Prompts are random: no prefix is ever found. With `--trace` they are a
trace's first, with the prefixes that they share, at the rate and cut to `--input-tokens`. Beside that stand,
from the nodes' metrics, the share of time that they were busy, what was seen of hand-offs, and what was
computed for nobody. `--out X.json` has a plot for each pair of bounds beside it, `X_10ms.svg`. Rates stop
rising when hardly anybody meets the widest bounds. With `--slo` each request names its bounds, and one that
is predicted to miss them is refused, which counts as missed.

    python -m bench.goodput --shapes 1p1d,2c,2c@512 --rates 2,3,4 --out bench/results/goodput.json
    python -m bench.goodput --shapes 4c,2p2d --trace conversation_trace.jsonl --input-tokens 32768 \\
        --max-model-len 40960 --bounds 2:0.01 --slo 2:0.01 --rates 2,3,4,5,6 --seconds 40

vLLM's figures beside ours are of one H200 and the same load (8,192 in, 256 out, 0.26.0, its
better chunk of 512 and 2,048, measured through its engine without HTTP).
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from bench.about_run import write_result
from bench.load import run_load, warm_up
from bench.load_report import Goodput, report
from bench.local_cluster import LocalCluster
from bench.node_counts import figures_between, node_counts
from bench.papers.chart import chart
from bench.shapes import Shape, about, limits_of, options_parser, parse_shape, running
from bench.sse_client import Outcome, Server
from bench.workload import LoadRequest, gamma_arrivals, synthetic_load, trace_at, trace_load
from conductor.replay.trace import Trace
from conductor.replay.trace_formats import read_trace

ENOUGH = 0.9
HOPELESS = 0.3
"""Share within the widest bounds below which no higher rate is tried."""
VLLM_PER_GPU = {8.0: 1.0, 15.0: 1.7, 30.0: 2.6}
"""Requests a second by bound on TPOT in ms, TTFT < 2 s, with this load."""
VLLM_LOAD = {"input_tokens": 8192, "output_tokens": 256}
KEPT = (
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "cached_input_tokens",
    "output_throughput",
    "max_send_delay_ms",
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl") for kind in ("mean", "median", "p90", "p99")),
    "errors",
)


@dataclass(frozen=True, slots=True)
class Tried:
    """One rate, and the share of its requests within each pair of bounds."""

    rate: float
    shares: tuple[float, ...]
    figures: dict[str, Any]


def goodput(rates: Sequence[float], shares: Sequence[float], enough: float = ENOUGH) -> float:
    """Return the highest rate at which a share of `enough` is met; 0 if the lowest is too much.

    Rates rise. Between the last rate that is met and the first that is not, in proportion; a
    rate past that is luck and not counted. Where all are met, the highest.
    """
    met = 0.0
    met_share = 1.0
    for rate, share in zip(rates, shares, strict=True):
        if share < enough:
            return met + (rate - met) * (met_share - enough) / (met_share - share) if met else 0.0
        met, met_share = rate, share
    return met


def share_within(outcomes: Sequence[Outcome], bounds: Goodput) -> float:
    """Return the share of all requests, failed ones included, that were served within bounds."""
    return sum(not item.error and bounds.is_met_by(item) for item in outcomes) / len(outcomes)


def load_at(rate: float, num_requests: int, input_tokens: int, output_tokens: int) -> list[LoadRequest]:
    """Return random prompts of one length with Poisson arrivals, the same for the same rate."""
    rng = random.Random(rate)
    times_s = gamma_arrivals(rate, 1.0, rng)
    return list(synthetic_load(num_requests, times_s, input_tokens, output_tokens, 0, rng))


def copy_of(rate: float) -> int:
    """Return the trace's copy that is sent at a rate, which no other tried rate has."""
    return round(100 * rate)


def headers_of(slo: Goodput | None) -> tuple[tuple[str, str], ...]:
    """Return how a request names its bounds."""
    if slo is None:
        return ()
    return (("x-slo-ttft-ms", f"{1e3 * slo.ttft_s:g}"), ("x-slo-tpot-ms", f"{1e3 * slo.tbt_s:g}"))


async def try_rate(
    cluster: LocalCluster,
    server: Server,
    rate: float,
    options: argparse.Namespace,
    trace: Trace | None,
    bounds: Sequence[Goodput],
) -> Tried:
    """Send the load at one rate and wait for all answers."""
    num_requests = max(options.min_requests, round(rate * options.seconds))
    if trace is None:
        load = load_at(rate, num_requests, options.input_tokens, options.output_tokens)
    else:
        cut = trace_at(trace, rate, num_requests, options.input_tokens, copy_of(rate))
        load = list(trace_load(cut, 1.0, None, None))
    outcomes, figures = await driven(cluster, server, load)
    return Tried(rate, tuple(share_within(outcomes, pair) for pair in bounds), figures)


async def driven(
    cluster: LocalCluster, server: Server, load: Iterable[LoadRequest]
) -> tuple[list[Outcome], dict[str, Any]]:
    """Send a load and wait for all answers; return them, and the figures of them and of the nodes."""
    before = await asyncio.to_thread(node_counts, cluster)
    run = await run_load(server, load, None, lambda answered: None)
    reported = report(run, None, {})
    done = figures_between(before, await asyncio.to_thread(node_counts, cluster), reported)
    return run.outcomes, {key: reported[key] for key in KEPT if key in reported} | done


async def try_rates(
    cluster: LocalCluster, options: argparse.Namespace, bounds: Sequence[Goodput]
) -> list[Tried]:
    """Send rising rates until hardly anybody is served within the widest bounds."""
    server = Server(cluster.url, options.model, headers=headers_of(options.slo))
    trace = read_trace(options.trace) if options.trace else None
    # Long and short ones: every kernel that the load needs is compiled before it is timed.
    unbounded = replace(server, headers=())
    await warm_up(unbounded, 2, options.input_tokens)
    await warm_up(unbounded, 2, 200)
    tried = []
    for rate in options.rates:
        tried.append(await try_rate(cluster, server, rate, options, trace, bounds))
        print(line(tried[-1], bounds), flush=True)
        if max(tried[-1].shares) < HOPELESS:
            break
    return tried


def line(tried: Tried, bounds: Sequence[Goodput]) -> str:
    """Return one rate as a line of text."""
    figures = tried.figures
    shares = ", ".join(
        f"{share:.2f} within {pair.ttft_s:g} s/{1e3 * pair.tbt_s:g} ms"
        for share, pair in zip(tried.shares, bounds, strict=True)
    )
    spread = "; ".join(
        f"{name} " + "/".join(f"{figures[f'{kind}_{name}_ms']:.1f}" for kind in ("median", "p90", "p99"))
        for name in ("ttft", "tpot", "itl")
        if f"median_{name}_ms" in figures
    )
    spread += (
        f"; hits {figures['hit_rate']:.0%}; exposed transfer {figures['exposed_transfer_ms']:.2f} ms; busy "
    )
    spread += ", ".join(f"{pool} {share:.0%}" for pool, share in figures["busy_share"].items())
    spread += f"; wasted prefill {figures['wasted_prefill_share']:.0%}"
    failed = f"; {figures['failed']} failed: {figures['errors']}" if figures["failed"] else ""
    return f"  {tried.rate:5.2f} req/s: {shares}; ms p50/p90/p99: {spread}{failed}"


def measure(shape: Shape, options: argparse.Namespace, bounds: Sequence[Goodput]) -> dict[str, Any]:
    """Run one shape's cluster and return its figures."""
    with running(options.model, shape, limits_of(options), options.logs) as cluster:
        tried = uvloop.run(try_rates(cluster, options, bounds))
    rates = [item.rate for item in tried]
    shares = [[item.shares[index] for item in tried] for index in range(len(bounds))]
    return {
        "shape": shape.name,
        "gpus": shape.prefill * options.stages + shape.decode,
        "goodput": [goodput(rates, of_pair) for of_pair in shares],
        "goodput_of_99": [goodput(rates, of_pair, 0.99) for of_pair in shares],
        "tried": [asdict(t) for t in tried],
    }


def table(results: Sequence[dict[str, Any]], bounds: Sequence[Goodput], with_vllm: bool) -> str:
    """Return goodput by shape and bounds, and what a GPU of vLLM does of the load it was measured with."""
    heads = [f"{pair.ttft_s:g} s/{1e3 * pair.tbt_s:g} ms" for pair in bounds]
    lines = [f"{'goodput, req/s':22}" + "".join(f"{head:>14}" for head in heads)]
    for result in results:
        for key, name in (("goodput", ""), ("goodput_of_99", ", 99 %")):
            row = f"{result['shape'] + name:22}"
            lines.append(row + "".join(f"{value:14.2f}" for value in result[key]))
    if with_vllm:
        known = [VLLM_PER_GPU.get(round(1e3 * pair.tbt_s, 3), float("nan")) for pair in bounds]
        lines.append(f"{'a GPU of vLLM 0.26.0':22}" + "".join(f"{value:14.2f}" for value in known))
    return "\n".join(lines)


def plot(results: Sequence[dict[str, Any]], bounds: Sequence[Goodput], index: int) -> str:
    """Return an SVG: the share of requests within one pair of bounds, by rate, with a line for each shape."""
    pair = bounds[index]
    lines = [
        (result["shape"], [(tried["rate"], tried["shares"][index]) for tried in result["tried"]])
        for result in results
    ]
    heading = f"Share of requests within {pair.ttft_s:g} s and {1e3 * pair.tbt_s:g} ms a token"
    return chart(heading, f"requests a second; {heading[0].lower()}{heading[1:]}", lines, is_file=True)


def parse_bounds(text: str) -> list[Goodput]:
    """Read `2:0.008,2:0.015`: seconds of TTFT and of TPOT."""
    pairs = [part.split(":") for part in text.split(",")]
    return [Goodput(float(ttft), float(tpot)) for ttft, tpot in pairs]


def bound(pair: Goodput) -> dict[str, float]:
    """Return a pair of bounds as it stands in the result."""
    return {"ttft_s": pair.ttft_s, "tpot_s": pair.tbt_s}


def make_parser() -> argparse.ArgumentParser:
    parser = options_parser(__doc__, max_model_len=16_384)
    add = parser.add_argument
    add("--shapes", default="1p1d,2c")
    add("--rates", type=lambda text: [float(part) for part in text.split(",")], default=[1, 2, 3, 4, 5])
    add("--bounds", type=parse_bounds, default=parse_bounds("2:0.008,2:0.015,2:0.03"))
    add("--slo", type=lambda text: parse_bounds(text)[0], help="a pair of bounds that each request names")
    add("--seconds", type=float, default=20.0, help="of arrivals at each rate")
    add("--min-requests", type=int, default=30, help="at each rate")
    add("--input-tokens", type=int, default=8192, help="of each prompt; with a trace: the most")
    add("--output-tokens", type=int, default=256)
    add("--trace", type=Path, help="its arrivals, lengths and shared prefixes, instead of random prompts")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    load = {"input_tokens": options.input_tokens, "output_tokens": options.output_tokens}
    if options.trace:
        load["trace"] = options.trace.name
    if options.slo:
        load["slo"] = bound(options.slo)
    reported: dict[str, Any] = {
        "model": options.model,
        **load,
        "has_budgets": True,
        "follows_load": options.roles == "follow",
        **about(options.commit),
    }
    reported["bounds"] = [bound(pair) for pair in options.bounds]
    results: list[dict[str, Any]] = []
    for shape in map(parse_shape, options.shapes.split(",")):
        results.append(measure(shape, options, options.bounds))
        print(table(results, options.bounds, load == VLLM_LOAD), flush=True)
        if options.out:
            write_result(options.out, {**reported, "shapes": results})
            for index, pair in enumerate(options.bounds):
                name = f"{options.out.stem}_{1e3 * pair.tbt_s:g}ms.svg"
                options.out.with_name(name).write_text(plot(results, options.bounds, index) + "\n")


if __name__ == "__main__":
    main()
