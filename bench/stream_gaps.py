"""How streams reach clients: gaps between pieces, tokens a second, and what requests beside them wait for.

    python -m bench.stream_gaps [--before CHECKOUT] [--rounds 5] [--json bench/results/stream_gaps.json]

`python -m conductor` as it is deployed, with stub nodes whose steps take 8 ms, as those of a GPU do, or 2
ms, which is more than the conductor carries. Client, conductor and nodes share the machine's cores. With a
checkout of another commit, conductor and nodes of both are measured by turns, by this client.

What a client reads at once is a piece: a stream's bytes have come in one write, or in several that nobody
saw apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import re
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import uvloop

from bench.about_run import about_run, write_result
from bench.frontend import cpu_seconds
from bench.frontend_live import HttpClient, buckets, quick_profile
from bench.stub_cluster import StubCluster, stub_cluster

STREAMS = (16, 64, 160)
STEPS_MS = {8.0: STREAMS, 2.0: STREAMS[-1:]}
"""Milliseconds of a step, and how many stream."""
LASTS_S = 4.0
"""Seconds that the streams of one measurement last, were nothing late."""
BEGIN_S, MEASURED_S = 1.0, 2.5
"""Seconds that streams have to begin, and those that are measured then."""
RATE = 100.0
"""Requests a second of one token each, beside the streams."""
ADDED_BOUND = "0.005"
PROMPT = list(range(1_000, 1_064))


@dataclass(frozen=True, slots=True)
class Streamed:
    """What clients saw of streams, and of requests beside them where some were sent."""

    commit: str
    step_ms: float
    streams: int
    gap_p50_ms: float
    """Between two pieces of one stream."""
    gap_p99_ms: float
    tokens_per_piece: float
    tokens_per_s: float
    conductor_busy: float
    """Processor seconds of its process for each that passed."""
    requests: int
    """Beside the streams."""
    ttft_p50_ms: float | None
    """Request written to answer begun; None: there were no requests."""
    ttft_p99_ms: float | None
    within_5_ms: float | None
    """The share of requests to which the dispatcher added at most 5 ms."""


class _Stream(asyncio.Protocol):
    """One stream's client: notes when pieces come, and reads no more of them until they are counted."""

    def __init__(self) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def call(max_tokens: int) -> bytes:
    """Return an HTTP call for a stream of so many tokens."""
    body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": max_tokens, "stream": True}
    more = {"ignore_eos": True, "temperature": 0, "return_token_ids": True}
    sent = json.dumps(body | more).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    return f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent


def num_tokens(data: bytes) -> int:
    """Return how many tokens the answer's bytes have."""
    lists: list[bytes] = re.findall(rb'"token_ids":\[([0-9,]*)\]', data)
    return sum(found.count(b",") + 1 for found in lists if found)


async def _asked_beside(client: HttpClient, until_s: float) -> None:
    """Send requests of one token at random moments, whatever the answers do."""
    rng, due_s = random.Random(1), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        while due_s < until_s:
            group.create_task(client.ask(1))
            due_s += rng.expovariate(RATE)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))


async def measured(
    cluster: StubCluster, commit: str, step_ms: float, num_streams: int, beside: bool
) -> Streamed:
    """Have streams run, and look at them once all have begun; `beside`: and at requests beside them."""
    loop, client = asyncio.get_running_loop(), HttpClient(cluster.http_port)
    sent = call(round(LASTS_S / step_ms * 1e3))
    await asyncio.gather(*(client.ask(1) for _ in range(8)))  # the first waits for the nodes
    client.first_after_s.clear()
    ends = [await loop.create_connection(_Stream, "127.0.0.1", cluster.http_port) for _ in range(num_streams)]
    for transport, _ in ends:
        transport.write(sent)
    streams = [stream for _, stream in ends]
    await asyncio.sleep(BEGIN_S)
    before, busy_s = await asyncio.to_thread(buckets, cluster), cpu_seconds(cluster.conductor_pid)
    begin_s = time.perf_counter()
    if beside:
        await _asked_beside(client, begin_s + MEASURED_S)
    else:
        await asyncio.sleep(MEASURED_S)
    end_s = time.perf_counter()
    busy_s, after = cpu_seconds(cluster.conductor_pid) - busy_s, await asyncio.to_thread(buckets, cluster)
    for transport, _ in ends:
        transport.abort()
    await asyncio.gather(*(stream.ended for stream in streams))
    pieces = [[piece for piece in stream.pieces if begin_s <= piece[0] <= end_s] for stream in streams]
    gaps = sorted(later - sooner for each in pieces for (sooner, _), (later, _) in pairwise(each))
    tokens = sum(num_tokens(data) for each in pieces for _, data in each)
    ttfts = sorted(client.first_after_s)
    count = after["+Inf"] - before["+Inf"]
    within = (after[ADDED_BOUND] - before[ADDED_BOUND]) / count if beside else None
    return Streamed(
        commit=commit,
        step_ms=step_ms,
        streams=num_streams,
        gap_p50_ms=percentile_ms(gaps, 0.5),
        gap_p99_ms=percentile_ms(gaps, 0.99),
        tokens_per_piece=round(tokens / sum(map(len, pieces)), 2),
        tokens_per_s=round(tokens / (end_s - begin_s)),
        conductor_busy=round(busy_s / (end_s - begin_s), 3),
        requests=len(ttfts),
        ttft_p50_ms=percentile_ms(ttfts, 0.5) if ttfts else None,
        ttft_p99_ms=percentile_ms(ttfts, 0.99) if ttfts else None,
        within_5_ms=None if within is None else round(within, 4),
    )


def percentile_ms(ordered_s: Sequence[float], share: float) -> float:
    """Return milliseconds within which such a share of the ordered seconds lies."""
    return round(ordered_s[min(len(ordered_s) - 1, int(share * len(ordered_s)))] * 1e3, 2)


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, with a + if there are changes on top."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def clusters(checkouts: Sequence[Path], step_ms: float) -> Iterator[dict[str, StubCluster]]:
    """Have a cluster of each checkout in the body, by the commit."""
    profile = dataclasses.replace(quick_profile(), decode_fixed_s=step_ms / 1e3)
    with ExitStack() as running:
        found = {}
        for checkout in checkouts:
            with contextlib.chdir(checkout):  # what is run as a module there is the checkout's
                found[commit_of(checkout)] = running.enter_context(stub_cluster(profile, 1, 1))
        yield found


def medians(rows: Sequence[Streamed], beside: bool) -> list[dict[str, object]]:
    """Return medians of the rounds for each kind of measurement, with requests beside it or without."""
    kinds: dict[tuple[float, int, str], list[Streamed]] = {}
    for row in rows:
        if (row.requests > 0) is beside:
            kinds.setdefault((-row.step_ms, row.streams, row.commit), []).append(row)
    found = []
    for _, same in sorted(kinds.items(), key=lambda kind: kind[0][:2]):
        columns = {name: [getattr(row, name) for row in same] for name in Streamed.__slots__[3:]}
        figures = {name: statistics.median(column) for name, column in columns.items() if None not in column}
        found.append(
            {"commit": same[0].commit, "step_ms": same[0].step_ms, "streams": same[0].streams, **figures}
        )
    return found


def tokens_over_before(rows: Sequence[Streamed]) -> float:
    """Return tokens a second with steps that are too short, over those of the first commit: a median."""
    shortest = [row for row in rows if row.step_ms == min(STEPS_MS) and not row.requests]
    by_commit: dict[str, list[int | float]] = {}
    for row in shortest:
        by_commit.setdefault(row.commit, []).append(row.tokens_per_s)
    before, *_, after = (rates for rates in by_commit.values())
    return round(statistics.median(new / old for new, old in zip(after, before, strict=True)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.stream_gaps", description=__doc__)
    parser.add_argument("--before", type=Path, help="a checkout of another commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    about = about_run("uvloop")
    checkouts = [path.resolve() for path in (arguments.before, Path.cwd()) if path is not None]
    rows = []
    for step_ms, counts in STEPS_MS.items():
        kinds = [(count, False) for count in counts] + [(counts[-1], True)]
        with clusters(checkouts, step_ms) as running:
            for number in range(arguments.rounds):
                for count, beside in kinds:
                    for commit, cluster in list(running.items())[:: (1, -1)[number % 2]]:
                        row = uvloop.run(measured(cluster, commit, step_ms, count, beside))
                        rows.append(row)
                        print(row, flush=True)
    result: dict[str, object] = {
        "about": about,
        "alone": medians(rows, beside=False),
        "beside": medians(rows, beside=True),
        "rounds": [asdict(row) for row in rows],
    }
    if arguments.before:
        result["tokens_over_before"] = tokens_over_before(rows)
    write_result(arguments.json, result)


if __name__ == "__main__":
    main()
