"""`python -m bench.step_budgets_live`: the loads of `bench.step_budgets`, sent to real nodes over HTTP.

Each shape's cluster is started once and serves every row with the same configuration: one prefill node and
one decode node whose roles follow the load (`1p1d`), and whatever it is compared with, whose chunks and roles
are fixed (`1p1d@8192`, `2c@1024`). A row names a load, the bound on TPOT that each request names with
TTFT < 2 s, a bound on its longest gap where one is given, and rates: `8192/256@15:5.2,5.8`,
`8192/256@15/20:4.7`. Rates of `chat` are of chats that begin a second, those of `burst` its peak. No two rows
share a prefix. A request that the conductor refuses by its bounds counts as missed. `--out` is written after
each row.

    python -m bench.step_budgets_live --shapes 1p1d,2c@1024 --rows "8192/256@15:5.2 2048/512@15:13,16"
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import uvloop

from bench.about_run import write_result
from bench.goodput import driven, share_within
from bench.load import warm_up
from bench.load_report import Goodput
from bench.local_cluster import LocalCluster
from bench.shapes import Shape, about, limits_of, options_parser, parse_shape, running
from bench.sse_client import Outcome, Server
from bench.step_budgets import BOUNDS_S, LONGEST_CHUNK, SHORTER, TTFT_S, Load, alike, burst, chats
from bench.workload import trace_load
from conductor.replay.chains import moved
from conductor.replay.trace import Trace, TraceRequest, linked, turns

BURST_OF = 5
"""A burst takes so many times as long as the arrivals of another row."""
APART = 10_000_000
"""Blocks between two rows' first ones."""


@dataclass(frozen=True, slots=True)
class Row:
    """A load at one rate, and what each of its requests names."""

    load: str
    tpot_s: float
    gap_s: float
    """Bound on the longest gap; 0: none."""
    rate: float

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        named = [("x-slo-ttft-ms", TTFT_S), ("x-slo-tpot-ms", self.tpot_s), ("x-slo-gap-ms", self.gap_s)]
        return tuple((name, f"{1e3 * bound_s:g}") for name, bound_s in named if bound_s)


def parse_rows(text: str) -> list[Row]:
    """Read `8192/256@15:5.2,5.8 chat@15/20:0.6`.

    Raises:
        ValueError: something else stands there.
    """
    rows = []
    for part in text.split():
        found = re.fullmatch(r"(\d+/\d+|chat|burst)@([\d.]+)(?:/([\d.]+))?:([\d.,]+)", part)
        if not found:
            raise ValueError(f"{part!r} is no row: 8192/256@15:5.2 is wanted, chat@15/20:0.6 or burst@30:8")
        load, tpot_ms, gap_ms, rates = found.groups()
        rows += [
            Row(load, float(tpot_ms) / 1e3, float(gap_ms or 0) / 1e3, float(rate))
            for rate in rates.split(",")
        ]
    return rows


def trace_of(row: Row, seconds: float, number: int) -> Trace:
    """Return the load of a row, whose blocks no row of another number has."""
    load: Load
    if row.load == "burst":
        load = partial(burst, seconds=BURST_OF * seconds)
    elif row.load == "chat":
        load = chats(seconds)
    else:
        input_tokens, output_tokens = map(int, row.load.split("/"))
        load = alike(input_tokens, output_tokens, seconds / (1 if input_tokens > 1000 else SHORTER))
    trace = load(row.rate)
    return replace(trace, requests=[_moved(first, number * APART) for first in trace.requests])


def _moved(first: TraceRequest, offset: int) -> TraceRequest:
    return linked([turn._replace(chain=moved(turn.chain, offset, {})) for turn in turns(first)])


def later_turns(outcomes: list[Outcome]) -> dict[str, float]:
    """Return percentiles of the TTFT of what sessions asked after their first request, ms."""
    found = [1e3 * item.ttft_s for item in outcomes if not item.error and item.turn]
    return {f"p{percent}": float(np.percentile(found, percent)) for percent in (50, 90, 99) if found}


async def serve(cluster: LocalCluster, server: Server, row: Row, trace: Trace) -> dict[str, Any]:
    """Send a row's load, wait for all answers and return the row of the result."""
    load = trace_load(trace, 1.0, None, None)
    outcomes, figures = await driven(cluster, replace(server, headers=row.headers), load)
    return {
        **asdict(row),
        "share": share_within(outcomes, Goodput(TTFT_S, row.tpot_s)),
        "shares": [share_within(outcomes, Goodput(TTFT_S, bound_s)) for bound_s in BOUNDS_S],
        "later_turns_ttft_ms": later_turns(outcomes),
        "figures": figures,
    }


def line(shape: Shape, row: dict[str, Any]) -> str:
    """Return a row of the result as a line of text."""
    figures = row["figures"]
    spread = "; ".join(
        f"{name} " + "/".join(f"{figures[f'{kind}_{name}_ms']:.1f}" for kind in ("median", "p90", "p99"))
        for name in ("ttft", "tpot", "itl")
        if f"median_{name}_ms" in figures
    )
    busy = ", ".join(f"{pool} {share:.0%}" for pool, share in figures["busy_share"].items())
    gap = f"/{1e3 * row['gap_s']:g}" if row["gap_s"] else ""
    return (
        f"{shape.name:10} {row['load']:9} {1e3 * row['tpot_s']:3g}{gap} ms {row['rate']:6.2f}/s: "
        f"{row['share']:.2f}; ms p50/p90/p99: {spread}; busy {busy}; {figures['completed']} served, "
        f"{figures['failed']} not: {figures['errors']}"
    )


async def serve_all(
    cluster: LocalCluster, model: str, rows: list[Row], seconds: float
) -> AsyncIterator[dict[str, Any]]:
    """Serve rows one after another, once every kernel that they need is compiled."""
    server = Server(cluster.url, model)
    longest = max(trace.num_tokens for row in rows for trace in trace_of(row, seconds, 0).requests)
    await warm_up(server, 2, longest)
    await warm_up(server, 2, 200)
    for number, row in enumerate(rows):
        yield await serve(cluster, server, row, trace_of(row, seconds, number))


def main() -> None:
    parser = options_parser(__doc__, max_model_len=32_768)
    parser.add_argument("--shapes", default="1p1d,1p1d@8192,2c@1024")
    parser.add_argument("--rows", type=parse_rows, required=True)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in each row")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    async def drive(cluster: LocalCluster, shape: Shape) -> None:
        async for row in serve_all(cluster, options.model, options.rows, options.seconds):
            print(line(shape, row), flush=True)
            rows.append({"shape": shape.name, **row})
            driven_as = {key: getattr(options, key) for key in ("model", "seconds", "max_batch")}
            result = {**driven_as, **about(options.commit), "rows": rows}
            write_result(options.out, result)

    for shape in map(parse_shape, options.shapes.split(",")):
        follows = bool(shape.decode) and "@" not in shape.name
        shape = replace(shape, chunk_tokens=shape.chunk_tokens if "@" in shape.name else LONGEST_CHUNK)
        limits = replace(limits_of(options), follows_load=follows)
        with running(options.model, shape, limits, options.logs) as cluster:
            uvloop.run(drive(cluster, shape))


if __name__ == "__main__":
    main()
