"""How much one conductor process carries: requests a second, tokens a second, and what it adds to TTFT.

    python -m bench.frontend_live [--json bench/results/frontend_live.json]

`python -m conductor` as it is deployed, stub nodes that take next to no time, and one client
process. All share the machine's cores, so the rates are of the whole; what the conductor
itself needs is reported as processor time of its process for each request and token, from which
follows what one core of its own would carry. Rounds of HTTP and gRPC take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import re
import selectors
import ssl
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from base.config import ServerConfig
from base.metrics import samples_of
from bench.about_run import about_run, write_result
from bench.frontend import cpu_seconds
from bench.stub_cluster import StubCluster, stub_cluster
from conductor.placing.profile import Profile
from conductor.profiles.reader import load_profile
from deploy.api_client import read_text
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub

ROUNDS = 3
STREAMS = 160
TOKENS = 1_000
"""Number of tokens of each stream."""
REQUESTS = 3_000
"""Number of requests of one round, of one token each."""
ASKING = 32
"""Requests under way at once, in a round of requests."""
RATES = ((1, 750.0), (8, 375.0), (1, 1_500.0))
"""(tokens of each, requests a second): half of the 1,500 wanted, half of that with more to do, and all."""
MOST_UNANSWERED = 900
"""When a measurement of what is added ends early: `select` knows 1,024 connections."""
ADDED_S = 5.0
"""Seconds of each measurement of what is added to TTFT."""
BOUNDS = ("0.001", "0.005", "0.01", "0.02")
PROMPT = list(range(1_000, 1_064))

Ask = Callable[[int], Awaitable[int]]
"""Asks for so many tokens; returns how many came."""


def quick_profile() -> Profile:
    """Return nodes that need 0.1 ms for a prompt and 2 ms for a step."""
    return dataclasses.replace(
        load_profile("cpu-smollm2"),
        name="quick",
        source="made up, for bench.frontend_live",
        prefill_fixed_s=0.0001,
        prefill_token_s=1e-9,
        prefill_token2_s=0.0,
        decode_fixed_s=0.002,
        decode_sequence_s=0.0,
        decode_context_token_s=0.0,
    )


@dataclass(frozen=True, slots=True)
class Carried:
    """What one way of asking carried: medians of the rounds."""

    api: str
    tokens_per_s: float
    cpu_us_per_token: float
    """Processor time of the conductor's process for each token, microseconds."""
    client_cpu_us_per_token: float
    requests_per_s: float
    cpu_us_per_request: float
    client_cpu_us_per_request: float


@dataclass(frozen=True, slots=True)
class Added:
    """Added to TTFT at an open-loop rate over HTTP: shares of requests, by upper bound in seconds."""

    requests_per_s: float
    tokens: int
    """Number of tokens of each request."""
    dispatch: dict[str, float]
    """Arrival at the dispatcher to first token, without the nodes' own time but with the messages to them."""
    seen_by_client: dict[str, float]
    """Request written to answer begun: the nodes, the client's own delay and the kernel are in it."""
    conductor_busy: float
    """Processor seconds of its process for each that passed."""
    stolen: float
    """Share of both cores that other guests of the host took, as far as the kernel knows."""


class Spent:
    """Processor time of the conductor and of this process from here on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._conductor_s, self._client_s = cpu_seconds(pid), time.process_time()

    def us_each(self, count: int) -> tuple[float, float]:
        """Return microseconds of both for each of `count`."""
        conductor_s, client_s = (
            cpu_seconds(self._pid) - self._conductor_s,
            time.process_time() - self._client_s,
        )
        return conductor_s / count * 1e6, client_s / count * 1e6


class HttpClient:
    """Asks over HTTP on connections that stay open; reads no more than it must."""

    def __init__(self, port: int, secured: ssl.SSLContext | None = None) -> None:
        self._port = port
        self._secured = secured
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.first_after_s: list[float] = []
        """From each request to the first of its answer."""

    async def ask(self, max_tokens: int) -> int:
        body = json.dumps(
            {
                "model": "smollm2",
                "prompt": PROMPT,
                "max_tokens": max_tokens,
                "stream": True,
                "ignore_eos": True,
                "temperature": 0,
            }
            | {"return_token_ids": True}
        ).encode()
        connection = self._idle.pop() if self._idle else await self._connected()
        reader, writer = connection
        begin_s = time.perf_counter()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        answer = bytearray(await reader.read(1 << 18))
        self.first_after_s.append(time.perf_counter() - begin_s)
        while not answer.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
            part = await reader.read(1 << 18)
            if not part:
                raise RuntimeError(f"the answer is not whole: {bytes(answer[-300:])!r}")
            answer += part
        self._idle.append(connection)
        lists = re.findall(rb'"token_ids":\[([0-9,]*)\]', answer)
        return sum(found.count(b",") + 1 for found in lists if found)

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port, ssl=self._secured)


class GrpcClient:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = InferenceStub(channel)

    async def ask(self, max_tokens: int) -> int:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=PROMPT),
            sampling=pb.Sampling(temperature=0.0),
            stop=pb.Stop(max_tokens=max_tokens, ignore_eos=True),
        )
        answer: Any = self._stub.Generate(request, timeout=120)
        return sum([len(response.token_ids) async for response in answer])


async def streamed(ask: Ask, pid: int, streams: int = STREAMS) -> tuple[float, float, float]:
    """Return tokens a second, and processor microseconds of conductor and client for each."""
    spent, begin_s = Spent(pid), time.perf_counter()
    counts = await asyncio.gather(*(ask(TOKENS) for _ in range(streams)))
    took_s = time.perf_counter() - begin_s
    if set(counts) != {TOKENS}:
        raise RuntimeError(f"streams of {TOKENS} tokens had {sorted(set(counts))}")
    return sum(counts) / took_s, *spent.us_each(sum(counts))


async def admitted(ask: Ask, pid: int) -> tuple[float, float, float]:
    """Return requests a second, and processor microseconds of conductor and client for each."""
    left = iter(range(REQUESTS))

    async def one_after_another() -> None:
        for _ in left:
            await ask(1)

    spent, begin_s = Spent(pid), time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(ASKING)))
    took_s = time.perf_counter() - begin_s
    return REQUESTS / took_s, *spent.us_each(REQUESTS)


async def compare(cluster: StubCluster) -> list[Carried]:
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        asks = {"http": HttpClient(cluster.http_port).ask, "grpc": GrpcClient(channel).ask}
        for ask in asks.values():
            await ask(20)
        rows: dict[str, list[tuple[float, ...]]] = {api: [] for api in asks}
        for _ in range(ROUNDS):
            for api, ask in asks.items():
                row = (
                    *await streamed(ask, cluster.conductor_pid),
                    *await admitted(ask, cluster.conductor_pid),
                )
                rows[api].append(row)
                print(
                    f"{api}: {row[0]:,.0f} tokens/s {row[1]:.1f} us (client {row[2]:.1f}), "
                    f"{row[3]:,.0f} requests/s {row[4]:.0f} us (client {row[5]:.0f})"
                )
        return [
            Carried(api, *(statistics.median(column) for column in zip(*found, strict=True)))
            for api, found in rows.items()
        ]


def added(cluster: StubCluster, rate: float, tokens: int) -> Added:
    """Ask over HTTP, whose client takes a tenth of the other's time, at a rate whatever the answers do."""
    # By select, which waits microseconds: by epoll, which waits milliseconds, requests would come in heaps.
    loop = partial(asyncio.SelectorEventLoop, selectors.SelectSelector())
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(_added(cluster, rate, tokens))


async def _added(cluster: StubCluster, rate: float, tokens: int) -> Added:
    client, rng = HttpClient(cluster.http_port), random.Random(1)
    await asyncio.gather(*(client.ask(1) for _ in range(ASKING)))
    client.first_after_s.clear()
    before, stolen_s, busy_s = buckets(cluster), stolen_seconds(), cpu_seconds(cluster.conductor_pid)
    begin_s, num_asked = time.perf_counter(), 0
    due_s = begin_s
    async with asyncio.TaskGroup() as group:
        while due_s < begin_s + ADDED_S and num_asked - len(client.first_after_s) < MOST_UNANSWERED:
            group.create_task(client.ask(tokens))
            num_asked += 1
            due_s += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
    took_s = time.perf_counter() - begin_s
    busy_s, stolen_s = cpu_seconds(cluster.conductor_pid) - busy_s, stolen_seconds() - stolen_s
    after, seen = buckets(cluster), client.first_after_s
    count = after["+Inf"] - before["+Inf"]
    return Added(
        requests_per_s=len(seen) / took_s,
        tokens=tokens,
        dispatch={bound: (after[bound] - before[bound]) / count for bound in BOUNDS},
        seen_by_client={bound: sum(each <= float(bound) for each in seen) / len(seen) for bound in BOUNDS},
        conductor_busy=busy_s / took_s,
        stolen=stolen_s / took_s / (os.cpu_count() or 1),
    )


def stolen_seconds() -> float:
    """Return how long processors of this machine would have worked and were at work for another."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def buckets(cluster: StubCluster) -> dict[str, float]:
    """Return the conductor's histogram of what dispatch adds, by upper bound in seconds."""
    samples = samples_of(read_text(f"127.0.0.1:{cluster.http_port}", "/metrics"))
    return {
        labels["le"]: count
        for name, labels, count in samples
        if name == "conductor_ttft_part_seconds_bucket" and labels["part"] == "dispatch"
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.frontend_live", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--interval-ms", type=float, default=0.0, help="server.stream_interval_ms")
    arguments = parser.parse_args()
    about = about_run()
    server = ServerConfig(stream_interval_ms=arguments.interval_ms)
    with stub_cluster(quick_profile(), 1, 1, server) as cluster:
        carried = asyncio.run(compare(cluster))
        half = [added(cluster, rate, tokens) for _ in range(ROUNDS) for tokens, rate in RATES]
    for row in carried:
        print(row)
    for each in half:
        print(each)
    result = {
        "about": about,
        "stream_interval_ms": arguments.interval_ms,
        "carried": [asdict(row) for row in carried],
        "added_to_ttft": [asdict(each) for each in half],
    }
    write_result(arguments.json, result)


if __name__ == "__main__":
    main()
