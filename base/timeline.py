"""Timeline: what a process did when, for Chrome's tracing page and Perfetto.

Spans lie on tracks: a stage of the pipeline, the transfers of a rank, a request. They are kept
in memory, `MAX_SPANS` at most, and written once: a node that is asked for a timeline runs a
measurement, and not for days.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_SPANS = 200_000
"""Some 60 MB; what comes after is not kept."""


class Timeline:
    """Owns the spans of one process. Any thread may add one.

    Args:
        process: What the process is called.
    """

    def __init__(self, process: str) -> None:
        self._process = process
        self._spans: list[tuple[str, str, float, float, dict[str, Any]]] = []

    def span(self, track: str, name: str, start_s: float, end_s: float, **details: Any) -> None:
        """Keep what was done on `track` between two moments of the process's clock."""
        if len(self._spans) < MAX_SPANS:
            self._spans.append((track, name, start_s, end_s, details))

    def events(self) -> list[dict[str, Any]]:
        """Return the spans in the Trace Event Format: complete events, in microseconds."""
        tracks = {track: number for number, track in enumerate(sorted({span[0] for span in self._spans}), 1)}
        named = [
            ("process_name", 0, self._process),
            *(("thread_name", tracks[name], name) for name in tracks),
        ]
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": tid, "name": kind, "args": {"name": name}}
            for kind, tid, name in named
        ]
        for track, name, start_s, end_s, details in self._spans:
            times = {"ts": start_s * 1e6, "dur": max(end_s - start_s, 0.0) * 1e6}
            events.append({"ph": "X", "pid": 1, "tid": tracks[track], "name": name, **times, "args": details})
        return events

    def write(self, path: Path) -> None:
        """Write a file that chrome://tracing and ui.perfetto.dev open; raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}))
