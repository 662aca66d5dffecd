"""`python -m bench.goodput_replayed RESULT.json`: what replay says of rates that `bench.goodput` tried.

The same arrivals, which are seeded, are simulated on as many nodes with a profile, and what came of
them stands beside what was measured: seconds to the first token, mean gaps, the share within each
pair of bounds, and goodput. Replay's nodes have the shape's chunks, and its conductor the service's settings:
it learns, and requests wait for their turn.

    python -m bench.goodput_replayed bench/results/goodput.json --profile h200-llama8b
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from base.config import SchedulerConfig
from base.request import Slo
from bench.about_run import write_result
from bench.gap_counts import GapCounts
from bench.goodput import copy_of, goodput, load_at
from bench.shapes import Shape, parse_shape
from bench.workload import trace_at
from conductor.placing.cost_model import CostModel
from conductor.placing.placement import UNBOUNDED
from conductor.placing.prefill_policies import scheduler_settings
from conductor.placing.profile import Profile
from conductor.profiles.reader import load_profile
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.outcome import Outcomes
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import Trace, TraceRequest
from conductor.replay.trace_formats import read_trace

BLOCK_TOKENS = 64
CHUNK_BEFORE_BUDGETS = 512
"""Chunk of colocated nodes, in results that name none."""


def trace_of(result: dict[str, Any], rate: float, num_requests: int, trace: Trace | None) -> Trace:
    """Return the load of `bench.goodput.try_rate`: of a trace, or one whose prompts share nothing."""
    if trace is not None:
        return trace_at(trace, rate, num_requests, result["input_tokens"], copy_of(rate))
    input_tokens, output_tokens = result["input_tokens"], result["output_tokens"]
    num_blocks = -(-input_tokens // BLOCK_TOKENS)
    rows = [
        TraceRequest(
            item.at_s,
            input_tokens,
            output_tokens,
            range(number * num_blocks, (number + 1) * num_blocks),
        )
        for number, item in enumerate(load_at(rate, num_requests, input_tokens, output_tokens))
    ]
    return Trace("load", BLOCK_TOKENS, rows)


def shape_of(result: dict[str, Any], name: str) -> Shape:
    """Return the shape that a result names; one of before there were budgets has whole chunks."""
    shape = parse_shape(name)
    if result.get("has_budgets"):
        return shape
    is_default = not shape.decode and shape.has_budgets
    return replace(
        shape, chunk_tokens=CHUNK_BEFORE_BUDGETS if is_default else shape.chunk_tokens, has_budgets=False
    )


def replayed(
    shape: Shape, trace: Trace, profile: Profile, slo: Slo | None, follows_load: bool, gaps: GapCounts
) -> Outcomes:
    """Simulate a load as the service has it; its gaps come to `gaps`. `slo`: what each request names."""
    service = SchedulerConfig(roles="follow" if follows_load else "fixed")
    options = ClusterOptions(
        shape.prefill,
        shape.decode,
        trace.block_size,
        settings=scheduler_settings(service),
        learns=True,
        max_waiting=service.max_waiting,
        patience_s=service.patience_s,
        slo=slo or UNBOUNDED,
        chunk_tokens=shape.chunk_tokens,
        step_budgets=shape.has_budgets,
        on_gaps=gaps.add,
    )
    return simulate(Plan(trace, CostModel(profile), options)).outcomes


def compared(
    result: dict[str, Any], tried: dict[str, Any], shape: Shape, profile: Profile, trace: Trace | None
) -> dict[str, Any]:
    """Return one rate's figures, (measured, replayed) of each, and the shares within each pair of bounds."""
    figures = tried["figures"]
    num_requests = figures["completed"] + figures["failed"]
    slo = Slo(result["slo"]["ttft_s"], result["slo"]["tpot_s"]) if "slo" in result else None
    gaps = GapCounts()
    outcomes = replayed(
        shape,
        trace_of(result, tried["rate"], num_requests, trace),
        profile,
        slo,
        result.get("follows_load", False),
        gaps,
    )
    ttft_ms = sorted(1e3 * value for value in outcomes.ttft_s)
    tpot_ms = sorted(1e3 * value for value in outcomes.mean_tbt_s)
    pairs = list(zip(outcomes.ttft_s, outcomes.mean_tbt_s, strict=True))
    shares = [
        sum(ttft <= bound["ttft_s"] and tpot <= bound["tpot_s"] for ttft, tpot in pairs) / num_requests
        for bound in result["bounds"]
    ]
    said = {
        "mean_ttft_ms": statistics.fmean(ttft_ms),
        "median_ttft_ms": statistics.median(ttft_ms),
        "p90_ttft_ms": _ranked(ttft_ms, 90),
        "p99_ttft_ms": _ranked(ttft_ms, 99),
        "median_tpot_ms": statistics.median(tpot_ms),
        "p99_tpot_ms": _ranked(tpot_ms, 99),
        "p99_itl_ms": 1e3 * gaps.percentile_s(99),
    }
    return {
        "shape": shape.name,
        "rate": tried["rate"],
        **{name: (figures[name], value) for name, value in said.items() if name in figures},
        "shares": (tried["shares"], shares),
    }


def _ranked(ordered: list[float], percent: int) -> float:
    """Return a percentile as `bench.load_report` does: between two values, in proportion."""
    return float(np.percentile(ordered, percent))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="of bench.goodput")
    parser.add_argument("--profile", default="h200-llama8b")
    parser.add_argument("--trace", type=Path, help="what the result was measured with")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = json.loads(options.result.read_text())
    trace = read_trace(options.trace) if options.trace else None
    if (options.trace.name if options.trace else None) != result.get("trace"):
        raise SystemExit(f"--trace: {options.result} is of {result.get('trace') or 'random prompts'}")
    profile = load_profile(options.profile)
    rows = []
    for measured in result["shapes"]:
        shape = shape_of(result, measured["shape"])
        found = [compared(result, tried, shape, profile, trace) for tried in measured["tried"]]
        rows += found
        for row in found:
            cells = "  ".join(
                f"{name} {row[name][0]:7.1f} / {row[name][1]:7.1f} ({row[name][1] / row[name][0] - 1:+.0%})"
                for name in row
                if name.endswith("_ms")
            )
            print(f"{shape.name:10} {row['rate']:6.2f} req/s  {cells}")
        rates = [row["rate"] for row in found]
        for index, bound in enumerate(result["bounds"]):
            predicted = goodput(rates, [row["shares"][1][index] for row in found])
            was = measured["goodput"][index]
            print(f"{shape.name:10} goodput within {bound['tpot_s'] * 1e3:g} ms: {was:.2f} / {predicted:.2f}")
    write_result(options.out, {"profile": options.profile, "rows": rows})


if __name__ == "__main__":
    main()
