"""Where the ranks of one engine stand, and the process groups that join them.

An engine of X pipeline stages of T ranks each has X * T ranks. Rank 0 is the engine: it schedules, and it is
in the last stage, where tokens come out: a step that has ended there has ended everywhere, so its KV may be
published, and no answer has to travel back. Stage 0 begins at rank T, and the last stage is ranks 0 to T - 1.

    rank        0 1    2 3    4 5        (X = 3, T = 2)
    stage        2      0      1

Ranks with the same place in neighbouring stages have a group of two: over NCCL that is a communicator and a
stream of its own for each link, so a stage receives one chunk while it sends another.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from engine.pipeline import Stage, StageLink
from engine.tensor_parallel import TensorGroup

TIMEOUT_S = 300.0
"""Time that a rank has to join, load and take part; loading differs by as much as the disk does."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How many ranks an engine has, and how they share the model."""

    tensor: int = 1
    """Number of ranks of a stage; each has some of the heads of its layers."""
    stages: int = 1

    @property
    def size(self) -> int:
        return self.tensor * self.stages

    def rank(self, stage: int, tensor: int) -> int:
        return (stage + 1) % self.stages * self.tensor + tensor

    def place(self, rank: int) -> tuple[int, int]:
        """Return (stage, place in it) of a rank."""
        return (rank // self.tensor - 1) % self.stages, rank % self.tensor

    def ranks_of(self, stage: int) -> list[int]:
        return [self.rank(stage, tensor) for tensor in range(self.tensor)]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """All ranks of an engine, as one of them sees it."""

    world: TensorGroup
    tensor: TensorGroup | None
    """The ranks of its own stage; None: it is alone in it."""
    stage: Stage | None
    """The stage of this rank; None: there is one alone."""
    device: torch.device


def join_group(rank: int, shape: GroupShape, folder: Path, is_gpu: bool) -> RankGroup:
    """Return when all ranks are there. Every rank calls this, with the same empty folder of this host.

    On GPUs each has one, by number, and NCCL; otherwise there is gloo. The folder is not used afterwards."""
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    # All ranks are on this host. Otherwise gloo listens where the host's name leads, for anybody.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=shape.size,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=device if is_gpu else None,
    )
    whole = dist.group.WORLD
    assert whole is not None
    world = TensorGroup(whole, rank, shape.size)
    tensor = world if shape.stages == 1 and shape.tensor > 1 else None
    if tensor is None and shape.tensor > 1:
        tensor = _tensor_group(rank, shape)
    stage = _stage(rank, shape, device) if shape.stages > 1 else None
    if tensor is not None:
        tensor.least(0, device)
    # The folder is gone soon, so everybody and every group has to be ready by then.
    world.least(0, device)
    return RankGroup(world, tensor, stage, device)


def _new_group(ranks: list[int]) -> dist.ProcessGroup:
    """Return a group within the world, in which ranks wait for each other as long as in the world."""
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timedelta(seconds=TIMEOUT_S))
    return group


def _tensor_group(rank: int, shape: GroupShape) -> TensorGroup:
    """Return this rank's stage as a group. Each rank takes part in making each group."""
    own_stage, place = shape.place(rank)
    groups = [_new_group(shape.ranks_of(stage)) for stage in range(shape.stages)]
    return TensorGroup(groups[own_stage], place, shape.tensor, first_rank=shape.rank(own_stage, 0))


def _stage(rank: int, shape: GroupShape, device: torch.device) -> Stage:
    own_stage, own_place = shape.place(rank)
    before = after = None
    for stage in range(shape.stages - 1):
        for place in range(shape.tensor):
            pair = shape.rank(stage, place), shape.rank(stage + 1, place)
            group = _new_group(list(pair))
            if place == own_place and stage == own_stage:
                after = StageLink(group, pair[1], device)
            if place == own_place and stage + 1 == own_stage:
                before = StageLink(group, pair[0], device)
    made = Stage(own_stage, before, after)
    made.try_links()
    return made
