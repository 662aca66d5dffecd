"""`python -m bench.goodput_truth`: every rate that `bench.goodput` tried, beside what replay says of it.

Each recorded result is replayed with the profile of its card, by `bench.goodput_replayed`. The errors of
TTFT, of TPOT and of the share within each pair of bounds stand in one table, with medians and the worst. Runs
of a trace are left out without `--trace`.

    python -m bench.goodput_truth --trace conversation_trace.jsonl --out bench/results/goodput_truth.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from base.clock import wall_clock_s
from bench.about_run import current_commit
from bench.goodput_replayed import compared, shape_of
from bench.shapes import CARDS
from conductor.placing.profile import Profile
from conductor.profiles.reader import load_profile
from conductor.replay.trace import Trace
from conductor.replay.trace_formats import read_trace

RESULTS = Path("bench/results")
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
    profile: Profile = load_profile(CARDS[result["gpus"][0]])
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
    for name in NAMES:
        result = json.loads((RESULTS / f"{name}.json").read_text())
        if result.get("trace") and trace is None:
            continue
        for row in rows_of(name, result, trace if result.get("trace") else None):
            rows.append(row)
            cells = "  ".join(
                f"{key} {row[key][0]:7.1f} / {row[key][1]:7.1f} ({row['errors'][key]:+.0%})" for key in JUDGED
            )
            shares = " ".join(f"{error:+.2f}" for error in row["share_errors"])
            print(f"{name:18} {row['shape']:10} {row['rate']:6.2f}/s  {cells}  shares {shares}", flush=True)
    found = summary(rows)
    print(json.dumps(found, indent=1))
    if options.out:
        about = {
            "commit": current_commit(),
            "date": time.strftime("%Y-%m-%d", time.gmtime(wall_clock_s())),
        }
        options.out.write_text(json.dumps({**about, "errors": found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
