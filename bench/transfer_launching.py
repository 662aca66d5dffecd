"""Measure what Python spends on a batch between two GPUs, without a GPU.

    python -m bench.transfer --launching [--json OUT]

Everything from `agent.write` to its return is the shipped code, on uvloop as in a node; what the driver
would do (the table's copy, the kernel, the event) is left out, and a copy ends when a link of so many
microseconds a batch would have ended it. With no link at all the time of a batch is Python's alone.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any
from unittest import mock

import numpy as np
import uvloop

from base.clock import SystemClock
from base.config import TransferConfig
from base.grants import Grant, Operation, PeerDescriptor
from transfer.agent import TransferAgent
from transfer.batch import Pieces, pieces_of
from transfer.gpu.transport import CudaAccess, CudaTransport
from transfer.owned.ranges import Offsets
from transfer.owned.segment import DeviceMemory

BATCH_BYTES = 64 << 20
BLOCKS = (16 << 10, 256 << 10)
LINKS_US = (0, 180)
"""None; and what NVLink takes for a batch."""
TASKS = (1, 4)
BATCHES = 2000
ROUNDS = 5
BASE = 1 << 40
"""Of memory that nobody touches."""


class Link:
    """Copies one batch after the other, in no more time than `batch_us` each."""

    def __init__(self, batch_us: float) -> None:
        self._batch_s = batch_us / 1e6
        self._free_at_s = 0.0

    def end_of_copy_s(self) -> float:
        self._free_at_s = max(time.perf_counter(), self._free_at_s) + self._batch_s
        return self._free_at_s


class NoStream:
    """Takes a table and copies nothing."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._ends_at_s = 0.0

    def make_cells(self, count: int) -> Offsets:
        return np.zeros(count, np.int64)

    def start(self, num_rows: int, max_bytes: int, by_engine: bool) -> None:
        self._ends_at_s = self._link.end_of_copy_s()

    def wait(self) -> None:
        if (left_s := self._ends_at_s - time.perf_counter()) > 0:
            time.sleep(left_s)


class Sender:
    """An agent with batches for another one, both in this process."""

    def __init__(self, agent: TransferAgent, peer: PeerDescriptor, grant: Grant) -> None:
        self._agent = agent
        self._peer = peer
        self._grant = grant

    async def send(self, batches: list[Pieces], count: int) -> None:
        """Write so many batches, each of `batches` one after the other, all of these together."""

        async def some(batch: Pieces) -> None:
            for _ in range(count // len(batches)):
                await self._agent.write(self._peer, self._grant, batch)

        async with asyncio.TaskGroup() as group:
            for batch in batches:
                group.create_task(some(batch))


async def measure(block: int, tasks: int, link_us: float) -> dict[str, Any]:
    """Return microseconds a batch: by the clock, of all threads and of the event loop's."""
    config, link = TransferConfig(transports=("cuda_ipc",)), Link(link_us)
    memory = DeviceMemory(BASE, BATCH_BYTES, 0, json.dumps({"address": BASE}).encode(), CudaAccess(0))
    transport = CudaTransport(lambda _: NoStream(link))
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device"),
        mock.patch("transfer.gpu.transport.CudaTransport", return_value=transport),
    ):
        async with AsyncExitStack() as stack:
            owner = await stack.enter_async_context(TransferAgent("owner", 1, config, SystemClock()))
            asker = await stack.enter_async_context(TransferAgent("asker", 2, config, SystemClock()))
            places = np.arange(0, BATCH_BYTES, block)
            segment = owner.register_device(memory)
            grant = owner.grant(segment, places.tolist(), block, Operation.WRITE, 3600.0)
            ours, random = asker.register_device(memory), np.random.default_rng(1)
            orders = [(random.permutation(places), random.permutation(places)) for _ in range(tasks)]
            batches = [pieces_of(ours, sources, targets, block) for sources, targets in orders]
            sender = Sender(asker, owner.descriptor, grant)
            await sender.send(batches, BATCHES // 10)
            rounds = []
            for _ in range(ROUNDS):
                begun = time.perf_counter(), time.process_time(), time.thread_time()
                await sender.send(batches, BATCHES)
                ended = time.perf_counter(), time.process_time(), time.thread_time()
                rounds.append(
                    [(end - begin) / BATCHES * 1e6 for begin, end in zip(begun, ended, strict=True)]
                )
    wall_us, all_us, loop_us = (round(statistics.median(each), 1) for each in zip(*rounds, strict=True))
    case = {"block": block, "blocks": BATCH_BYTES // block, "tasks": tasks, "link_us": link_us}
    return {**case, "batch_us": wall_us, "processor_us": all_us, "loop_us": loop_us}


def run() -> list[dict[str, Any]]:
    """Return a line for each case."""
    return [
        uvloop.run(measure(block, tasks, link_us))
        for block in BLOCKS
        for tasks in TASKS
        for link_us in LINKS_US
    ]
