"""Reports of replay: one JSON object a run, and a table for people.

Times of the simulation are exact and repeatable: the same trace and seed give the same
bytes. What the run itself cost (`wall_s`, `requests_per_s`) is not, so it is written only
where the caller measured it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from math import inf
from typing import Any

from base.distribution import distribution
from base.request import Slo
from conductor.placing.profile import Profile
from conductor.replay.cluster import SimCluster
from conductor.replay.trace import Trace, every_request

Report = dict[str, Any]

DIGITS = 6
"""Microseconds; more would show how the machine adds, not what was simulated."""


def trace_report(trace: Trace, speed: float, scale: int) -> Report:
    """Describe the trace."""
    return {
        "name": trace.name,
        "format": trace.format,
        "block_size": trace.block_size,
        "requests": trace.num_requests,
        "sessions": trace.num_sessions,
        "span_s": round(trace.span_s, DIGITS),
        "speed": speed,
        "scale": scale,
        "bad_rows": trace.num_bad,
    }


def run_report(cluster: SimCluster, slo: Slo) -> Report:
    """Describe a finished run.

    Args:
        cluster: After `run`.
        slo: The bounds that effective capacity is judged by.
    """
    outcomes, options = cluster.outcomes, cluster.options
    bounds, span_s = (slo.ttft_slo_s, slo.tbt_slo_s), max(cluster.now_s, 1e-9)
    settings, reject = options.settings, options.settings.reject.value
    nodes: Report = {
        "prefill_nodes": options.prefill_nodes,
        "stages": options.stages,
        "decode_nodes": options.decode_nodes,
    }
    return {
        "policy": options.policy,
        "chunk_tokens": options.chunk_tokens,
        "threshold": settings.kvcache_balancing_threshold,
        "reject": reject if options.retests else f"{reject}, once",
        "roles": "follow" if settings.roles_follow else "fixed",
        "headroom": settings.ttft_headroom,
        "ahead_s": None if settings.ahead_s == inf else settings.ahead_s,
        "learns": options.learns,
        "conductors": options.conductors,
        **({"colocated_nodes": options.prefill_nodes} if options.is_colocated else nodes),
        "requests": outcomes.num_arrived,
        "completed": outcomes.num_completed,
        "rejected": outcomes.num_rejected,
        "rejected_by_reason": dict(sorted(outcomes.rejections.items())),
        "ttft_s": _rounded(distribution(outcomes.ttft_s)),
        "tbt_s": _rounded(distribution(outcomes.tbt_s)),
        "mean_tbt_s": _rounded(distribution(array("d", filter(None, outcomes.mean_tbt_s)))),
        "queue_s": _rounded(distribution(outcomes.queue_s)),
        "effective_capacity": round(outcomes.share_within(*bounds), DIGITS),
        "served_within": round(outcomes.served_share_within(*bounds), DIGITS),
        "effective_tokens": round(outcomes.token_share_within(*bounds), DIGITS),
        "goodput_requests_per_s": round(
            outcomes.share_within(*bounds) * outcomes.num_arrived / span_s, DIGITS
        ),
        "goodput_tokens_per_s": round(outcomes.tokens_within(*bounds) / span_s, DIGITS),
        "rejected_prompt_tokens": round(outcomes.refused_prompt_share(), DIGITS),
        "hit_rate_blocks": round(outcomes.hit_rate_blocks(), DIGITS),
        "hit_rate_tokens": round(outcomes.hit_rate_tokens(), DIGITS),
        "prefill_gpu_s_per_request": round(outcomes.mean_prefill_s(), DIGITS),
        "wasted_prefill_s": round(outcomes.wasted_prefill_s, DIGITS),
        "bytes_moved": round(cluster.links.bytes_moved),
        "replicas_created": outcomes.replicas_created,
        "preemptions": sum(node.engine.num_preemptions for node in cluster.nodes),
        "retries": outcomes.num_retried,
        "role_changes": outcomes.role_changes,
        "simulated_s": round(cluster.now_s, DIGITS),
        "events": cluster.num_events,
    }


def reach_tokens(profile: Profile) -> int:
    """Return the tokens of the longest context that a profile was fitted to; 0: none is recorded."""
    evidence = profile.evidence
    prefill = [point.tokens + point.context for point in evidence.prefill]
    decode = [point.context for point in evidence.decode]
    steps = [point.chunk_tokens + point.prefix_tokens for point in evidence.steps]
    return round(max([profile.fitted_tokens, *prefill, *decode, *steps]))


def reach_note(trace: Trace, profile: Profile) -> str:
    """Return a line where a trace has longer contexts than a profile was measured at; empty: it has none."""
    reach = reach_tokens(profile)
    if not reach or trace.longest_tokens <= reach:
        return ""
    longer = sum(each.num_tokens > reach for first in trace.requests for each in every_request(first))
    return (
        f"fitted to contexts of {reach:,} tokens: {longer / trace.num_requests:.0%} of the prompts are "
        f"longer, up to {trace.longest_tokens:,}; beyond, attention is taken to grow with the square of a "
        "prompt and in proportion to what decodes"
    )


def to_json(trace: Report, runs: Sequence[Report], profile: Report) -> str:
    """Return the report file."""
    return json.dumps({"trace": trace, "profile": profile, "runs": list(runs)}, indent=1) + "\n"


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("policy", "policy", "{}"),
    ("threshold", "threshold", "{:g}"),
    ("chunk", "chunk_tokens", "{}"),
    ("reject", "reject", "{}"),
    ("roles", "roles", "{}"),
    ("P", "prefill_nodes", "{}"),
    ("stages", "stages", "{}"),
    ("D", "decode_nodes", "{}"),
    ("C", "colocated_nodes", "{}"),
    ("done", "completed", "{}"),
    ("rejected", "rejected", "{}"),
    ("why", "rejected_by_reason", "{}"),
    ("TTFT mean", "ttft_s.mean", "{:.2f}"),
    ("p50", "ttft_s.p50", "{:.2f}"),
    ("p90", "ttft_s.p90", "{:.2f}"),
    ("p99", "ttft_s.p99", "{:.2f}"),
    ("TBT ms", "tbt_s.mean", "{:.1f}"),
    ("p99 ms", "tbt_s.p99", "{:.1f}"),
    ("capacity", "effective_capacity", "{:.1%}"),
    ("of tokens", "effective_tokens", "{:.1%}"),
    ("hit", "hit_rate_tokens", "{:.1%}"),
    ("prefill s", "prefill_gpu_s_per_request", "{:.3f}"),
    ("wasted s", "wasted_prefill_s", "{:.0f}"),
    ("moved TB", "bytes_moved", "{:.2f}"),
    ("req/s", "requests_per_s", "{}"),
)
"""(head, path in a run's report, format)."""

# shown in another unit than stored
SCALES = {"tbt_s.mean": 1e3, "tbt_s.p99": 1e3, "bytes_moved": 1e-12}


def to_table(runs: Sequence[Report]) -> str:
    """Return an aligned table, one line a run."""
    return aligned(table_rows(runs))


def table_rows(runs: Sequence[Report]) -> list[list[str]]:
    """Return the heads and one row a run, without columns that say nothing."""
    rows = [[head for head, _, _ in COLUMNS], *([_cell(run, column) for column in COLUMNS] for run in runs)]
    shown = [at for at in range(len(COLUMNS)) if any(row[at] != "-" for row in rows[1:])]
    return [[row[at] for at in shown] for row in rows]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows with their columns aligned, the first to the left, the others to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _cell(run: Report, column: tuple[str, str, str]) -> str:
    _, path, pattern = column
    value: Any = run
    for key in path.split("."):
        value = value.get(key, "")
    if value in ("", None, {}):
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{reason} {number}" for reason, number in value.items())
    return pattern.format(value * SCALES[path] if path in SCALES else value)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, DIGITS) for name, value in values.items()}
