"""One line of the fault table from what `bench.faults` wrote of a kind of fault, whatever its shape.

A kind has one result, a list of `runs`, or several parts (`of_node`, `stopped_30_s`). Their counts are added
up and their longest times compared, so that a kind that is new needs nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

COLUMNS = (
    "faults",
    "requests",
    "failed",
    "tokens wrong, repeated",
    "answers that differ",
    "corrupt blocks accepted",
    "blocks leaked",
    "placed again",
    "longest gap",
    "noticed after",
    "more",
)
COUNTS = (
    "injected",
    "requests",
    "failed",
    "wrong_tokens",
    "repeated_tokens",
    "corrupt_accepted",
    "leaked_blocks",
    "placed_again",
)
SECONDS = re.compile(r"(\w+?)_s(_median|_max|_min)?")
WHICH = {"": "", "_median": " in the median", "_max": " at most", "_min": " at least"}
COUNTED_ELSEWHERE = {
    *COUNTS,
    "failed_in_progress",
    "failed_afterwards",
    "answers_that_differ",
    "noticed_s_max",
}
LEFT_OUT = {
    "failed_median",
    "took_s",
    "errors",
    "longest_gap_s",
    "longest_gap_s_max",
    "streams_at_once",
    "about",
    "commit",
}
EARLIER = {"before", "stopped_15_s_before"}
"""Runs of an older commit, which stay in the file."""


def parts_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results whose counts are to be added up: the runs, the parts, or the result itself."""
    if "runs" in result:
        return list(result["runs"])
    parts = [
        value
        for key, value in result.items()
        if isinstance(value, dict) and "requests" in value and key not in EARLIER
    ]
    return parts if parts and "requests" not in result else [result]


def fault_cells(result: dict[str, Any]) -> list[str]:
    """Return the cells of COLUMNS for one kind of fault; what a kind does not measure is empty."""
    parts = parts_of(result)
    injected = result.get("injected", "")
    if injected == "":
        injected = sum(part.get("injected", 0) for part in parts) or ""
    if isinstance(injected, dict):
        injected = sum(count for kind, count in injected.items() if kind != "none")
    gaps = [part[key] for part in parts for key in ("longest_gap_s", "longest_gap_s_max") if key in part]
    noticed = [part["noticed_s_max"] for part in parts if "noticed_s_max" in part]
    return [
        f"{injected:,}" if injected != "" else "",
        _sum(parts, "requests"),
        _sum(parts, "failed", "failed_in_progress", "failed_afterwards"),
        ", ".join(filter(None, (_sum(parts, "wrong_tokens"), _sum(parts, "repeated_tokens")))),
        _sum(parts, "answers_that_differ"),
        _sum(parts, "corrupt_accepted"),
        _sum(parts, "leaked_blocks"),
        _sum(parts, "placed_again"),
        f"{max(gaps):.1f} s" if gaps else "",
        f"{max(noticed):.1f} s" if noticed else "",
        "; ".join(_others(result, parts)),
    ]


def _sum(parts: list[dict[str, Any]], *names: str) -> str:
    found = [part[name] for part in parts for name in names if name in part]
    return f"{sum(found):,}" if found else ""


def _others(result: dict[str, Any], parts: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the other figures of a result, each with its name in words."""
    seen = [result] if parts == [result] else [*parts, result]
    values: dict[str, list[Any]] = {}
    for each in seen:
        for name, value in each.items():
            plain = isinstance(value, int | float | str) and not isinstance(value, bool)
            if plain and name not in COUNTED_ELSEWHERE | LEFT_OUT | {"runs"}:
                values.setdefault(name, []).append(value)
    for name, found in values.items():
        figures = ", ".join(_figure(value) for value in dict.fromkeys(found))
        seconds = SECONDS.fullmatch(name)
        if seconds:
            yield f"{seconds[1].replace('_', ' ')} {figures} s{WHICH[seconds[2] or '']}"
        else:
            yield f"{name.replace('_', ' ')} {figures}"


def _figure(value: float | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
