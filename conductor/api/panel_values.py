"""What the panels of `panels.py` show: asked of a Prometheus, for the page at /ui.

The queries need the metrics of every process over time, which this process has not: so they are answered by
the Prometheus that scrapes the cluster, `server.prometheus`. A caller names a panel and sends no query of its
own, so this is no way to read whatever else that Prometheus has. Without one the page shows the queries.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from conductor.api.panels import DASHBOARDS, Panel

SHOWN_S = 3600
STEP_S = 60
RATE_INTERVAL = "2m"
"""Of `rate()`: four scrapes and more, at 15 s each."""

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 8 << 20
MAX_AT_ONCE = 4
"""Queries; the others wait. Each takes a thread of the process's pool for as long as Prometheus takes."""


class PanelValues:
    """Answers for the panels of one conductor. Belongs to the event loop."""

    def __init__(self, prometheus: str, now_s: Callable[[], float]) -> None:
        """Begin.

        Args:
            prometheus: `http://host:port`, or https; empty: there is none.
            now_s: Seconds since the epoch, as Prometheus counts them.
        """
        self._prometheus = prometheus.rstrip("/")
        self._now_s = now_s
        self._turn = asyncio.Semaphore(MAX_AT_ONCE)
        # Not by the proxy of the environment, if there is one: that leads out of the cluster.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._panels = {
            f"{board.uid}.{number}": panel
            for board in DASHBOARDS
            for number, panel in enumerate(board.panels)
        }

    def boards(self) -> dict[str, Any]:
        """Return every dashboard with its panels and their queries, and whether there is a Prometheus."""
        boards = [
            {
                "title": board.title,
                "panels": [
                    {
                        "name": f"{board.uid}.{number}",
                        "title": panel.title,
                        "unit": panel.unit,
                        "queries": [query for query, _ in panel.queries],
                    }
                    for number, panel in enumerate(board.panels)
                ],
            }
            for board in DASHBOARDS
        ]
        return {"has_values": bool(self._prometheus), "boards": boards}

    async def values(self, name: str) -> dict[str, Any] | None:
        """Return a panel's lines over the last hour, or why there are none; None: there is no such panel."""
        panel = self._panels.get(name)
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
                told = await asyncio.to_thread(self._ask, text, until_s)
            for line in told["data"]["result"]:
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
        told: dict[str, Any] = json.loads(body)
        return told


def _filled(legend: str, labels: dict[str, str]) -> str:
    """Return a legend with the labels that it names, as Grafana does it."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), legend)
