"""A live run beside its simulation, on this machine.

    python -m bench.conformance [--rounds 4] [--requests 120] [--json bench/results/conformance.json]

A conductor as it is deployed with the settings that ship, gRPC clients in an open loop, and nodes as they
ship (`timed_node.py`) in a process of their own, on devices that take what a profile says: slow ones (a step
takes 0.15 s, a prompt some 0.3 s), so that a busy machine's delays of milliseconds are small beside them. A
round is simulated from its arrivals alone, with that profile.

With `--engine` the nodes are real, SmolLM2 on this processor, as noisy as the machine, and do one thing each.
The profile of a round is fitted to the decision log and the timelines of the round before (`conductor profile
--from-log --timelines`); beside it stands the one fitted to the round itself, which differs by what the
machine did meanwhile.

Prompts are 20 to 800 tokens, a third of them going on from an earlier one;
outputs 4 to 24, or 16 to 48 where nodes are real: a request's mean gap is of as many steps, and of few
the machine's noise is all there is in the highest. A time in which there was always a request, and other
work on the machine took more than `--others` of its processors, is left out with its requests and
steps, whatever came of it; all of the round is simulated, for the caches.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from base.config import ClusterConfig, EngineConfig, PoolConfig, SchedulerConfig, ServerConfig
from bench.about_run import about_run, write_result
from bench.local_cluster import local_cluster, smollm2
from bench.others import OthersWatch
from bench.predict import ask, prompts
from bench.profile_steps import profile_from_steps
from bench.stub_cluster import stub_cluster
from conductor.placing.profile import Profile
from conductor.profiles.reader import load_profile
from conductor.replay.conformance import (
    LiveRun,
    compared,
    comparison_rows,
    num_made_alike,
    read_run,
    simulated,
)
from conductor.replay.outcome import Outcomes
from conductor.replay.report import aligned
from deploy.api_client import read_json
from protos.inference_pb2_grpc import InferenceStub

BLOCK_SIZE = 32
NODES = 2
"""Number of nodes of each role, where they are stubs; of real ones there is one of each."""

AHEAD_S = 1e6
"""Everything is placed when it comes, as in replay."""


def slow_profile() -> Profile:
    """Return what the stub nodes take."""
    return replace(
        load_profile("cpu-smollm2"),
        name="slow stub",
        prefill_fixed_s=0.05,
        prefill_token_s=1e-3,
        prefill_token2_s=0.0,
        prefill_small_s=0.0,
        prefix_token_s=0.0,
        decode_fixed_s=0.15,
        decode_sequence_s=0.005,
        decode_context_token_s=1e-5,
        device_kv_tokens=320_000,
        host_kv_tokens=10_000_000,
        # a stub hands nothing over
        transfer_bytes_per_s=1e15,
    )


async def load(address: str, count: int, rate: float, seed: int, outputs: range) -> None:
    """Send an open loop of requests; return when all are answered."""
    rng = random.Random(seed)
    async with grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as group:
        stub = InferenceStub(channel)
        for tokens in prompts(count, rng):
            group.create_task(ask(stub, tokens, rng.choice(outputs)))
            await asyncio.sleep(rng.expovariate(rate))


def stub_run(log: Path, count: int, rate: float, seed: int) -> None:
    """Serve a load by nodes that only take their time, and leave its decision log."""
    scheduler = SchedulerConfig(decision_log=str(log))
    with stub_cluster(slow_profile(), NODES, NODES, scheduler=scheduler, timed=True) as cluster:
        while len(read_json(f"127.0.0.1:{cluster.http_port}", "/status")["nodes"]) < 2 * NODES:
            time.sleep(0.1)
        asyncio.run(load(cluster.grpc_address, count, rate, seed, range(4, 24)))


def engine_run(log: Path, count: int, rate: float, seed: int) -> None:
    """Serve a load by one prefill and one decode node of SmolLM2; leave its log and their timelines."""
    pool = PoolConfig(engine=EngineConfig(block_size=BLOCK_SIZE, kv_cache_gib=0.75, threads=1))
    config = ClusterConfig(
        server=ServerConfig(http_port=0, grpc_port=0),
        prefill=pool,
        decode=pool,
        scheduler=SchedulerConfig(decision_log=str(log), ahead_s=AHEAD_S, roles="fixed"),
        trace_out=str(timelines_of(log)),
    )
    # A new one each time: a supervisor would go on with the configuration of the round before.
    folder = log.with_suffix("")
    folder.mkdir()
    with local_cluster(config, smollm2(), folder) as cluster:
        cluster.wait_nodes(2)
        asyncio.run(load(cluster.grpc_address, count, rate, seed, range(16, 49)))


def timelines_of(log: Path) -> Path:
    """Return the folder of the nodes' timelines that belong to a decision log."""
    return log.with_suffix(".timelines")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A round that was run live."""

    live: LiveRun
    kept: frozenset[int]
    """Numbers of the served requests whose busy period was undisturbed."""
    profile: Profile
    """The nodes' own; of real ones, fitted to the undisturbed steps."""


def recorded(folder: Path, number: int, arguments: argparse.Namespace) -> Recorded:
    """Run a round live, again while fewer than half of its requests were undisturbed."""
    run = engine_run if arguments.engine else stub_run
    for attempt in itertools.count():
        log = folder / f"round-{number}-{attempt}.jsonl"
        with OthersWatch() as others:
            run(log, arguments.requests, arguments.rate, number)
        live = read_run(log)
        periods = busy_periods(live)
        quiet = [period for period in periods if others.share(*period) <= arguments.others]
        kept = frozenset(
            at for at, request in enumerate(live.served) if _is_in(request.made.arrived_at_s, quiet)
        )
        print(f"round {number}: {len(kept)} of {len(live.served)} requests were undisturbed", flush=True)
        if 2 * len(kept) >= len(live.served):
            break
    if arguments.engine:
        timelines, name = timelines_of(log), f"round {number}"
        profile = profile_from_steps(live, timelines, name, lambda step: _is_in(step.began_s, quiet))
    else:
        profile = slow_profile()
    return Recorded(live, kept, profile)


def busy_periods(live: LiveRun) -> list[tuple[float, float]]:
    """Return from when to when there was always a request, in order."""
    periods: list[tuple[float, float]] = []
    for request in live.served:
        actual, began_s = request.actual, request.made.arrived_at_s
        ended_s = began_s + (actual.ttft_s or 0.0)
        ended_s += (actual.mean_tbt_s or 0.0) * max(0, actual.num_output_tokens - 1)
        if periods and began_s <= periods[-1][1]:
            periods[-1] = (periods[-1][0], max(ended_s, periods[-1][1]))
        else:
            periods.append((began_s, ended_s))
    return periods


def _is_in(moment_s: float, periods: Sequence[tuple[float, float]]) -> bool:
    return any(began_s <= moment_s <= ended_s for began_s, ended_s in periods)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        before = recorded(Path(folder), 0, arguments).profile
        for number in range(1, arguments.rounds + 1):
            found = recorded(Path(folder), number, arguments)
            profiles = {"round_before": before, "same_round": found.profile}
            if not arguments.engine:
                profiles = {"own": found.profile}
            rounds.append(
                {
                    "errors": {name: _errors(found, profile) for name, profile in profiles.items()},
                    "undisturbed": len(found.kept),
                    "decisions": len(found.live.decisions),
                    "decisions_made_again_alike": num_made_alike(found.live),
                }
            )
            before = found.profile
    return {
        "requests": arguments.requests,
        "rate": arguments.rate,
        "others": arguments.others,
        "nodes": "SmolLM2, 1P1D" if arguments.engine else f"timed, {NODES}P{NODES}D",
        "median_error": {
            profile: {name: _median(rounds, profile, name) for name in errors}
            for profile, errors in rounds[0]["errors"].items()
        },
        "rounds": rounds,
    }


def _median(rounds: Sequence[dict[str, Any]], profile: str, name: str) -> float:
    errors: list[float] = [row["errors"][profile][name]["error"] for row in rounds]
    return median(errors)


def _errors(found: Recorded, profile: Profile) -> dict[str, dict[str, float]]:
    """Simulate all of a round; return how its undisturbed requests compare."""
    outcomes = simulated(found.live, profile).outcomes
    live = replace(found.live, served=[found.live.served[at] for at in sorted(found.kept)])
    places = {made.asked.request_id: place for place, (made, _) in enumerate(found.live.arrivals())}
    kept = frozenset(places[request.made.asked.request_id] for request in live.served)
    measures = compared(live, _only(outcomes, kept))
    print(f"{profile.name}\n{aligned(comparison_rows(live, measures))}", flush=True)
    return {
        each.name: {"live": each.live, "simulated": each.simulated, "error": each.error} for each in measures
    }


def _only(outcomes: Outcomes, numbers: frozenset[int]) -> Outcomes:
    """Return what `compared` reads of some requests."""
    chosen = Outcomes(BLOCK_SIZE)
    for at, number in enumerate(outcomes.number):
        if number in numbers:
            chosen.ttft_s.append(outcomes.ttft_s[at])
            chosen.mean_tbt_s.append(outcomes.mean_tbt_s[at])
            chosen.prefix_tokens.append(outcomes.prefix_tokens[at])
    return chosen


def main() -> None:
    """Run and print; write the results where asked."""
    parser = argparse.ArgumentParser(prog="python -m bench.conformance", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=3.0)
    parser.add_argument("--engine", action="store_true", help="real nodes, SmolLM2 on this processor")
    parser.add_argument("--others", type=float, default=1.0, help="of the machine, that other work may take")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    about = about_run("grpcio")
    result = measure(arguments)
    for profile, errors in result["median_error"].items():
        shown = ", ".join(f"{name} {error:+.1%}" for name, error in errors.items())
        print(f"median error, profile {profile.replace('_', ' ')}: {shown}")
    write_result(arguments.json, {"about": about, **result})


if __name__ == "__main__":
    main()
