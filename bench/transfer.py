"""Measure the Messenger between two processes of this machine, beside its floors and Mooncake.

    python -m bench.transfer                               tcp and shm, with their floors
    python -m bench.transfer --mooncake-python VENV/bin/python
    python -m bench.transfer --transports rdma --blocks 1M --batches 32       beside ib_write_bw
    python -m bench.transfer --transports tcp --blocks 64K,1M --batches 1,64 --json out.json
    python -m bench.transfer --blocks 64K --batches 64 --pool 1G     other blocks in each batch, as KV comes

Every round runs each contender once on the same bytes, one after the other, so that a
noisy machine disturbs all of them alike; ratios are of the medians over all rounds.
One transfer at a time unless `--tasks` says otherwise: GB/s are then batch bytes over
the time of one batch, acknowledgement included.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from base.clock import SystemClock
from base.config import TransferConfig
from base.grants import Endpoint, Grant, Operation, PeerDescriptor
from bench.about_run import about_run
from bench.transfer_rivals import BareSocket, IbWriteBw, Memcpy, Mooncake, Places, Rival, serve_bare_socket
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.owned.segment import Segment

LEASE_S = 3600.0
ROUND_S = 0.25
"""About how long one contender runs in one round; at least two transfers."""
EXPECTED_BYTES_PER_S = {"tcp": 2e9, "shm": 2e9, "rdma": 5e7}
"""rdma: software RoCE in an emulated machine."""
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Case:
    """What is moved."""

    transport: str
    block: int
    batch: int
    tasks: int
    apart: bool = False
    """With a gap after each block, so that each is a piece of its own."""
    pool: int = 0
    """Bytes of memory on either side that each batch takes other blocks of, at random; 0: always the same."""

    @property
    def num_bytes(self) -> int:
        return self.block * self.batch

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of the blocks that batches may take."""
        stride = self.block * (1 + self.apart)
        return tuple(range(0, self.pool or stride * self.batch, stride))

    def places(self, count: int) -> list[Places]:
        """Return where the blocks of `count` batches lie, on either side."""
        if not self.pool:
            return [(self.offsets, self.offsets)] * count
        draw = random.Random(count)
        return [
            (draw.sample(self.offsets, self.batch), draw.sample(self.offsets, self.batch))
            for _ in range(count)
        ]

    @property
    def span_bytes(self) -> int:
        """Of memory that the blocks lie in."""
        return self.offsets[-1] + self.block


@dataclass(frozen=True, slots=True)
class Figures:
    """What one contender did over all rounds."""

    median_gb_per_s: float
    p50_ms: float
    p99_ms: float
    num_transfers: int


class Ours:
    """The Messenger: `agent.write` from this process into the child's segment."""

    def __init__(self, agent: TransferAgent, peer: PeerDescriptor, segment: Segment, target_id: int) -> None:
        self._agent = agent
        self._peer = peer
        self._segment = segment
        self._target_id = target_id

    def grant_of(self, case: Case, generation: int) -> Grant:
        return Grant(self._target_id, generation, Operation.WRITE, case.offsets, case.block, LEASE_S)

    async def run(self, case: Case, grant: Grant, places: Sequence[Places]) -> list[float]:
        """Return the seconds of each batch, `case.tasks` of them at a time."""
        batches = [pieces_of(self._segment, sources, targets, case.block) for sources, targets in places]
        elapsed_s: list[float] = []

        async def write_some() -> None:
            for batch in batches:
                begun_s = time.perf_counter()
                await self._agent.write(self._peer, grant, batch)
                elapsed_s.append(time.perf_counter() - begun_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(case.tasks):
                group.create_task(write_some())
        return elapsed_s


async def serve(num_bytes: int, transports: tuple[str, ...]) -> None:
    """The child: owns the target, grants what it is asked for, answers on standard output."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_bare_socket, args=(listener, num_bytes), daemon=True).start()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with TransferAgent(
        "target", os.getpid(), TransferConfig(transports=transports), SystemClock()
    ) as agent:
        segment = agent.allocate(num_bytes)
        segment.memory[:] = bytes(num_bytes)
        peer = asdict(agent.descriptor) | {"secret": agent.descriptor.secret.hex()}
        say({"peer": peer, "segment_id": segment.segment_id, "port": listener.getsockname()[1]})
        while line := await reader.readline():
            block, batch, apart, pool = map(int, line.split())
            offsets = Case("", block, batch, 1, bool(apart), pool).offsets
            grant = agent.grant(segment, offsets, block, Operation.WRITE, LEASE_S)
            say({"generation": grant.generation})


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


class Child:
    """The process that owns the target."""

    def __init__(self, num_bytes: int, transport: str, stack: ExitStack) -> None:
        command = [
            sys.executable,
            "-m",
            "bench.transfer",
            "--serve",
            str(num_bytes),
            "--transports",
            transport,
        ]
        self._process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(self._process.terminate)
        about = self._read()
        self.port = int(about["port"])
        self.segment_id = int(about["segment_id"])
        endpoints = tuple(Endpoint(**each) for each in about["peer"]["endpoints"])
        peer, secret = about["peer"], bytes.fromhex(about["peer"]["secret"])
        self.peer = PeerDescriptor(peer["node_id"], peer["epoch"], endpoints, secret)

    def generation_for(self, case: Case) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{case.block} {case.batch} {int(case.apart)} {case.pool}\n")
        self._process.stdin.flush()
        return int(self._read()["generation"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


async def measure_transport(
    transport: str, cases: list[Case], rounds: int, mooncake_python: str
) -> list[dict[str, Any]]:
    """Return one line of results for each case."""
    num_bytes = max(case.span_bytes for case in cases)
    with ExitStack() as stack:
        child = Child(num_bytes, transport, stack)
        rivals: dict[str, Rival] = {"memcpy": Memcpy(num_bytes)}
        if transport == "rdma":
            rivals = {"ib_write_bw": IbWriteBw(128), "ib_write_bw -t 1": IbWriteBw(1)}
        elif transport == "tcp":
            rivals = {"bare socket": BareSocket(child.port, num_bytes)}
            if mooncake_python:
                rivals["mooncake"] = Mooncake(mooncake_python, num_bytes, stack)
        config = TransferConfig(transports=(transport,))
        async with TransferAgent("source", 1, config, SystemClock()) as agent:
            segment = agent.allocate(num_bytes)
            segment.memory[:] = b"\1" * num_bytes
            ours = Ours(agent, child.peer, segment, child.segment_id)
            return [await measure(case, ours, child, rivals, rounds) for case in cases]


async def measure(
    case: Case, ours: Ours, child: Child, rivals: dict[str, Rival], rounds: int
) -> dict[str, Any]:
    """Run every contender once a round; return what each did, and ours over each of theirs."""
    grant = ours.grant_of(case, child.generation_for(case))
    await ours.run(case, grant, case.places(2))
    for rival in rivals.values():
        rival.run(case.block, case.places(2))
    count = max(2, min(400, int(ROUND_S * EXPECTED_BYTES_PER_S[case.transport] / case.num_bytes)))
    elapsed_s: dict[str, list[float]] = {"ours": [], **{name: [] for name in rivals}}
    span_s = user_s = 0.0
    places = case.places(count)
    for _ in range(rounds):
        begun_s, used_s = time.perf_counter(), os.times().user
        elapsed_s["ours"] += await ours.run(case, grant, places)
        span_s += time.perf_counter() - begun_s
        user_s += os.times().user - used_s
        for name, rival in rivals.items():
            elapsed_s[name] += rival.run(case.block, places)
    figures = {name: figures_of(case, times) for name, times in elapsed_s.items()}
    line: dict[str, Any] = {**asdict(case), "rounds": rounds}
    line["aggregate_gb_per_s"] = round(case.num_bytes * case.tasks * count * rounds / span_s / 1e9, 3)
    line["user_us_a_block"] = round(user_s * 1e6 / (case.batch * case.tasks * count * rounds), 2)
    for name, each in figures.items():
        line[name] = asdict(each)
        if name != "ours":
            line[f"ours / {name}"] = round(figures["ours"].median_gb_per_s / each.median_gb_per_s, 2)
            line[f"p99 ours / {name}"] = round(figures["ours"].p99_ms / each.p99_ms, 2)
    show(line)
    return line


def figures_of(case: Case, elapsed_s: list[float]) -> Figures:
    ordered = sorted(elapsed_s)
    median_s = statistics.median(ordered)
    p99_s = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return Figures(
        round(case.num_bytes / median_s / 1e9, 3),
        round(median_s * 1e3, 4),
        round(p99_s * 1e3, 4),
        len(ordered),
    )


def show(line: dict[str, Any]) -> None:
    names = [name for name, value in line.items() if isinstance(value, dict)]
    parts = [f"{name} {line[name]['median_gb_per_s']} GB/s p99 {line[name]['p99_ms']} ms" for name in names]
    ratios = [f"{name} {value}" for name, value in line.items() if " / " in name]
    what = f"{line['transport']} {line['block']} x {line['batch']} tasks {line['tasks']}"
    print(f"{what}: {'; '.join(parts + ratios)}", file=sys.stderr)


def size_of(text: str) -> int:
    unit = UNITS.get(text[-1].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def numbers(text: str) -> list[int]:
    return [size_of(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description=__doc__)
    parser.add_argument("--transports", default="tcp,shm")
    parser.add_argument("--blocks", type=numbers, default=numbers("64K,1M,16M,256M"))
    parser.add_argument("--batches", type=numbers, default=[1])
    parser.add_argument("--tasks", type=numbers, default=[1])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--apart", action="store_true", help="leave gaps between blocks: none are merged")
    parser.add_argument(
        "--pool", type=size_of, default=0, help="each batch takes other blocks of so many bytes"
    )
    parser.add_argument("--mooncake-python", default="", help="a Python that has Mooncake's wheel")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--cuda", action="store_true", help="measure GPUs instead: bench/transfer_cuda.py")
    parser.add_argument("--launching", action="store_true", help="Python's part of that, without a GPU")
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    transports = tuple(options.transports.split(","))
    if options.serve:
        asyncio.run(serve(options.serve, transports))
        return
    if options.launching:
        launching = importlib.import_module("bench.transfer_launching").run()
        write_report({"about": about_run(), "results": launching}, options.json)
        return
    if options.cuda:
        # By name, because it imports torch, which nothing else here needs.
        measured = importlib.import_module("bench.transfer_cuda").measured()
        write_report({"about": about_run(), **measured}, options.json)
        return
    results = []
    for transport in transports:
        cases = [
            Case(transport, block, batch, tasks, options.apart, options.pool)
            for block in options.blocks
            for batch in options.batches
            for tasks in options.tasks
            if block * batch <= 1 << 30
        ]
        results += asyncio.run(measure_transport(transport, cases, options.rounds, options.mooncake_python))
    about = {**about_run(), "loop_us": round(loop_us(), 3)}
    write_report({"about": about, "results": results}, options.json)


def loop_us() -> float:
    """Return what one turn of a loop over tuples, a dict and a queue takes: how fast Python is here."""
    turns, best_s = 20_000, float("inf")
    for _ in range(5):
        queue: deque[tuple[int, str, int]] = deque(maxlen=64)
        known: dict[int, int] = {}
        begun_s = time.perf_counter()
        for number in range(turns):
            queue.append((number, "row", number + 1))
            known[number & 63] = queue[0][2]
        best_s = min(best_s, time.perf_counter() - begun_s)
    return best_s * 1e6 / turns


def write_report(report: dict[str, Any], path: Path | None) -> None:
    text = json.dumps(report, indent=1)
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
