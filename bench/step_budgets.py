"""`python -m bench.step_budgets`: steps that follow slack, in replay, against every static split and chunk.

Two GPUs of one profile serve each load at rising rates, and goodput is the rate at which 90 % of all requests
are within 2 s and a bound on TPOT: two nodes of both roles, with budgets and with whole chunks of any length;
and one prefill node and one decode node, whose roles follow the load or are fixed. Sixteen serve the
conversation trace. No node has a store, as those of `bench.step_budgets_live` have none. Of the burst it is
the share that was served. Arrivals are one Poisson sequence, stretched to each rate, so that more requests a
second are never an easier sequence. `--out` keeps all of it, and what the file has of other loads and shapes.

Of a run no more is kept than what is said of it, so that it takes as much memory as its longest run.

    python -m bench.step_budgets --out bench/results/step_budgets.json
"""

from __future__ import annotations

import argparse
import json
import random
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from base.config import SchedulerConfig
from base.request import Slo
from bench.about_run import current_commit, today, write_result
from bench.gap_counts import GapCounts
from bench.shapes import Shape, parse_shape
from conductor.placing.cost_model import CostModel
from conductor.placing.prefill_policies import scheduler_settings
from conductor.placing.scheduler_settings import RejectPolicy
from conductor.profiles.reader import load_profile
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.outcome import Outcomes
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import Trace, TraceRequest, linked
from conductor.replay.trace_formats import read_trace

BLOCK = 64
TTFT_S = 2.0
BOUNDS_S = (0.008, 0.015, 0.03, 0.05)
ENOUGH = 0.9
SHORTER = 4
"""Runs of short prompts, of which there are many more a second, are so many times shorter."""
CLOSE = 0.02
"""Goodput is found to so much of itself."""
MOST = 256.0
"""No load is driven so many times faster than it begins: it would come all at once."""
UNCLEAR = 0.05
"""A share that is closer to enough than this may be on either side of it by chance."""
NEAR = 0.01
"""Distance of the two other rates that are looked at then, as a part of the rate."""
SHAPES = ("1p1d", "2c", "2c@512", "2c@1024", "2c@2048", "2c@8192", "1p1d@8192")
"""Shapes of two nodes. Those without a chunk have budgets, and no setting of theirs is changed for any
load or bound. The first one's roles follow the load; those of `1p1d@8192` are fixed."""
SPLITS = (
    "8p8d",
    "16c",
    "16c@512",
    "16c@2048",
    "4p12d@8192",
    "6p10d@8192",
    "8p8d@8192",
    "10p6d@8192",
    "12p4d@8192",
)
"""The same of sixteen nodes."""
FOLLOWING = (SHAPES[0], SPLITS[0])
"""Shapes whose roles follow the load, each with any load."""
LONGEST_CHUNK = 8192

Load = Callable[[float], Trace]
"""Makes a load of so many requests a second."""


@dataclass(frozen=True, slots=True)
class Found:
    """What became of one run."""

    share: float
    ttft_s: tuple[float, float, float]
    """Half, 90 and 99 of a hundred are sooner."""
    gap_s: tuple[float, float, float]
    """The same of gaps, to a quarter of a hundredth (`bench/gap_counts.py`)."""


def alike(input_tokens: int, output_tokens: int, seconds: float) -> Load:
    """Return prompts of one length that share nothing, arriving for so long."""
    num_blocks = -(-input_tokens // BLOCK)

    def at(rate: float) -> Trace:
        rng, at_s = random.Random(7), 0.0
        rows: list[TraceRequest] = []
        while (at_s := at_s + rng.expovariate(1.0) / rate) < seconds:
            first = len(rows) * num_blocks
            rows.append(TraceRequest(at_s, input_tokens, output_tokens, range(first, first + num_blocks)))
        return Trace("load", BLOCK, rows)

    return at


def chats(seconds: float, longest_tokens: int = 24_000) -> Load:
    """Return chats that grow: 100 to 4,000 new tokens a turn, 200 back, a pause, and again up to a length.

    The rate is of chats that begin, for so long.
    """

    def chat(rng: random.Random, first_block: int, arrival_s: float) -> TraceRequest:
        lengths, tokens = [], 0
        while tokens < longest_tokens:
            tokens += int(np.exp(rng.uniform(np.log(100), np.log(4000))))
            lengths.append(tokens)
            tokens += 200
        # drawn from the last turn on: those of the chats that results were measured with
        pauses_s = [rng.uniform(5.0, 15.0) for _ in lengths[1:]]
        return linked(
            [
                TraceRequest(begins_s, length, 200, range(first_block, first_block - (-length // BLOCK)))
                for begins_s, length in zip([arrival_s, *reversed(pauses_s)], lengths, strict=True)
            ]
        )

    def at(rate: float) -> Trace:
        rng = random.Random(11)
        rows: list[TraceRequest] = []
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(1.0) / rate) < seconds:
            # each chat's own dice: the same chats come at every rate
            rows.append(chat(random.Random(len(rows)), len(rows) * 1_000, at_s))
        return Trace("chats", BLOCK, rows)

    return at


def burst(peak: float, seconds: float = 300.0) -> Trace:
    """Return 8,000 tokens in and 1,000 out, 1 request a second to `peak` and back in `seconds`.

    That is more than two nodes can serve in time: who cannot be is refused, as a service does.
    """
    rng, at_s = random.Random(3), 0.0
    rows: list[TraceRequest] = []
    while at_s < seconds:
        rate = 1.0 + (peak - 1.0) * (1.0 - abs(2 * at_s / seconds - 1.0))
        at_s += rng.expovariate(rate)
        number = len(rows)
        rows.append(TraceRequest(at_s, 8_000, 1_000, range(number * 125, number * 125 + 125)))
    return Trace("burst", BLOCK, rows)


def cost_of(profile: str) -> CostModel:
    """Return the costs of nodes as they are measured live: without a store."""
    return CostModel(load_profile(profile).without_store())


def run(
    shape: Shape,
    trace: Trace,
    cost: CostModel,
    bound_s: float,
    reject: RejectPolicy = RejectPolicy.NONE,
    longest_gap_s: float = inf,
    max_batch: float = inf,
    gaps: GapCounts | None = None,
) -> Outcomes:
    """Serve a trace on the nodes of a shape; each request names its bounds, and its gaps come to `gaps`."""
    has_chunk = "@" in shape.name
    roles = "follow" if shape.decode and not has_chunk else "fixed"
    options = ClusterOptions(
        shape.prefill,
        shape.decode,
        trace.block_size,
        settings=replace(scheduler_settings(SchedulerConfig(roles=roles)), reject=reject),
        learns=True,
        chunk_tokens=shape.chunk_tokens if has_chunk else LONGEST_CHUNK,
        step_budgets=shape.has_budgets,
        slo=Slo(TTFT_S, bound_s, longest_gap_s),
        max_batch=max_batch,
        on_gaps=gaps.add if gaps is not None else None,
        decode_caches=True,
    )
    return simulate(Plan(trace, cost, options)).outcomes


def found_in(outcomes: Outcomes, gaps: GapCounts, bound_s: float) -> Found:
    """Return what a run comes to by one bound."""
    gap_s = gaps.percentile_s
    ttft_s = [float(np.percentile(outcomes.ttft_s or [0.0], percent)) for percent in (50, 90, 99)]
    return Found(
        outcomes.served_share_within(TTFT_S, bound_s),
        (ttft_s[0], ttft_s[1], ttft_s[2]),
        (gap_s(50), gap_s(90), gap_s(99)),
    )


def steady(serve: Callable[[float], Found], rate: float) -> Found:
    """Return the run at a rate; where its share is close to enough, with the mean share of three rates.

    A few requests that change places can lose or save a share of hundredths: one rate alone may be either.
    """
    found = serve(rate)
    if abs(found.share - ENOUGH) > UNCLEAR:
        return found
    near = (serve(rate * (1.0 + NEAR)).share, serve(rate * (1.0 - NEAR)).share)
    return replace(found, share=fmean((found.share, *near)))


def goodput(serve: Callable[[float], Found], first: float) -> tuple[float, Found]:
    """Return the highest rate at which enough are within bounds, by halving, and the run at it.

    The share is that of `steady`, the rest of the run at that very rate.
    """
    serve = partial(steady, serve)
    low, best, high = 0.0, None, first
    while (found := serve(high)).share >= ENOUGH:
        low, best, high = high, found, high * 1.5
        if high > MOST * first:
            return low, best
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        found = serve(middle)
        if found.share >= ENOUGH:
            low, best = middle, found
        else:
            high = middle
        if high < first / 64:
            return 0.0, found
    assert best is not None, "some rate was served"
    return low, best


def rows_of(
    name: str, load: Load, first: float, shapes: tuple[str, ...], cost: CostModel
) -> Iterator[dict[str, Any]]:
    """Yield one row for each bound and shape."""
    known: dict[tuple[str, float], list[Found]] = {}

    def serve(shape: Shape, bound_s: float, rate: float) -> Found:
        gaps = GapCounts()
        if "@" not in shape.name:
            return found_in(run(shape, load(rate), cost, bound_s, gaps=gaps), gaps, bound_s)
        # whole chunks are what they are, whatever the bounds
        if (shape.name, rate) not in known:
            outcomes = run(shape, load(rate), cost, bound_s, gaps=gaps)
            known[shape.name, rate] = [found_in(outcomes, gaps, bound) for bound in BOUNDS_S]
        return known[shape.name, rate][BOUNDS_S.index(bound_s)]

    for bound_s in BOUNDS_S:
        for shape in map(parse_shape, shapes):
            rate, found = goodput(partial(serve, shape, bound_s), first)
            yield _row(name, shape, bound_s, rate, found)


def _row(name: str, shape: Shape, bound_s: float, rate: float, found: Found) -> dict[str, Any]:
    return {
        "load": name,
        "shape": shape.name,
        "bound_s": bound_s,
        "rate": rate,
        "share": found.share,
        "ttft_s": found.ttft_s,
        "gap_s": found.gap_s,
        "commit": current_commit(),
    }


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each load and bound the goodput where roles follow, the best fixed one, and their ratio."""
    found = []
    for load, bound_s in dict.fromkeys((row["load"], row["bound_s"]) for row in rows):
        these = [row for row in rows if (row["load"], row["bound_s"]) == (load, bound_s)]
        ours = next((row for row in these if row["shape"] in FOLLOWING), None)
        others = [row for row in these if "@" in row["shape"]]
        if ours is None or not others:
            continue
        best = max(others, key=lambda row: row["rate"])
        found.append(
            {
                "load": load,
                "bound_ms": 1e3 * bound_s,
                "budgets": ours["rate"],
                "best": best["rate"],
                "best_shape": best["shape"],
                "ratio": ours["rate"] / best["rate"] if best["rate"] else inf,
                "gap_p99_ms": 1e3 * ours["gap_s"][2],
                "best_gap_p99_ms": 1e3 * best["gap_s"][2],
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", default="h200-llama8b")
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation trace, for `conversation`")
    parser.add_argument("--seconds", type=float, default=120.0, help="of arrivals in each run")
    parser.add_argument("--requests", type=int, default=2400, help="of the trace")
    parser.add_argument("--loads", default="8192/256,2048/512,256/256,chat,burst")
    parser.add_argument("--shapes", help="default: those of two nodes, and of 16 for the conversation trace")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cost = cost_of(options.profile)
    rows: list[dict[str, Any]] = []
    if options.out and options.out.exists():
        rows = json.loads(options.out.read_text())["rows"]
    for name in options.loads.split(","):
        shapes = tuple((options.shapes or ",".join(SPLITS if name == "conversation" else SHAPES)).split(","))
        rows = [row for row in rows if row["load"] != name or row["shape"] not in shapes]
        for row in _rows_of_load(name, shapes, cost, options):
            rows.append(row)
            print(
                f"{row['load']:14} {row['shape']:10} {1e3 * row['bound_s']:4.0f} ms: {row['rate']:6.2f}/s "
                f"({row['share']:.0%}); p90 TTFT {row['ttft_s'][1]:.2f} s, "
                f"p99 gap {1e3 * row['gap_s'][2]:.1f} ms",
                flush=True,
            )
        result = {
            "profile": options.profile,
            "seconds": options.seconds,
            "commit": current_commit(),
            "date": today(),
            "compared": compared(rows),
            "rows": rows,
        }
        write_result(options.out, result)
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"{name}: {peak_kib / 1024:.0f} MiB of memory at most", flush=True)


def _rows_of_load(
    name: str, shapes: tuple[str, ...], cost: CostModel, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    if name == "chat":
        yield from rows_of(name, chats(options.seconds), 0.5, shapes, cost)
    elif name == "burst":
        for bound_s in BOUNDS_S:
            for shape in map(parse_shape, shapes):
                gaps = GapCounts()
                outcomes = run(shape, burst(8.0), cost, bound_s, RejectPolicy.PREDICT, gaps=gaps)
                found = found_in(outcomes, gaps, bound_s)
                yield _row(name, shape, bound_s, found.share, found)
    elif name == "conversation":
        trace = read_trace(options.trace)
        requests = trace.requests[: options.requests]

        def at(speed: float) -> Trace:
            rows = [row._replace(arrival_s=row.arrival_s / speed) for row in requests]
            return replace(trace, requests=rows)

        yield from rows_of(name, at, 4.0, shapes, cost)
    else:
        input_tokens, output_tokens = map(int, name.split("/"))
        seconds = options.seconds / (1 if input_tokens > 1000 else SHORTER)
        first = 2.0 * 8192 / (input_tokens + 2 * output_tokens)
        yield from rows_of(name, alike(input_tokens, output_tokens, seconds), first, shapes, cost)


if __name__ == "__main__":
    main()
