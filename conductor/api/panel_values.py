"""The values of the panels of `panels.py`, asked of a Prometheus, for the page at /ui.

The queries need the metrics of every process over time, which this process has not: so they are answered by
the Prometheus that scrapes the cluster, `server.prometheus`. A caller names a panel and sends no query,
so nobody reads whatever else that Prometheus has. Without one the page shows the queries.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from conductor.api.panels import DASHBOARDS, Dashboard, Panel

SHOWN_S = 3600
STEP_S = 60
RATE_INTERVAL = "2m"
"""The interval of `rate()`: four scrapes and more, at 15 s each."""

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 8 << 20
MAX_AT_ONCE = 4
"""Queries; the others wait. Each takes a thread of the process's pool for as long as Prometheus takes."""


_PANELS = {name: panel for board in DASHBOARDS for name, panel in board.named_panels()}


class PanelValues:
    """Answers for the panels of one conductor. Belongs to the event loop."""

    def __init__(self, prometheus: str, now_s: Callable[[], float]) -> None:
        """Begin. `prometheus`: `http://host:port`, or https; empty: none. `now_s`: since the epoch."""
        self._prometheus = prometheus.rstrip("/")
        self._now_s = now_s
        self._turn = asyncio.Semaphore(MAX_AT_ONCE)
        # Not by the proxy of the environment, if there is one: that leads out of the cluster.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def boards(self) -> dict[str, Any]:
        """Return every dashboard with its panels and their queries, and whether there is a Prometheus."""
        boards = [{"title": board.title, "panels": list(_described(board))} for board in DASHBOARDS]
        return {"has_values": bool(self._prometheus), "boards": boards}

    async def values(self, name: str) -> dict[str, Any] | None:
        """Return a panel's lines over the last hour, or why there are none; None: there is no such panel."""
        panel = _PANELS.get(name)
        if panel is None:
            return None
        try:
            return {"series": await self._series(panel), "problem": ""}
        except (OSError, ValueError, KeyError, TypeError) as error:
            return {"series": [], "problem": f"{self._prometheus or 'server.prometheus'}: {error}"}

    async def _series(self, panel: Panel) -> list[dict[str, Any]]:
        if not self._prometheus:
            raise ValueError("not set")
        until_s = self._now_s()
        series = []
        for query, legend in panel.queries:
            text = query.replace("$__rate_interval", RATE_INTERVAL)
            async with self._turn:
                answer = await asyncio.to_thread(self._ask, text, until_s)
            for line in answer["data"]["result"]:
                points = [(float(at_s), float(value)) for at_s, value in line["values"]]
                kept = [point for point in points if math.isfinite(point[1])]
                series.append({"legend": _filled(legend, line["metric"]), "points": kept})
        return series

    def _ask(self, query: str, until_s: float) -> dict[str, Any]:
        asked = {"query": query, "start": until_s - SHOWN_S, "end": until_s, "step": STEP_S}
        url = f"{self._prometheus}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
        try:
            with self._opener.open(url, timeout=TIMEOUT_S) as answer:
                body = answer.read(MAX_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(f"status {error.code}") from error
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        parsed: dict[str, Any] = json.loads(body)
        return parsed


def _described(board: Dashboard) -> Iterator[dict[str, Any]]:
    for name, panel in board.named_panels():
        queries = [query for query, _ in panel.queries]
        yield {"name": name, "title": panel.title, "unit": panel.unit, "queries": queries}


def _filled(legend: str, labels: dict[str, str]) -> str:
    """Return a legend with the labels that it names, as Grafana does it."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), legend)
