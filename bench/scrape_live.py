"""How long a scrape of the conductor takes with 1,000 requests really in flight.

    python -m bench.scrape_live [--json bench/results/scrape_live.json]

`python -m conductor` as it is deployed, stub nodes, and 1,000 streams over HTTP that all get a token in each
step. Scrapes go over a connection that stays open, as Prometheus' do, once idle and once under load; each is
timed from the request to the last byte. Clients, nodes and conductor share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import http.client
import json
import statistics
import time
from pathlib import Path
from typing import Any

from base.metrics import samples_of
from bench.about_run import about_run, write_result
from bench.frontend_live import HttpClient, quick_profile
from bench.stub_cluster import StubCluster, stub_cluster

REQUESTS = 1_000
SCRAPES = 60
PERIOD_S = 0.25
STEPS_S = (1.0, 0.25)
"""Seconds of a decode step: 1,000 sequences make a thousand tokens a second, and four times as many."""
MAX_TOKENS = 2_000


class Scraper:
    """Asks one conductor for its metrics, on one connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def scrape(self) -> tuple[float, bytes]:
        """Return the seconds that it took, and the metrics."""
        begin_s = time.perf_counter()
        self._connection.request("GET", "/metrics")
        body = self._connection.getresponse().read()
        return time.perf_counter() - begin_s, body

    async def scrapes(self) -> dict[str, float]:
        """Scrape again and again; return what it took."""
        seconds, before = [], await asyncio.to_thread(self.scrape)
        begin_s = time.perf_counter()
        for _ in range(SCRAPES):
            await asyncio.sleep(PERIOD_S)
            took_s, last = await asyncio.to_thread(self.scrape)
            seconds.append(took_s)
        elapsed_s = time.perf_counter() - begin_s
        ordered = sorted(seconds)
        made = sample(last, "conductor_generation_tokens_total") - sample(
            before[1], "conductor_generation_tokens_total"
        )
        return {
            "in_flight": sample(last, "conductor_running_sequences"),
            "tokens_per_s": round(made / elapsed_s),
            "bytes": len(last),
            "median_ms": round(1e3 * statistics.median(ordered), 1),
            "p90_ms": round(1e3 * ordered[int(0.9 * len(ordered))], 1),
            "max_ms": round(1e3 * ordered[-1], 1),
        }


def sample(metrics: bytes, name: str) -> float:
    """Return the value of a metric without labels, or the sum over its labels."""
    return sum(value for each, _, value in samples_of(metrics.decode()) if each == name)


async def measure(cluster: StubCluster, is_loaded: bool) -> dict[str, float]:
    scraper = Scraper(cluster.http_port)
    if not is_loaded:
        return await scraper.scrapes()
    clients = [HttpClient(cluster.http_port) for _ in range(REQUESTS)]
    streams = [asyncio.create_task(client.ask(MAX_TOKENS)) for client in clients]
    try:
        while sample((await asyncio.to_thread(scraper.scrape))[1], "conductor_running_sequences") < REQUESTS:
            await asyncio.sleep(PERIOD_S)
            failed = [stream for stream in streams if stream.done()]
            if failed:
                raise RuntimeError(f"{len(failed)} streams ended, the first with {failed[0].exception()!r}")
        return await scraper.scrapes()
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scrape_live", description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {"about": about_run("prometheus-client", "uvicorn"), "runs": []}
    for step_s in STEPS_S:
        profile = dataclasses.replace(quick_profile(), decode_fixed_s=step_s)
        with stub_cluster(profile, num_prefill=1, num_decode=4) as cluster:
            for is_loaded in (False, True):
                run = asyncio.run(measure(cluster, is_loaded))
                figures["runs"].append({"step_s": step_s, **run})
                print(json.dumps(figures["runs"][-1]), flush=True)
    write_result(options.json, figures)


if __name__ == "__main__":
    main()
