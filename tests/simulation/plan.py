"""What one seed stands for: the cluster, its load, how badly things go, and what is done to whom when."""

from __future__ import annotations

import random
from dataclasses import dataclass

from base.request import Pooling, Request, RequestId, Role, SamplingParams, StopParams
from bench.faults.transport import Fault
from conductor.placing.scheduler_settings import SchedulerSettings
from kvstore.eviction import BY_NAME
from tests.simulation.device import VOCAB
from tests.simulation.disk import DiskFaults
from tests.simulation.grammars import END, GRAMMARS
from tests.simulation.node import NodePlan

FAULTS_END_S = 6.0
"""From then on nothing goes wrong, and everything must come to an end."""

SILENT = (Fault.FLIP, Fault.TRUNCATE, Fault.DROP, Fault.MISPLACE)
HARMLESS = (Fault.DUPLICATE, Fault.REORDER)
RAISING = (Fault.FAIL, Fault.LATE)


@dataclass(frozen=True)
class Deed:
    """A fault at a moment."""

    at_s: float
    kind: str
    where: tuple[str, ...]
    for_s: float


@dataclass(frozen=True)
class Plan:
    """All that is drawn before a run begins."""

    conductors: tuple[str, ...]
    nodes: tuple[NodePlan, ...]
    requests: tuple[tuple[float, Request, float | None], ...]
    """(when, what, after how long the client leaves)."""
    deeds: tuple[Deed, ...]
    chances: dict[str, float]
    """How likely each small fault is, each time that it could happen."""
    transfer_faults: tuple[Fault, ...]
    disk: DiskFaults
    scheduler: SchedulerSettings
    is_served: bool
    """Bytes go through their owner's process (tcp), or past it (shm)."""
    shares_stores: bool
    is_tight: bool
    """Whether memory is short, so that requests may be refused for it."""
    base_s: float
    """Of the network's delay."""
    step_s: float
    piece_s: float
    """Of each run of bytes that moves."""
    grain_s: float
    """Of time."""


def plan_of(seed):
    """Return what `seed` stands for."""
    rng = random.Random(f"{seed}/plan")
    is_tight = rng.random() < 0.4
    has_store = rng.random() < 0.6
    nodes = _nodes(rng, is_tight, has_store)
    names = [node.name for node in nodes]
    conductors = rng.choice((("c0",), ("c0",), ("c0", "c1")))
    is_calm = rng.random() < 0.1
    return Plan(
        conductors=conductors,
        nodes=nodes,
        requests=tuple(_requests(rng, is_tight)),
        deeds=() if is_calm else tuple(_deeds(rng, conductors, names)),
        chances={} if is_calm else _chances(rng),
        transfer_faults=() if is_calm else _transfer_faults(rng),
        disk=_disk(rng),
        scheduler=SchedulerSettings(
            ahead_s=rng.choice((0.05, float("inf"))),
            roles_follow=rng.choice((False, True, True)),
            kvcache_balancing_threshold=rng.choice((None, 1.0)),
        ),
        is_served=rng.random() < 0.6,
        shares_stores=rng.random() < 0.5,
        is_tight=is_tight,
        base_s=rng.choice((0.0005, 0.005)),
        step_s=rng.choice((0.005, 0.03)),
        piece_s=rng.choice((0.002, 0.002, 0.2)),
        grain_s=rng.choice((0.0, 0.001, 0.01)),
    )


def _nodes(rng, is_tight, has_store):
    num_prefill, num_decode = rng.choice(((1, 1), (1, 2), (2, 1), (2, 2)))
    roles = [{Role.PREFILL}] * num_prefill + [{Role.DECODE}] * num_decode
    both = {Role.PREFILL, Role.DECODE}
    roles = [both if rng.random() < 0.15 else role for role in roles]
    policy = rng.choice(sorted(BY_NAME))
    disk_slots = rng.choice((0, 6, 20))
    return tuple(
        NodePlan(
            name=f"n{index}",
            roles=frozenset(role),
            num_blocks=rng.randrange(9, 13) if is_tight else 48,
            chunk_tokens=rng.choice((16, 32, 64)),
            is_launching=rng.random() < 0.4,
            store_blocks=rng.choice((6, 12)) if has_store else 0,
            disk_slots=disk_slots if has_store else 0,
            policy=policy,
        )
        for index, role in enumerate(roles)
    )


def _requests(rng, is_tight):
    documents = [[rng.randrange(VOCAB) for _ in range(80)] for _ in range(2)]
    for number in range(rng.randrange(4, 10)):
        prompt = rng.choice(documents)[: rng.choice((0, 20, 50, 70, 70))]
        prompt = [*prompt, *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 24)))]
        stop = StopParams(rng.randrange(1, 40 if is_tight else 12), stop_token_ids=(rng.randrange(VOCAB),))
        grammar = GRAMMARS[number % 6] if number % 6 < len(GRAMMARS) else None
        if grammar is not None:
            # Long enough to be in the middle of it when something goes wrong.
            stop = stop._replace(max_tokens=stop.max_tokens + 12, stop_token_ids=(END,))
        is_pooled = grammar is None and number % 4 == 3
        request = Request(
            RequestId(f"r{number}"),
            tuple(prompt),
            SamplingParams(temperature=0, grammar=grammar),
            stop,
            pooling=tuple(Pooling)[len(prompt) % len(Pooling)] if is_pooled else None,
            deadline_s=rng.uniform(0.1, 8.0) if rng.random() < 0.1 else None,
            priority=rng.choice((-1, 0, 0, 1)),
        )
        leaves_after_s = rng.expovariate(3.0) if rng.random() < 0.2 else None
        yield rng.uniform(0.3, FAULTS_END_S - 1), request, leaves_after_s


def _deeds(rng, conductors, names):
    kinds = rng.sample(DEEDS, rng.randrange(1, 4))
    for _ in range(rng.randrange(0, 6)):
        kind = rng.choice(kinds)
        at_s = rng.uniform(0.3, FAULTS_END_S)
        if kind in ("kill conductor", "stop conductor"):
            where = (rng.choice(conductors),)
        elif kind == "stall peers":
            where = tuple(rng.sample(names, 2))
        elif kind in ("stall", "cut", "cut one side"):
            where = (rng.choice(conductors), rng.choice(names))
        else:
            where = (rng.choice(names),)
        yield Deed(at_s, kind, where, rng.choice((0.05, 0.5, 0.5, 2.0, 2.0, 10.0)) * rng.uniform(0.5, 1.5))


DEEDS = (
    "kill",
    "cut power",
    "stop",
    "leave",
    "stall",
    "stall peers",
    "cut",
    "cut one side",
    "kill conductor",
    "stop conductor",
    "drift",
)


def _chances(rng):
    """Each small fault in half of the seeds."""
    most = {"step": 0.02, "call": 0.1, "transfer": 0.6, "slow": 0.02, "slow_client": 0.1, "kv_gap": 0.2}
    return {kind: share * rng.random() for kind, share in most.items() if rng.random() < 0.5}


def _transfer_faults(rng):
    kinds = [kind for group in (SILENT, HARMLESS, RAISING) if rng.random() < 0.5 for kind in group]
    return tuple(kinds)


def _disk(rng):
    if rng.random() < 0.5:
        return DiskFaults()
    return DiskFaults(
        error=rng.choice((0.0, 0.1)),
        short=rng.choice((0.0, 0.1)),
        flip=rng.choice((0.0, 0.1)),
        capacity_pages=rng.choice((8, 1 << 20)),
    )
