"""Check and measure the cuda_ipc transport between two processes, each with a GPU.

    python -m bench.transfer --cuda [--json OUT]

The child owns a segment in its GPU's memory and one of shared host memory; this process
writes to both and reads from both, scattered blocks in random places, through
`agent.write` and `agent.read`. Bytes are checked before anything is timed. Floors, in
the same rounds: one big copy into the imported memory, and to and from pinned host
memory. With one GPU both processes use it, and the link is its own memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import uvloop

from base.clock import SystemClock
from base.config import TransferConfig
from base.errors import TransferFailedError
from base.grants import Endpoint, Grant, Operation, PeerDescriptor
from bench.transfer import say
from transfer.agent import TransferAgent
from transfer.batch import Pieces, pieces_of
from transfer.gpu.kernels.copy_ranges import copy_ranges
from transfer.gpu.transport import described
from transfer.owned.segment import Segment

NUM_BYTES = 1 << 30
LEASE_S = 3600.0
BLOCKS = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
BATCH_BYTES = (64 << 20, 256 << 20, 1 << 30)
ROUNDS = 5
ROUND_BYTES = {"device": 16 << 30, "host": 2 << 30}
"""40 ms: what begins and ends a round is lost in it."""
LAUNCHES = 8
"""Between two looks at the clock: the first has the interpreter's time in it as well."""
CONFIG = TransferConfig(transports=("cuda_ipc", "shm", "tcp"))


@dataclass(frozen=True, slots=True)
class Case:
    """What is moved, and how many batches at once."""

    target: str
    operation: Operation
    block: int
    batch_bytes: int
    tasks: int


def cases() -> list[Case]:
    """GPU to GPU over all sizes; host memory with the block the issue names."""
    device = [
        Case("device", Operation.WRITE, block, batch_bytes, tasks)
        for block in BLOCKS
        for batch_bytes in BATCH_BYTES
        for tasks in (1, 2, 4)
    ]
    others = [
        Case(target, operation, 256 << 10, batch_bytes, tasks)
        for target, operation in (
            ("device", Operation.READ),
            ("host", Operation.WRITE),
            ("host", Operation.READ),
        )
        for batch_bytes in BATCH_BYTES
        for tasks in (1, 2, 4)
    ]
    return others + device


async def serve(device: int) -> None:
    """The child: owns both segments; answers commands in JSON on standard output."""
    torch.cuda.set_device(device)
    memory = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=device)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with TransferAgent("target", os.getpid(), CONFIG, SystemClock()) as agent:
        host = agent.allocate(NUM_BYTES)
        segments = {"device": agent.register_device(described(memory)), "host": host}
        tensors = {"device": memory, "host": torch.frombuffer(host.memory, dtype=torch.uint8)}
        peer = agent.descriptor
        endpoints = [[each.transport, each.address] for each in peer.endpoints]
        ids = {name: segment.segment_id for name, segment in segments.items()}
        say({"node_id": peer.node_id, "epoch": peer.epoch, "endpoints": endpoints, "segments": ids})
        while line := await reader.readline():
            command = json.loads(line)
            tensor = tensors[command["segment"]]
            if command["do"] == "grant":
                offsets = range(0, command["num_bytes"], command["block"])
                operation = Operation[command["operation"]]
                segment = segments[command["segment"]]
                grant = agent.grant(segment, offsets, command["block"], operation, LEASE_S)
                say({"generation": grant.generation})
            elif command["do"] == "fill":
                tensor.copy_(pattern(command["seed"]))
                torch.cuda.synchronize(device)
                say({})
            else:
                expected = pattern(command["seed"])
                same = torch.equal(tensor[: expected.numel()].cpu(), expected)
                say({"same": same})


def pattern(seed: int) -> torch.Tensor:
    """Return bytes that both processes can make; every 16 KiB of them differ."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randint(0, 256, (NUM_BYTES // 64,), dtype=torch.uint8, generator=generator)
    blocks = base.repeat(64).view(-1, 1 << 14)
    return (blocks + torch.arange(len(blocks)).to(torch.uint8)[:, None]).view(-1)


class Child:
    """The process that owns the targets."""

    def __init__(self, device: int, stack: ExitStack) -> None:
        command = [sys.executable, "-m", "bench.transfer_cuda", str(device)]
        self._process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(self._process.terminate)
        about = self._read()
        endpoints = tuple(Endpoint(*each) for each in about["endpoints"])
        self.peer = PeerDescriptor(about["node_id"], about["epoch"], endpoints)
        self.segments: dict[str, int] = about["segments"]

    def ask(self, **command: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def grant(self, target: str, operation: Operation, block: int, num_bytes: int) -> Grant:
        answer = self.ask(
            do="grant", segment=target, operation=operation.name, block=block, num_bytes=num_bytes
        )
        offsets = tuple(range(0, num_bytes, block))
        return Grant(self.segments[target], answer["generation"], operation, offsets, block, LEASE_S)

    def kill(self) -> None:
        self._process.kill()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the child ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


def scattered(segment: Segment, block: int, num_bytes: int, seed: int) -> Pieces:
    """Return one request a block: to its own place, in random order."""
    places = np.random.default_rng(seed).permutation(np.arange(0, num_bytes, block))
    return pieces_of(segment, places, places, block)


async def check(agent: TransferAgent, child: Child, memory: torch.Tensor, segment: Segment) -> None:
    """Assert that what is written arrives, and what is read is what the peer has."""
    for seed, (target, block) in enumerate((("device", 16 << 10), ("host", 256 << 10)), 1):
        memory.copy_(pattern(seed))
        torch.cuda.synchronize()
        grant = child.grant(target, Operation.WRITE, block, NUM_BYTES)
        await agent.write(child.peer, grant, scattered(segment, block, NUM_BYTES, seed))
        if not child.ask(do="check", segment=target, seed=seed)["same"]:
            raise RuntimeError(f"bytes written to {target} memory are not those that were sent")
        child.ask(do="fill", segment=target, seed=seed + 10)
        grant = child.grant(target, Operation.READ, block, NUM_BYTES)
        await agent.read(child.peer, grant, scattered(segment, block, NUM_BYTES, seed))
        if not torch.equal(memory.cpu(), pattern(seed + 10)):
            raise RuntimeError(f"bytes read from {target} memory are not the peer's")
        print(f"checked {target}", file=sys.stderr)


async def killed(agent: TransferAgent, child: Child, segment: Segment) -> dict[str, Any]:
    """Kill the child while batches are under way; return when each task heard of it."""
    grant = child.grant("device", Operation.WRITE, 256 << 10, BATCH_BYTES[0])
    batch = scattered(segment, 256 << 10, BATCH_BYTES[0], 1)
    killed_at_s = float("inf")
    noticed_s: list[float] = []

    async def write_on() -> None:
        try:
            while True:
                await agent.write(child.peer, grant, batch)
        except TransferFailedError:
            noticed_s.append(time.perf_counter() - killed_at_s)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(write_on())
        await asyncio.sleep(0.05)
        killed_at_s = time.perf_counter()
        child.kill()
    return {"tasks": len(noticed_s), "noticed_within_ms": round(max(noticed_s) * 1e3, 1)}


async def timed(run: Callable[[], Awaitable[None]]) -> float:
    begun_s = time.perf_counter()
    await run()
    return time.perf_counter() - begun_s


async def measure(
    case: Case, agent: TransferAgent, child: Child, segment: Segment, floor: Callable[[Case], float]
) -> dict[str, Any]:
    """Return the rates of one case and of its floor, in the same rounds."""
    grant = child.grant(case.target, case.operation, case.block, case.batch_bytes)
    batches = [scattered(segment, case.block, case.batch_bytes, seed) for seed in range(case.tasks)]
    move = agent.write if case.operation is Operation.WRITE else agent.read
    repeats = max(2, ROUND_BYTES[case.target] // (case.batch_bytes * case.tasks))

    async def some(batch: Pieces) -> None:
        for _ in range(repeats):
            await move(child.peer, grant, batch)

    async def all_tasks() -> None:
        async with asyncio.TaskGroup() as group:
            for batch in batches:
                group.create_task(some(batch))

    await all_tasks()
    ours, floors = [], []
    for _ in range(ROUNDS):
        elapsed_s = await timed(all_tasks)
        ours.append(case.batch_bytes * case.tasks * repeats / elapsed_s / 1e9)
        floors.append(floor(case))
    line = {
        "target": case.target,
        "operation": case.operation.name,
        "block": case.block,
        "batch_bytes": case.batch_bytes,
        "tasks": case.tasks,
        "gb_per_s": round(statistics.median(ours), 1),
        "one_big_copy_gb_per_s": round(statistics.median(floors), 1),
    }
    line["ratio"] = round(statistics.median(ours) / statistics.median(floors), 3)
    print(json.dumps(line), file=sys.stderr)
    return line


def floor_of(memory: torch.Tensor, pinned: torch.Tensor, devices: tuple[int, int]) -> Callable[[Case], float]:
    """Return a function that times one big copy over the same link as a case."""
    there = torch.empty(NUM_BYTES, dtype=torch.uint8, device=devices[1])

    def run(case: Case) -> float:
        other = there if case.target == "device" else pinned
        source, target = (memory, other) if case.operation is Operation.WRITE else (other, memory)
        size = case.batch_bytes
        torch.cuda.synchronize(devices[0])
        begun_s = time.perf_counter()
        target[:size].copy_(source[:size], non_blocking=True)
        torch.cuda.synchronize(devices[0])
        torch.cuda.synchronize(devices[1])
        return size / (time.perf_counter() - begun_s) / 1e9

    return run


def kernel_variants(memory: torch.Tensor, devices: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the kernel's own rate, by events, launched back to back, over tile sizes and warps."""
    there = torch.empty(NUM_BYTES, dtype=torch.uint8, device=devices[1])
    torch.cuda.synchronize(devices[1])
    lines = []
    for block in BLOCKS:
        places = np.random.default_rng(5).permutation(np.arange(0, 256 << 20, block))
        lengths = np.full_like(places, block)
        rows = np.stack((memory.data_ptr() + places, lengths, there.data_ptr() + places))
        table = torch.from_numpy(rows).to(devices[0])
        for tile_words, num_warps in ((512, 4), (1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16)):
            rates = []
            for _ in range(6):
                begin, end = timer(), timer()
                begin.record()
                for _ in range(LAUNCHES):
                    copy_ranges(table, len(places), block, tile_words, num_warps)
                end.record()
                end.synchronize()
                rates.append(LAUNCHES * (256 << 20) / begin.elapsed_time(end) / 1e6)
            rate = round(statistics.median(rates[1:]), 1)
            lines.append({"block": block, "tile_words": tile_words, "num_warps": num_warps, "gb_per_s": rate})
            print(json.dumps(lines[-1]), file=sys.stderr)
    return lines


def timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def measured() -> dict[str, Any]:
    """Check and measure everything, on the loop that nodes run on; return the report."""
    report: dict[str, Any] = uvloop.run(run())
    return report


async def run() -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: torch.cuda.is_available() is false")
    devices = (0, torch.cuda.device_count() - 1)
    torch.cuda.set_device(0)
    # Lets the kernel of this process reach the other GPU without an import, for the variants.
    torch.zeros(1, device=devices[1]).to(devices[0])
    memory = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=devices[0])
    pinned = torch.zeros(NUM_BYTES, dtype=torch.uint8, pin_memory=True)
    with ExitStack() as stack:
        child = Child(devices[1], stack)
        async with TransferAgent("source", 1, CONFIG, SystemClock()) as agent:
            segment = agent.register_device(described(memory))
            await check(agent, child, memory, segment)
            floor = floor_of(memory, pinned, devices)
            results = [await measure(case, agent, child, segment, floor) for case in cases()]
            kernel = kernel_variants(memory, devices)
            death = await killed(agent, child, segment)
            print(json.dumps(death), file=sys.stderr)
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "results": results,
        "kernel": kernel,
        "peer_killed": death,
    }


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
