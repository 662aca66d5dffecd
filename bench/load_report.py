"""Figures of a load: the names, keys and definitions of `vllm bench serve`, and goodput.

TTFT: sent to first token. TPOT: the mean time between tokens of one request (our TBT of a request).
ITL: between two events that carried tokens. E2EL: sent to last token. Milliseconds, as there.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.load import LoadRun
from bench.sse_client import Outcome

PERCENTILES = (50, 90, 99)
MAX_ERRORS = 5
"""Distinct ones, shown with the report."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Bounds of a request that counts as good, seconds; infinity where there is none."""

    ttft_s: float = float("inf")
    tbt_s: float = float("inf")
    e2el_s: float = float("inf")

    def is_met_by(self, outcome: Outcome) -> bool:
        return (
            outcome.ttft_s <= self.ttft_s and outcome.tbt_s <= self.tbt_s and outcome.latency_s <= self.e2el_s
        )


def parse_goodput(text: str) -> Goodput:
    """Read `ttft:0.5,tbt:0.05,e2el:10` (seconds; `tpot` is another name of tbt).

    Raises:
        ValueError: something else stands there.
    """
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, _, seconds = part.partition(":")
        key = {"ttft": "ttft_s", "tbt": "tbt_s", "tpot": "tbt_s", "e2el": "e2el_s"}.get(name.strip())
        if key is None:
            raise ValueError(f"--goodput {text!r}: {name!r} is not one of ttft, tbt, e2el")
        bounds[key] = float(seconds)
        if not bounds[key] > 0:
            raise ValueError(f"--goodput {text!r}: {name} in seconds, more than 0, is wanted")
    return Goodput(**bounds)


def report(run: LoadRun, goodput: Goodput | None, setting: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a load, `setting` first.

    Args:
        setting: What was asked for: rate, model and so on, as it shall stand in the file.
    """
    served = [outcome for outcome in run.outcomes if not outcome.error]
    input_tokens = sum(outcome.prompt_tokens for outcome in served)
    output_tokens = sum(outcome.output_tokens for outcome in served)
    gaps = [later - sooner for outcome in served for sooner, later in pairwise(outcome.arrived_at_s)]
    figures: dict[str, Any] = {
        **setting,
        "duration": run.duration_s,
        "completed": len(served),
        "failed": len(run.outcomes) - len(served),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "cached_input_tokens": sum(outcome.cached_tokens for outcome in served),
        "request_throughput": len(served) / run.duration_s,
        "output_throughput": output_tokens / run.duration_s,
        "total_token_throughput": (input_tokens + output_tokens) / run.duration_s,
        "max_send_delay_ms": 1000 * max(run.delays_s, default=0.0),
    }
    if goodput is not None:
        figures["request_goodput"] = sum(map(goodput.is_met_by, served)) / run.duration_s
    figures |= _spread("ttft", [outcome.ttft_s for outcome in served])
    figures |= _spread("tpot", [outcome.tbt_s for outcome in served if outcome.output_tokens > 1])
    figures |= _spread("itl", gaps)
    figures |= _spread("e2el", [outcome.latency_s for outcome in served])
    errors = dict.fromkeys(outcome.error for outcome in run.outcomes if outcome.error)
    figures["errors"] = list(errors)[:MAX_ERRORS]
    return figures


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(1000 * value for value in seconds)
    figures = {
        f"mean_{name}_ms": statistics.fmean(ordered),
        f"median_{name}_ms": statistics.median(ordered),
        f"std_{name}_ms": statistics.pstdev(ordered),
    }
    return figures | {f"p{rank}_{name}_ms": _percentile(ordered, rank) for rank in PERCENTILES}


def _percentile(ordered: Sequence[float], rank: float) -> float:
    """Return a percentile, between two neighbours in proportion (numpy's default)."""
    position = (len(ordered) - 1) * rank / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def table(figures: dict[str, Any]) -> str:
    """Return the figures as the lines `vllm bench serve` prints."""
    lines = [" Serving Benchmark Result ".center(50, "=")]
    for label, key, form in _LINES:
        if key in figures:
            lines.append(f"{label + ':':<40} {format(figures[key], form):<10}")
    for name, title in _SPREADS:
        if f"mean_{name}_ms" in figures:
            lines.append(title.center(50, "-"))
            for kind in ("mean", "median", *(f"p{rank}" for rank in PERCENTILES[1:])):
                label = f"{kind.capitalize()} {name.upper()} (ms):"
                lines.append(f"{label:<40} {figures[f'{kind}_{name}_ms']:<10.2f}")
    lines.append("=" * 50)
    return "\n".join([*lines, *(f"failed: {error}" for error in figures["errors"])])


_LINES = (
    ("Successful requests", "completed", "d"),
    ("Failed requests", "failed", "d"),
    ("Benchmark duration (s)", "duration", ".2f"),
    ("Total input tokens", "total_input_tokens", "d"),
    ("Input tokens matched in a cache", "cached_input_tokens", "d"),
    ("Total generated tokens", "total_output_tokens", "d"),
    ("Request throughput (req/s)", "request_throughput", ".2f"),
    ("Request goodput (req/s)", "request_goodput", ".2f"),
    ("Output token throughput (tok/s)", "output_throughput", ".2f"),
    ("Total token throughput (tok/s)", "total_token_throughput", ".2f"),
    ("Longest delay before sending (ms)", "max_send_delay_ms", ".2f"),
)
_SPREADS = (
    ("ttft", "Time to First Token"),
    ("tpot", "Time per Output Token (excl. 1st token)"),
    ("itl", "Inter-token Latency"),
    ("e2el", "End-to-end Latency"),
)
