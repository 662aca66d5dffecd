"""The cluster's history as a Prometheus has it, in the rows of `history.py`: longer, and over restarts.

`server.prometheus` names it. One query a span: each series under its name in a label, all joined by `or`. A
caller names a span and sends no query, so nobody reads whatever else that Prometheus has. An answer is kept
for `KEPT_S`, so that many pages ask once.
"""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from array import array
from collections.abc import Callable
from math import nan
from typing import Any

from base.clock import Clock
from base.errors import UnavailableError
from conductor.serving.history import DAY_S, HOUR_S

SPANS = {"hour": (HOUR_S, 15), "day": (DAY_S, 300), "week": (7 * DAY_S, 1_800)}
"""Seconds back, and seconds of a row."""
SHORTEST_RATE_S = 60
"""The interval of `rate()`: four scrapes of 15 s, and two rows where these are longer."""
KEPT_S = 10.0
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 8 << 20

_ENDED = 'sum(rate(conductor_sequences_total{{outcome{how}"{which}"}}[$rate]))'
_SERVED = _ENDED.format(how="=~", which="stop|length")
_GOOD = "sum(rate(conductor_good_sequences_total[$rate]))"
_REJECTED = "(sum(rate(conductor_rejections_total[$rate])) or vector(0))"
QUERIES = {
    "good": _GOOD,
    "late": f"{_SERVED} - {_GOOD}",
    "rejected": _REJECTED,
    "failed": f"{_ENDED.format(how='!~', which='stop|length|cancelled')} - {_REJECTED}",
    "cancelled": _ENDED.format(how="=", which="cancelled"),
    **{
        name: f"sum(rate(conductor_{metric}_total[$rate]))"
        for name, metric in (
            ("prompt_tokens", "prompt_tokens"),
            ("cached_tokens", "cached_tokens"),
            ("output_tokens", "generation_tokens"),
        )
    },
    **{
        f"{name}_p{share * 100:g}": f"histogram_quantile({share}, "
        f"sum by (le) (rate(conductor_{metric}_seconds_bucket[$rate])))"
        for name, metric in (("ttft", "ttft"), ("tbt", "request_tbt"))
        for share in (0.5, 0.9, 0.99)
    },
    "running": "sum(conductor_running_sequences)",
    "waiting": "sum(conductor_unplaced_sequences)",
    "waiting_on_nodes": "sum(conductor_waiting_sequences)",
    "kv_held": "avg(conductor_kv_usage_ratio)",
    "kv_moved_bytes": "sum(rate(transfer_bytes_total[$rate]))",
}
"""PromQL by series: each of `CLUSTER_SERIES`, in the same unit and of the same thing."""


class PrometheusHistory:
    """Asks one Prometheus. Belongs to the event loop."""

    def __init__(self, address: str, clock: Clock, wall_s: Callable[[], float]) -> None:
        """Begin. `address`: `http://host:port`, or https. `wall_s`: seconds since 1970."""
        self._address = address.rstrip("/")
        self._clock, self._wall_s = clock, wall_s
        self._turn = asyncio.Lock()
        self._kept: dict[str, tuple[float, dict[str, Any]]] = {}
        # Not by the proxy of the environment, if there is one: that leads out of the cluster.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    async def rows(self, span: str) -> dict[str, Any]:
        """Return a span's rows as `Ring.to_json` does; raises UnavailableError, in words."""
        async with self._turn:
            at_s, found = self._kept.get(span, (-KEPT_S, {}))
            if self._clock.now_s() - at_s >= KEPT_S:
                try:
                    found = await asyncio.to_thread(self._ask, *SPANS[span])
                except (OSError, ValueError, KeyError, TypeError) as error:
                    raise UnavailableError(f"server.prometheus: {self._address}: {error}") from error
                self._kept[span] = self._clock.now_s(), found
            return found

    def _ask(self, span_s: int, step_s: int) -> dict[str, Any]:
        end = int(self._wall_s()) // step_s
        first = end - span_s // step_s + 1
        interval = f"{max(SHORTEST_RATE_S, 2 * step_s)}s"
        query = " or ".join(
            f'label_replace({query.replace("$rate", interval)}, "series", "{name}", "", "")'
            for name, query in QUERIES.items()
        )
        asked = {"query": query, "start": first * step_s, "end": end * step_s, "step": step_s}
        url = f"{self._address}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
        try:
            with self._opener.open(url, timeout=TIMEOUT_S) as answer:
                body = answer.read(MAX_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(f"status {error.code}") from error
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        names = list(QUERIES)
        numbers = array("f", [nan]) * (len(names) * (end + 1 - first))
        for line in json.loads(body)["data"]["result"]:
            place = names.index(line["metric"]["series"])
            for at_s, value in line["values"]:
                row = round(float(at_s) / step_s) - first
                if 0 <= row <= end - first:
                    numbers[row * len(names) + place] = float(value)
        rows = base64.b64encode(numbers.tobytes()).decode("ascii")
        about = {"names": names, "step_s": step_s, "first": first, "next": end + 1}
        return {**about, "rows": rows, "source": "prometheus"}
