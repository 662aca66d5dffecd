"""The live dispatcher beside replay, in virtual time, with the settings that ship.

    python -m bench.conformance_virtual [--seeds 3] [--json bench/results/conformance_virtual.json]

Live are the dispatcher, each node's stream, and nodes as they ship on devices that only take their time
(`virtual_cluster.py`). What they did is in a decision log, whose arrivals alone are then simulated. Nothing
is random but the workload, and nothing else is at work: what differs is a difference of the two programs.

Workloads:

* even: half of the prompts go on from an earlier one, answers have 4 to 59 tokens;
* shifting: a minute of long prompts with short answers, a minute of short prompts with long answers, in turn,
  so that roles drift;
* bursts: as even, by turns of 20 s a fifth and nine fifths of the rate;
* agents: all begin with the same 1,600 tokens and go on alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
from asyncio import TaskGroup
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import eq
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from base.clock import Clock
from base.config import EngineConfig, SchedulerConfig
from base.errors import SloUnreachableError
from base.request import Request, RequestId, SamplingParams, Slo, StopParams
from bench.about_run import about_run, write_result
from bench.overload import stub_profile
from bench.stub_cluster import BLOCK_SIZE
from bench.virtual_cluster import MODEL_ID, node_infos, virtual_cluster
from bench.virtual_loop import VirtualLoop, run
from conductor.placing.cost_model import CostModel
from conductor.placing.decision_lines import Shared
from conductor.placing.prefill_policies import scheduler_settings
from conductor.placing.profile import Profile
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.profiles.reader import load_profile
from conductor.replay.conformance import SHIPPED_ENGINE, LiveRun, num_made_alike, ranked, read_run, simulated
from conductor.replay.outcome import Outcomes
from conductor.serving.decision_log import DecisionLog
from conductor.serving.dispatch import Dispatcher

SHIPPED = scheduler_settings(SchedulerConfig())
BOUNDS = Slo(2.0, 0.1)
NUM_BLOCKS = 200_000
"""None is ever evicted: what a node without a store forgets as requests hold its blocks is not simulated."""


def nothing_between(profile: Profile) -> Profile:
    """Return nodes that hand over, load and are notified in no time, with room for all KV."""
    return replace(
        profile,
        device_kv_tokens=BLOCK_SIZE * NUM_BLOCKS,
        host_kv_tokens=1 << 30,
        # so few that what comes at one moment stays in order
        kv_token_bytes=1,
        transfer_bytes_per_s=1e30,
        transfer_fixed_s=0.0,
        start_s=0.0,
        dispatch_s=0.0,
        dispatch_token_s=0.0,
    )


STUB = nothing_between(stub_profile())


@dataclass(frozen=True, slots=True)
class Served:
    """What serves a workload, by which bounds."""

    num_prefill: int = 2
    num_decode: int = 2
    num_both: int = 0
    profile: Profile = STUB
    settings: SchedulerSettings = SHIPPED
    slo: Slo = BOUNDS
    engine: EngineConfig = SHIPPED_ENGINE


class Asked(NamedTuple):
    """One request of a workload."""

    after_s: float
    """Seconds after the one before it."""
    tokens: tuple[int, ...]
    max_tokens: int
    slo: Slo | None = None
    """None: the workload's."""


def even(rate: float, count: int, rng: random.Random) -> Iterator[Asked]:
    """Yield requests, half of which go on from an earlier one."""
    made: list[tuple[int, ...]] = []
    for _ in range(count):
        tokens = _tokens(rng, rng.randrange(40, 800))
        made.append((rng.choice(made) + tokens)[:3_000] if made and rng.random() < 0.5 else tokens)
        yield Asked(rng.expovariate(rate), made[-1], rng.randrange(4, 60))


def shifting(rate: float, count: int, rng: random.Random) -> Iterator[Asked]:
    """Yield long prompts with short answers for a minute, and then the reverse."""
    now_s = 0.0
    for _ in range(count):
        after_s = rng.expovariate(rate)
        now_s += after_s
        if now_s % 120.0 < 60.0:
            yield Asked(after_s, _tokens(rng, rng.randrange(300, 1_000)), rng.randrange(2, 16))
        else:
            yield Asked(after_s, _tokens(rng, rng.randrange(20, 100)), rng.randrange(100, 400))


def bursts(rate: float, count: int, rng: random.Random) -> Iterator[Asked]:
    """Yield the requests of `even`, for 20 s at a fifth of the rate and for 20 s at nine fifths."""
    now_s = 0.0
    for asked in even(rate, count, rng):
        after_s = asked.after_s / (0.2 if now_s % 40.0 < 20.0 else 1.8)
        now_s += after_s
        yield asked._replace(after_s=after_s)


def mixed(rate: float, count: int, rng: random.Random) -> Iterator[Asked]:
    """Yield the requests of `even`: of people who wait, of agents, and of batches that name no bounds."""
    bounds = Slo(1.0, 0.06), Slo(4.0, 0.15), Slo(2.0, 0.1, 0.2), Slo()
    for number, asked in enumerate(even(rate, count, rng)):
        yield asked._replace(slo=bounds[number % len(bounds)])


def agents(rate: float, count: int, rng: random.Random) -> Iterator[Asked]:
    """Yield requests that begin with the same instructions and go on alone."""
    instructions = _tokens(rng, 1_600)
    for _ in range(count):
        own = _tokens(rng, rng.randrange(40, 400))
        yield Asked(rng.expovariate(rate), instructions + own, rng.randrange(20, 120))


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(20_000) for _ in range(count))


def with_blocks(profile: Profile, count: int) -> Profile:
    """Return nodes of so many blocks of KV, and no store."""
    return replace(profile, device_kv_tokens=count * BLOCK_SIZE, host_kv_tokens=count * BLOCK_SIZE)


Workload = Callable[[float, int, random.Random], Iterator[Asked]]
WORKLOADS: dict[str, Workload] = {
    "even": even,
    "shifting": shifting,
    "bursts": bursts,
    "mixed": mixed,
    "agents": agents,
}


async def _answer(dispatcher: Dispatcher, number: int, asked: Asked, slo: Slo) -> None:
    stop, named = StopParams(asked.max_tokens), asked.slo or slo
    request = Request(RequestId(f"r{number}"), asked.tokens, SamplingParams(), stop, None, named)
    with contextlib.suppress(SloUnreachableError):
        async for _ in dispatcher.generate(request):
            pass


async def offer(
    workload: Iterable[Asked], dispatchers: Sequence[Dispatcher], slo: Slo, clock: Clock, group: TaskGroup
) -> None:
    """Ask for all of a workload as its moments come, of the dispatchers in turn."""
    due_s = clock.now_s()
    for number, asked in enumerate(workload):
        # the first comes as roles begin to be looked at, in both programs
        due_s += asked.after_s if number else 0.0
        await asyncio.sleep(due_s - clock.now_s())
        group.create_task(_answer(dispatchers[number % len(dispatchers)], number, asked, slo))


def logged(path: Path, workload: Iterable[Asked], served: Served) -> LiveRun:
    """Serve a workload; leave its decision log, and return what it holds."""
    cost = CostModel(served.profile)
    log = DecisionLog(path, Shared(served.profile, served.settings, MODEL_ID), 1 << 32)
    num_blocks = served.profile.device_kv_tokens // BLOCK_SIZE
    infos = node_infos(served.num_prefill, served.num_decode, served.num_both, num_blocks)

    async def scenario(clock: VirtualLoop) -> None:
        async with (
            virtual_cluster(clock, served.settings, infos, cost, decision_log=log, engine=served.engine) as (
                dispatcher,
                _,
            ),
            TaskGroup() as group,
        ):
            await offer(workload, [dispatcher], served.slo, clock, group)

    run(scenario)
    log.close()
    return read_run(path)


@dataclass(frozen=True, slots=True)
class Side:
    """What came of a workload on one of the two sides."""

    refused: int
    ttft_s: float
    """The mean of those served."""
    ttft_p99_s: float
    tbt_s: float
    """The mean of requests' mean gaps."""
    good: float
    """Share of all requests that were served within both bounds."""
    alone: int
    """Requests that one node served whole."""


def live_side(live: LiveRun) -> Side:
    """Return what a live run came to."""
    pairs = [(item.actual.ttft_s or 0.0, item.actual.mean_tbt_s or 0.0) for item in live.served]
    bounds = [item.made.asked.slo for item in live.served]
    alone = sum(item.placed.prefill_node == item.placed.decode_node for item in live.served)
    return _side(pairs, len(live.refused), alone, bounds)


def simulated_side(outcomes: Outcomes) -> Side:
    """Return what a simulation came to."""
    pairs = list(zip(outcomes.ttft_s, outcomes.mean_tbt_s, strict=True))
    bounds = [outcomes.named[number] for number in outcomes.number]
    alone = sum(map(eq, outcomes.prefill_node, outcomes.decode_node))
    return _side(pairs, outcomes.num_rejected, alone, bounds)


def _side(pairs: Sequence[tuple[float, float]], refused: int, alone: int, bounds: Sequence[Slo]) -> Side:
    ttfts_s, gaps_s = [ttft for ttft, _ in pairs], [gap for _, gap in pairs if gap]
    good = sum(
        ttft <= slo.ttft_slo_s and gap <= slo.tbt_slo_s
        for (ttft, gap), slo in zip(pairs, bounds, strict=True)
    )
    share = good / (len(pairs) + refused)
    return Side(refused, fmean(ttfts_s), ranked(ttfts_s, 99), fmean(gaps_s), share, alone)


def compared(folder: Path, workloads: Iterable[Iterable[Asked]], served: Served) -> dict[str, Any]:
    """Serve workloads, one after the other, and simulate each; return both as means."""
    rows, changes, numbers = [], 0, [0, 0]
    for number, asked in enumerate(workloads):
        live = logged(folder / f"{number}.jsonl", asked, served)
        cluster = simulated(live, served.profile, served.engine)
        rows.append((live_side(live), simulated_side(cluster.outcomes)))
        changes += cluster.outcomes.role_changes
        numbers[0] += len(live.decisions)
        numbers[1] += num_made_alike(live)
    lives, ours = ([asdict(side) for side in column] for column in zip(*rows, strict=True))
    theirs, other = ({name: fmean(row[name] for row in side) for name in side[0]} for side in (lives, ours))
    names = ("refused", "ttft_s", "ttft_p99_s", "tbt_s")
    return {
        "live": theirs,
        "simulated": other,
        "error": {name: other[name] / theirs[name] - 1 if theirs[name] else other[name] for name in names},
        "good_points": 100 * (other["good"] - theirs["good"]),
        "role_changes": changes,
        "decisions": numbers[0],
        "decisions_made_again_alike": numbers[1],
        "runs": [{"live": one, "simulated": two} for one, two in zip(lives, ours, strict=True)],
    }


H200 = nothing_between(load_profile("h200-llama8b"))
CASES: dict[str, tuple[Workload, float, Served]] = {
    **{f"even, {rate:g} a second": (even, rate, Served()) for rate in (8.0, 16.0, 24.0, 32.0, 40.0)},
    "shifting, 16 a second": (shifting, 16.0, Served()),
    "shifting, 24 a second": (shifting, 24.0, Served()),
    "bursts, 24 a second": (bursts, 24.0, Served()),
    "mixed bounds, 32 a second": (mixed, 32.0, Served()),
    "even, 40 a second, 1P1D2C": (even, 40.0, Served(1, 1, 2)),
    "even, 38 a second, 4C": (even, 38.0, Served(0, 0, 4)),
    "even, 40 a second, 4C": (even, 40.0, Served(0, 0, 4)),
    "even, 250 a second, h200-llama8b": (even, 250.0, Served(profile=H200, slo=Slo(0.5, 0.012))),
}


def main() -> None:
    """Run and print; write the results where asked."""
    parser = argparse.ArgumentParser(prog="python -m bench.conformance_virtual", description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--case", choices=CASES, action="append", help="all of them")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    about, found = about_run(), {}
    for name in arguments.case or CASES:
        workload, rate, served = CASES[name]
        rngs = [random.Random(seed) for seed in range(1, arguments.seeds + 1)]
        workloads = [workload(rate, arguments.requests, rng) for rng in rngs]
        with tempfile.TemporaryDirectory() as folder:
            row = found[name] = compared(Path(folder), workloads, served)
        for side in ("live", "simulated"):
            figures = ", ".join(f"{key} {value:.4g}" for key, value in row[side].items())
            print(f"{name:32} {side:10} {figures}", flush=True)
    result = {"about": about, "requests": arguments.requests, "seeds": arguments.seeds, "cases": found}
    write_result(arguments.json, result)


if __name__ == "__main__":
    main()
