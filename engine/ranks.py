"""The processes that hold one model together: how they start, hear of a step, and end.

Rank 0 is the engine. It starts the others and writes to the standard input of each: a
line of JSON that says what to load, then for each step a row of int64. There is nothing
else to agree on, because all ranks build the same engine in the same order and the sums
of a step make them wait for each other. The end of that pipe, however it comes, ends a
rank: no rank outlives its engine, and none has to be asked.

A collective over pickled objects was weighed: no pickle is read anywhere here, and a
rank that waits in a collective for a step that comes in an hour looks like a hung one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from engine.tensor_parallel import TensorGroup

TIMEOUT_S = 300.0
"""For a rank to join, load and take part; loading differs by as much as the disk does."""

END_S = 10.0
"""For a rank to end by itself."""

NUMBER_BYTES = 8


class Ranks:
    """Owns the processes of the other ranks. `tell` belongs to the device thread."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def tell(self, numbers: torch.Tensor) -> None:
        """Send a row of int64 to every other rank.

        Raises:
            OSError: a rank has ended.
        """
        row = numbers.numpy().tobytes()
        message = len(row).to_bytes(NUMBER_BYTES, "little") + row
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(message)
            process.stdin.flush()

    def close(self) -> None:
        """End the other ranks."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start_ranks(module: str, spec: dict[str, Any], size: int, is_gpu: bool) -> tuple[Ranks, TensorGroup]:
    """Start ranks 1 to `size` - 1, join them as rank 0, and return when all are there.

    Args:
        module: Run in each as `python -m module`; begins with `join_ranks`.
        spec: What `join_ranks` gives to each; JSON.
        is_gpu: A GPU each, by number; otherwise CPUs.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(1, size):
            process = subprocess.Popen([sys.executable, "-m", module], stdin=subprocess.PIPE)
            call = {"rank": rank, "size": size, "folder": folder, "is_gpu": is_gpu, "spec": spec}
            assert process.stdin is not None
            process.stdin.write(json.dumps(call).encode() + b"\n")
            process.stdin.flush()
            processes.append(process)
        return Ranks(processes), _join(0, size, Path(folder), is_gpu)


def join_ranks() -> tuple[dict[str, Any], TensorGroup, Iterator[torch.Tensor]]:
    """Join as one of the other ranks; return the spec, the group and the steps to follow."""
    # Ctrl-C is for rank 0, which ends us by ending the pipe.
    os.setpgid(0, 0)
    call = json.loads(sys.stdin.buffer.readline())
    group = _join(call["rank"], call["size"], Path(call["folder"]), call["is_gpu"])
    return call["spec"], group, _rows(sys.stdin.buffer)


def _join(rank: int, size: int, folder: Path, is_gpu: bool) -> TensorGroup:
    if is_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=torch.device("cuda", rank) if is_gpu else None,
    )
    world = dist.group.WORLD
    assert world is not None
    group = TensorGroup(world, rank, size)
    # The folder is gone when rank 0 returns, so everybody has to be in by then.
    group.least(0, torch.device("cuda" if is_gpu else "cpu"))
    return group


def _rows(pipe: BinaryIO) -> Iterator[torch.Tensor]:
    while head := pipe.read(NUMBER_BYTES):
        row = pipe.read(int.from_bytes(head, "little"))
        yield torch.frombuffer(bytearray(row), dtype=torch.int64)
