"""Traces that are made here, as files: in Mooncake's format, which says all but subagents."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

from conductor.replay.trace import BOUND_KEYS, Trace, open_trace, turns


def write_trace(trace: Trace, path: Path) -> None:
    """Write what `read_trace` reads, header included: rows that are whole prompts.

    Raises:
        ValueError: the trace has subagents, which this format has no row for.
    """
    with open_trace(path, "w") as file:
        file.write(json.dumps({"block_size": trace.block_size, "format": "mooncake"}) + "\n")
        for number, first in enumerate(trace.requests):
            session = turns(first)
            for turn, request in enumerate(session):
                if request.forks:
                    raise ValueError(f"{trace.name}: subagents cannot be written")
                row: dict[str, object] = {"session_id": str(number)} if len(session) > 1 else {}
                row["delay_ms" if turn else "timestamp"] = round(request.arrival_s * 1000)
                row["input_length"] = request.num_tokens
                row["output_length"] = request.output_tokens
                row["hash_ids"] = list(request.chain)
                if request.priority:
                    row["priority"] = request.priority
                if request.tenant:
                    row["tenant"] = request.tenant
                named = zip(BOUND_KEYS, request.bounds or (), strict=False)
                row |= {
                    key: None if bound_s == inf else 1000 * bound_s
                    for key, bound_s in named
                    if bound_s is not None
                }
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
