"""`python -m bench.goodput_truth`: every rate that was tried on GPUs, beside what replay says of it.

Each recorded result is replayed with a profile of its card and engine: those of `bench.goodput`, of engines
whose decode steps took 7 % longer, with the one measured then, by `bench.goodput_replayed`; those of
`bench.step_budgets_live` with that of their engine, today's with the card's. No node had a store. The errors
of TTFT, of TPOT and of the share within each pair of bounds stand in one table, with medians and the worst.
Runs of a trace are left out without `--trace`.

    python -m bench.goodput_truth --trace conversation_trace.jsonl --out bench/results/goodput_truth.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

from bench.about_run import current_commit, today, write_result
from bench.goodput_replayed import compared, shape_of
from bench.shapes import CARDS, parse_shape
from bench.step_budgets import BLOCK, TTFT_S, run
from bench.step_budgets_live import Row, trace_of
from conductor.placing.cost_model import CostModel
from conductor.placing.profile import Profile
from conductor.placing.scheduler_settings import RejectPolicy
from conductor.profiles.reader import load_profile
from conductor.replay.outcome import Outcomes
from conductor.replay.trace import NamedBounds, Trace, TraceRequest, linked, turns
from conductor.replay.trace_formats import read_trace

RESULTS = Path("bench/results")
BEFORE = RESULTS / "profile_h200_before.json"
"""Profile of the engine of `NAMES`, measured when they were."""
IN_TURNS = RESULTS / "profile_h200_in_turns.json"
"""The same of engines that planned a step with prompts when the one before had ended."""
LAUNCHED = RESULTS / "profile_h200_launched.json"
"""The card's, of engines that had no graph of 2,560 tokens and launched what begins beside sequences."""
OWN = {RESULTS / f"profile_h200_{name}.json" for name in ("own", "tenth", "twelfth", "thirteenth")}
"""Measured on the card of one of the nodes in the same lease, before they started with it."""
LIVE: dict[str, Path | None] = {
    "step_budgets_h200_eighth": IN_TURNS,
    "step_budgets_h200_ninth": LAUNCHED,
    "step_budgets_h200_late": LAUNCHED,
    "step_budgets_h200_graphs": None,
    "step_budgets_h200_reordered": None,
    "step_budgets_h200_own_profile": RESULTS / "profile_h200_own.json",
    "step_budgets_h200_tenth": RESULTS / "profile_h200_tenth.json",
    "step_budgets_h200_eleventh": RESULTS / "profile_h200_tenth.json",
    "step_budgets_h200_twelfth": RESULTS / "profile_h200_twelfth.json",
    "step_budgets_h200_burst": RESULTS / "profile_h200_twelfth.json",
    "step_budgets_h200_thirteenth": RESULTS / "profile_h200_thirteenth.json",
}
"""Results of `bench.step_budgets_live`, with the profile of their engine; None: the card's."""
NAMES = (
    "goodput",
    "goodput_1p1d",
    "goodput_1p1d_low",
    "goodput_1p1d_slo",
    "goodput_2c",
    "goodput_short",
    "goodput_trace",
    "goodput_trace_slo",
)
JUDGED = ("median_ttft_ms", "median_tpot_ms")


def rows_of(name: str, result: dict[str, Any], trace: Trace | None) -> Iterator[dict[str, Any]]:
    """Yield each rate of a result, measured and replayed."""
    profile: Profile = load_profile(str(BEFORE)).without_store()
    for measured in result["shapes"]:
        shape = shape_of(result, measured["shape"])
        for tried in measured["tried"]:
            found = compared(result, tried, shape, profile, trace)
            errors = {key: found[key][1] / found[key][0] - 1 for key in JUDGED}
            shares = [after - before for before, after in zip(*found["shares"], strict=True)]
            yield {
                "result": name,
                "gpu": result["gpus"][0],
                **found,
                "errors": errors,
                "share_errors": shares,
            }


def live_rows_of(name: str, result: dict[str, Any], profile: Path | None) -> Iterator[dict[str, Any]]:
    """Yield each row of a result of `bench.step_budgets_live`, measured and replayed; no profile: the card's.

    All rows of a shape are one run, as they were of one cluster: each begins when the one before it has been
    answered, and its requests name its bounds."""
    cost = CostModel(load_profile(str(profile or CARDS[result["gpus"][0]])).without_store())
    for shape in dict.fromkeys(row["shape"] for row in result["rows"]):
        served = [row for row in result["rows"] if row["shape"] == shape]
        requests: list[TraceRequest] = []
        begins_s = [0.0]
        for number, measured in enumerate(served):
            row = Row(measured["load"], measured["tpot_s"], measured["gap_s"], measured["rate"])
            bounds = NamedBounds(TTFT_S, row.tpot_s, row.gap_s or inf)
            for each in trace_of(row, result["seconds"], number).requests:
                first = linked([turn._replace(bounds=bounds) for turn in turns(each)])
                requests.append(first._replace(arrival_s=begins_s[-1] + each.arrival_s))
            begins_s.append(begins_s[-1] + measured["figures"]["duration"])
        trace, reject = Trace("rows", BLOCK, requests), RejectPolicy.PREDICT
        outcomes = run(parse_shape(shape), trace, cost, inf, reject, max_batch=result["max_batch"])
        for measured, first_s, end_s in zip(served, begins_s, begins_s[1:], strict=False):
            found = _beside(measured, outcomes, first_s, end_s)
            yield {"result": name, "gpu": result["gpus"][0], **found}


def _beside(measured: dict[str, Any], outcomes: Outcomes, first_s: float, end_s: float) -> dict[str, Any]:
    """Return a row that was measured beside what became of its requests, by when they came."""
    columns = zip(outcomes.arrival_s, outcomes.ttft_s, outcomes.mean_tbt_s, strict=True)
    found = [(ttft_s, tbt_s) for at_s, ttft_s, tbt_s in columns if first_s <= at_s < end_s]
    num_refused = sum(first_s <= each.arrival_s < end_s for each in outcomes.refused)
    in_time = sum(ttft_s <= TTFT_S and tbt_s <= measured["tpot_s"] for ttft_s, tbt_s in found)
    share, figures = in_time / (len(found) + num_refused), measured["figures"]
    said = [1e3 * statistics.median(column) for column in zip(*found or [(nan, nan)], strict=True)]
    return {
        "shape": f"{measured['shape']} {measured['load']}",
        "rate": measured["rate"],
        **{key: (figures[key], value) for key, value in zip(JUDGED, said, strict=True)},
        "shares": ([measured["share"]], [share]),
        "refused": (figures["failed"], num_refused),
        "errors": {key: value / figures[key] - 1 for key, value in zip(JUDGED, said, strict=True)},
        "share_errors": [share - measured["share"]],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and the worst of the errors, whatever their sign."""
    found: dict[str, Any] = {"rows": len(rows)}
    for key in JUDGED:
        errors = [abs(row["errors"][key]) for row in rows]
        found[key] = {"median": statistics.median(errors), "worst": max(errors)}
    shares = [abs(error) for row in rows for error in row["share_errors"]]
    found["share"] = {"median": statistics.median(shares), "worst": max(shares)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="what the results of a trace were measured with")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    trace = read_trace(options.trace) if options.trace else None
    rows: list[dict[str, Any]] = []
    for row in _every_row(trace):
        rows.append(row)
        cells = "  ".join(
            f"{key} {row[key][0]:7.1f} / {row[key][1]:7.1f} ({row['errors'][key]:+.0%})" for key in JUDGED
        )
        shares = " ".join(f"{error:+.2f}" for error in row["share_errors"])
        name, shape = row["result"], row["shape"]
        print(f"{name:23} {shape:19} {row['rate']:6.2f}/s  {cells}  shares {shares}", flush=True)
    found = {
        **summary(rows),
        "live": summary([row for row in rows if LIVE.get(row["result"]) == IN_TURNS]),
        "today": summary([row for row in rows if LIVE.get(row["result"], IN_TURNS) != IN_TURNS]),
        "own": summary([row for row in rows if LIVE.get(row["result"]) in OWN]),
    }
    print(json.dumps(found, indent=1))
    about = {
        "commit": current_commit(),
        "date": today(),
    }
    write_result(options.out, {**about, "errors": found, "rows": rows})


def _every_row(trace: Trace | None) -> Iterator[dict[str, Any]]:
    for name in NAMES:
        result = json.loads((RESULTS / f"{name}.json").read_text())
        if not result.get("trace") or trace is not None:
            yield from rows_of(name, result, trace if result.get("trace") else None)
    for name, profile in LIVE.items():
        yield from live_rows_of(name, json.loads((RESULTS / f"{name}.json").read_text()), profile)


if __name__ == "__main__":
    main()
