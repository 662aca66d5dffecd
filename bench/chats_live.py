"""`python -m bench.chats_live`: chats that grow and name no bounds, sent over HTTP, and cut off after a time.

The chats are those of `bench.step_budgets`: 100 to 4,000 new tokens a turn, until they have 24,000. Enough of
them are more than the nodes have memory for. Without `--url` one prefill node and one decode node are started
whose roles follow the load; with it the server of another commit is measured by the same client.

    python -m bench.chats_live --rate 2.9 --seconds 25 --cut-s 185 --out chats.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import uvloop

from bench.about_run import write_result
from bench.load import run_load, warm_up
from bench.shapes import about, limits_of, options_parser, parse_shape, running
from bench.sse_client import Outcome, Server
from bench.step_budgets import LONGEST_CHUNK, chats
from bench.workload import trace_load

LONG_GAP_MS = 20.0


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures of what was answered, ms."""
    served = [item for item in outcomes if not item.error]
    gaps = np.concatenate([1e3 * np.diff(item.arrived_at_s) for item in served] or [np.empty(0)])
    return {
        "turns": len(served),
        "failed": len(outcomes) - len(served),
        "errors": sorted({item.error for item in outcomes if item.error})[:3],
        "later_turns_ttft_ms": _spread([1e3 * item.ttft_s for item in served if item.turn]),
        "first_turns_ttft_ms": _spread([1e3 * item.ttft_s for item in served if not item.turn]),
        "gap_ms": _spread(gaps),
        "gaps_over_20_ms_percent": 100 * float(np.mean(gaps > LONG_GAP_MS)) if len(gaps) else 0.0,
        "tpot_ms": _spread([1e3 * item.tbt_s for item in served if item.output_tokens > 1]),
        "cached_share": sum(item.cached_tokens for item in served)
        / max(1, sum(item.prompt_tokens for item in served)),
    }


def _spread(values: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float]:
    if not len(values):
        return {}
    spread = {f"p{percent}": float(np.percentile(values, percent)) for percent in (50, 90, 99)}
    return {**spread, "mean": float(np.mean(values))}


async def served(server: Server, rate: float, seconds: float, cut_s: float, longest: int) -> dict[str, Any]:
    """Return the figures of the chats of a rate, after requests that compile what they need."""
    await warm_up(server, 2, longest)
    await warm_up(server, 2, min(200, longest))
    load = trace_load(chats(seconds, longest)(rate), 1.0, None, None)
    run = await run_load(server, load, None, lambda answered: None, cut_s=cut_s)
    return summary(run.outcomes)


def main() -> None:
    parser = options_parser(__doc__, max_model_len=32_768)
    parser.add_argument("--url", default="", help="of a server that runs; empty: a cluster is started")
    parser.add_argument("--rate", type=float, required=True, help="chats that begin a second")
    parser.add_argument("--seconds", type=float, default=25.0, help="in which chats begin")
    parser.add_argument("--cut-s", type=float, default=185.0, help="after which nothing is waited for")
    parser.add_argument("--longest", type=int, default=24_000, help="tokens that a chat grows to")
    options = parser.parse_args()

    def measured(url: str) -> None:
        server = Server(url, options.model)
        row = uvloop.run(served(server, options.rate, options.seconds, options.cut_s, options.longest))
        print(json.dumps(row, indent=1), flush=True)
        load = {key: getattr(options, key) for key in ("rate", "seconds", "cut_s", "longest")}
        write_result(options.out, {**load, **about(options.commit), **row})

    if options.url:
        measured(options.url)
        return
    shape = replace(parse_shape("1p1d"), chunk_tokens=LONGEST_CHUNK)
    limits = replace(limits_of(options), follows_load=True)
    with running(options.model, shape, limits, options.logs) as cluster:
        measured(cluster.url)


if __name__ == "__main__":
    main()
