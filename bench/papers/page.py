"""The HTML report: one self-contained page, drawn as SVG, without scripts.

It holds the table of all runs and, for each measure, one chart with a line for each run:
the distributions of TTFT and TBT, the load of both pools, the hit rate and the rejections
over time, and the replicas of the hottest blocks; and, where splits were swept, what each
gave. What the lines are made of is computed here from a finished cluster; what the page
looks like is below it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from bench.papers.chart import Line, chart
from conductor.replay.cluster import SimCluster
from conductor.replay.outcome import Outcomes
from conductor.replay.report import Report, table_rows
from conductor.replay.trace import Trace, every_request

POINTS = 200
"""Of a line, at most: a page of five runs stays under a megabyte."""


@dataclass(frozen=True, slots=True)
class RunLines:
    """What one run draws, by chart."""

    name: str
    ttft: Line
    tbt: Line
    prefill_load: Line
    decode_load: Line
    hit_rate: Line
    rejections: dict[str, Line]
    """By reason: requests refused so far."""
    replicas: list[Line]
    """Of the blocks of HOT_RANKS."""


HOT_RANKS = (10, 100, 1_000, 10_000)
"""Blocks by how often the trace uses them, as in FAST'25 Fig. 11."""

Chart = tuple[str, str, list[tuple[str, Line]]]
"""(heading, unit of x, lines by name)."""


def hot_blocks(trace: Trace) -> tuple[int, ...]:
    """Return the blocks of HOT_RANKS, as far as the trace has so many."""
    uses = Counter(block for first in trace.requests for each in every_request(first) for block in each.chain)
    ranked = sorted(uses, key=lambda block: (-uses[block], block))
    return tuple(ranked[rank - 1] for rank in HOT_RANKS if rank <= len(ranked))


CHARTS = (
    ("ttft", "TTFT: share of requests that waited at most so long", "seconds"),
    ("tbt", "TBT (mean of a request's longest tenth of gaps): share of requests", "seconds"),
    ("prefill_load", "Prefill pool: mean seconds queued at a node", "seconds of the trace"),
    ("decode_load", "Decode pool: mean step, seconds", "seconds of the trace"),
    ("hit_rate", "Prompt tokens found in the cache, by arrival", "seconds of the trace"),
)


def run_lines(cluster: SimCluster) -> RunLines:
    """Return the lines of a finished run that was sampled."""
    options, outcomes = cluster.options, cluster.outcomes
    samples = _thinned(cluster.samples)
    return RunLines(
        f"{options.policy} {options.settings.reject.value}",
        _cumulative(list(outcomes.ttft_s)),
        _cumulative(list(outcomes.tbt_s)),
        [(at_s, queued_s) for at_s, queued_s, _ in samples],
        [(at_s, step_s) for at_s, _, step_s in samples],
        _hit_rate(outcomes),
        _rejections(outcomes),
        [
            [(at_s, float(counts[block])) for at_s, counts in cluster.replicas]
            for block in range(len(options.watched_blocks))
        ],
    )


def sweep_charts(reports: Sequence[Report]) -> list[Chart]:
    """Return the charts of one policy's runs at every split of the same nodes."""
    measures: tuple[tuple[str, Callable[[Report], float]], ...] = (
        ("P:D sweep: mean TTFT, seconds", lambda run: run["ttft_s"]["mean"]),
        ("P:D sweep: 99th percentile of TBT, seconds", lambda run: run["tbt_s"]["p99"]),
        ("P:D sweep: share of requests within the SLO", lambda run: run["effective_capacity"]),
    )
    name = reports[0]["policy"]
    return [
        (heading, "prefill nodes", [(name, [(run["prefill_nodes"], measure(run)) for run in reports])])
        for heading, measure in measures
    ]


def _more_charts(lines: Sequence[RunLines]) -> list[Chart]:
    refused = [(f"{run.name} {reason}", line) for run in lines for reason, line in run.rejections.items()]
    charts: list[Chart] = [("Requests refused so far, by reason", "seconds of the trace", refused)]
    for run in lines[-1:]:
        hot = [(f"use rank {rank}", line) for rank, line in zip(HOT_RANKS, run.replicas, strict=False)]
        charts.append((f"Nodes that hold the hottest blocks, {run.name}", "seconds of the trace", hot))
    return charts


def page(
    title: str, reports: Sequence[Report], lines: Sequence[RunLines], sweep: Sequence[Report] = ()
) -> str:
    """Return the whole page; `sweep` has one policy's runs at every split."""
    heads, *rows = table_rows(reports)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    charts = "".join(
        _chart(heading, unit, [(run.name, getattr(run, name)) for run in lines])
        for name, heading, unit in CHARTS
    )
    more = [*_more_charts(lines), *(sweep_charts(sweep) if sweep else [])]
    charts += "".join(_chart(*chart) for chart in more)
    reasons = "".join(f"<li>{escape(_reasons(run))}</li>" for run in reports)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><div class='wide'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div><div class='charts'>{charts}</div>"
        f"<h2>Rejections by reason</h2><ul>{reasons}</ul></body></html>\n"
    )


STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em auto;max-width:1120px;padding:0 1em;color:#222}"
    "h1{font-size:1.4em}h2{font-size:1.1em}.wide{overflow-x:auto}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{padding:.25em .6em;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}"
    ".charts{display:flex;flex-wrap:wrap;gap:1em}figure{margin:1em 0}"
    "figcaption{font-weight:600;margin-bottom:.3em}svg{max-width:100%;height:auto}"
)


def _chart(heading: str, unit: str, runs: Sequence[tuple[str, Line]]) -> str:
    return f"<figure><figcaption>{escape(heading)}</figcaption>{chart(heading, unit, runs)}</figure>"


def _reasons(run: Report) -> str:
    counts = ", ".join(f"{reason} {count}" for reason, count in run["rejected_by_reason"].items())
    return f"{run['policy']} {run['reject']}: {counts or 'none'}"


def _cumulative(values: list[float]) -> Line:
    """Return (value, share of requests at most that)."""
    ordered = sorted(values)
    if not ordered:
        return []
    last = len(ordered) - 1
    return [(ordered[round(last * at / POINTS)], at / POINTS) for at in range(POINTS + 1)]


def _hit_rate(outcomes: Outcomes) -> Line:
    """Return the token hit rate of slices of time, by arrival."""
    rows = sorted(zip(outcomes.arrival_s, outcomes.prefix_tokens, outcomes.num_tokens, strict=True))
    size = max(1, len(rows) // 60)
    slices = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [
        (part[0][0], sum(prefix for _, prefix, _ in part) / sum(tokens for _, _, tokens in part))
        for part in slices
    ]


def _rejections(outcomes: Outcomes) -> dict[str, Line]:
    lines: dict[str, Line] = {}
    for refused in sorted(outcomes.refused, key=lambda refused: refused.arrival_s):
        line = lines.setdefault(refused.reason, [(0.0, 0.0)])
        line.append((refused.arrival_s, len(line)))
    return {
        reason: line[:: max(1, len(line) // POINTS)] + line[-1:] for reason, line in sorted(lines.items())
    }


def _thinned(samples: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    return samples[:: max(1, len(samples) // POINTS)]
