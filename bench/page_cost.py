"""What open pages cost the conductor: its processor time with five of /ui and with none, in turns.

    python -m bench.page_cost [--json bench/results/page_cost.json]

`python -m conductor` as it is deployed, stub nodes, and requests over HTTP at 300 a second. The pages are
connections that stay open and ask what the page's scripts ask, as often: two look at history, two at the
cluster, one at requests. Reported is processor time of the conductor's process for each request; turns
with and without pages alternate, and the ratio is of two neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from bench.about_run import about_run, write_result
from bench.frontend import cpu_seconds
from bench.frontend_live import HttpClient, quick_profile
from bench.stub_cluster import StubCluster, stub_cluster

RATE = 300.0
TOKENS = 8
"""Number of tokens of each request."""
PERIOD_S = 2.0
"""Between two questions of a page, as in conductor/api/web/data.js."""
VIEWS = ("hour", "hour", "now", "now", "requests.latest")
"""What each page asks for; of the hour, the rows that are new."""
SELDOM = {"now": "fullest"}
"""What a view asks for besides, once in `SELDOM_TURNS` periods."""
SELDOM_TURNS = 5
TURN_S = 4.0
PAIRS = 30
IDLE_S = 20.0
"""Seconds of each measurement without requests, after all others: what is remembered is still shown."""
MOST_UNANSWERED = 500
"""When a turn asks no more, on a machine that stood still."""
WARM_S = 5.0


class OpenPage:
    """One page, on its own connection."""

    def __init__(self, port: int, view: str) -> None:
        self._port, self.view = port, view
        self._next = ""
        self.num_bytes = self.num_asked = 0

    async def look(self) -> None:
        """Ask again and again until cancelled."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.sleep(random.uniform(0.0, PERIOD_S))
        try:
            for number in itertools.count():
                if self.view in SELDOM and number % SELDOM_TURNS == 0:
                    await _answer(SELDOM[self.view], reader, writer)
                body = await _answer(self.view + self._next, reader, writer)
                if self.view == "hour":
                    self._next = f".{json.loads(body)['next']}"
                self.num_bytes, self.num_asked = self.num_bytes + len(body), self.num_asked + 1
                await asyncio.sleep(PERIOD_S)
        finally:
            writer.close()


async def _answer(name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(f"GET /v1/page/{name} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"{name}: {head[:80]!r}")
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    return await reader.readexactly(length)


async def load(client: HttpClient, seconds: float) -> int:
    """Ask at the rate for so long; return how many were answered."""
    rng, due_s = random.Random(1), time.perf_counter()
    until_s, asked = due_s + seconds, 0
    client.first_after_s.clear()
    async with asyncio.TaskGroup() as group:
        while due_s < until_s:
            if asked - len(client.first_after_s) < MOST_UNANSWERED:
                group.create_task(client.ask(TOKENS))
                asked += 1
            due_s += rng.expovariate(RATE)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
    return asked


async def turn(cluster: StubCluster, pages: list[OpenPage], is_idle: bool = False) -> float:
    """Return the conductor's processor microseconds for each request, while `pages` look.

    Idle: its processor milliseconds for each second.
    """
    looking = [asyncio.create_task(page.look()) for page in pages]
    before_s = cpu_seconds(cluster.conductor_pid)
    if is_idle:
        await asyncio.sleep(IDLE_S)
        answered: float = IDLE_S
    else:
        # connections that idled through the turn before may be closed under our hands
        answered = await load(HttpClient(cluster.http_port), TURN_S)
    spent_s = cpu_seconds(cluster.conductor_pid) - before_s
    for task in looking:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*looking, return_exceptions=True)
    return spent_s / answered * 1e6


async def measure(cluster: StubCluster) -> dict[str, Any]:
    await load(HttpClient(cluster.http_port), WARM_S)
    pages = [OpenPage(cluster.http_port, view) for view in VIEWS]
    rows: list[tuple[float, float]] = []
    for pair in range(PAIRS):
        # who is first changes, so that what drifts is in both
        both = [await turn(cluster, pages if (half + pair) % 2 else []) for half in (0, 1)]
        without, with_pages = both if pair % 2 == 0 else both[::-1]
        rows.append((without, with_pages))
        print(f"{without:.0f} us a request, {with_pages:.0f} us with {len(VIEWS)} pages", flush=True)
    idle_ms = [await turn(cluster, looking, is_idle=True) / 1e3 for looking in ([], pages)]
    load_ms = statistics.median(without for without, _ in rows) * RATE / 1e3
    ratios = [with_pages / without for without, with_pages in rows]
    return {
        "rate": RATE,
        "tokens": TOKENS,
        "pages": len(VIEWS),
        "without_us": statistics.median(without for without, _ in rows),
        "with_us": statistics.median(with_pages for _, with_pages in rows),
        "more": statistics.median(ratios) - 1,
        "idle_ms_per_s": {"without": idle_ms[0], "with": idle_ms[1]},
        "idle_more": (idle_ms[1] - idle_ms[0]) / load_ms,
        "ratios": [round(ratio, 4) for ratio in ratios],
        "answer_bytes": {page.view: round(page.num_bytes / max(1, page.num_asked)) for page in pages},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.page_cost", description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with stub_cluster(quick_profile(), num_prefill=2, num_decode=2) as cluster:
        figures = {"about": about_run("uvicorn"), **asyncio.run(measure(cluster))}
    print(json.dumps(figures, indent=1))
    write_result(options.json, figures)


if __name__ == "__main__":
    main()
