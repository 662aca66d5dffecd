"""A live run beside its simulation, on this machine.

    python -m bench.conformance [--rounds 4] [--requests 120] [--json bench/results/conformance.json]

A conductor as it is deployed, gRPC clients in an open loop, and stub nodes (`stub_node.py`) in
a process of their own, whose steps take what a profile says: slow ones (a step takes 0.15 s, a
prompt some 0.3 s), so that a busy machine's delays of milliseconds are small beside them. With
`--engine` the nodes are real, SmolLM2 on this processor, and as noisy as the machine.

The measured profile of a round is fitted to the decision log of the round before
(`conductor profile --from-log`, with `--timelines` where nodes are real); beside it stands the one fitted
to the round itself, which differs by what the machine did meanwhile. With each the round is simulated
from its arrivals alone. Prompts are 20 to 800 tokens, a third of them going on from an earlier one;
outputs 4 to 24, or 16 to 48 where nodes are real: a request's mean gap is of as many steps, and of few
the machine's noise is all there is in the highest. A round in which other work on the machine took more than
`--others` of its processors is run again, whatever came of it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import resource
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from base.config import ClusterConfig, EngineConfig, PoolConfig, SchedulerConfig, ServerConfig
from bench.about_run import about_run
from bench.predict import ask, prompts, wait_for_nodes
from bench.profile_log import profile_from_run
from bench.profile_steps import profile_from_steps
from bench.stub_cluster import stub_cluster
from conductor.profile import Profile, load_profile
from conductor.replay.conformance import (
    LiveRun,
    compared,
    comparison_rows,
    num_made_alike,
    read_run,
    simulated,
)
from conductor.replay.report import aligned
from deploy.api_client import read_json
from deploy.local import local_cluster
from deploy.plan import PreparedModel
from engine.model_store import prepare
from protos.inference_pb2_grpc import InferenceStub

CACHE_DIR = Path("~/.cache/conductor-cluster")
NODES = 2
"""Of each role, where they are stubs; one of each, where they are real."""

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
    """Serve a load by stub nodes, and leave its decision log."""
    # a stub lends nothing
    scheduler = SchedulerConfig(decision_log=str(log), ahead_s=AHEAD_S, fetch=False)
    with stub_cluster(slow_profile(), NODES, NODES, scheduler=scheduler) as cluster:
        while len(read_json(f"127.0.0.1:{cluster.http_port}", "/status")["nodes"]) < 2 * NODES:
            time.sleep(0.1)
        asyncio.run(load(cluster.grpc_address, count, rate, seed, range(4, 24)))


def engine_run(log: Path, count: int, rate: float, seed: int) -> None:
    """Serve a load by one prefill and one decode node of SmolLM2; leave its log and their timelines."""
    prepared = prepare("smollm2", CACHE_DIR, lambda line: None)
    model = PreparedModel(str(prepared.path), prepared.model_id, prepared.name)
    pool = PoolConfig(engine=EngineConfig(block_size=32, kv_cache_gib=0.75, threads=1))
    config = ClusterConfig(
        server=ServerConfig(http_port=0, grpc_port=0),
        prefill=pool,
        decode=pool,
        scheduler=SchedulerConfig(decision_log=str(log), ahead_s=AHEAD_S),
        trace_out=str(timelines_of(log)),
    )
    # A new one each time: a supervisor would go on with the configuration of the round before.
    folder = log.with_suffix("")
    folder.mkdir()
    with local_cluster(config, model, folder) as cluster:
        wait_for_nodes(cluster)
        asyncio.run(load(cluster.grpc_address, count, rate, seed, range(16, 49)))


def timelines_of(log: Path) -> Path:
    """Return the folder of the nodes' timelines that belong to a decision log."""
    return log.with_suffix(".timelines")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A round that was run live, and the profile fitted to it."""

    live: LiveRun
    profile: Profile
    others_share: float
    """Of the processors' time, that other work on the machine took."""


def recorded(folder: Path, number: int, arguments: argparse.Namespace) -> Recorded:
    """Run a round live, again as long as other work takes more of the machine than is allowed."""
    run = engine_run if arguments.engine else stub_run
    for attempt in itertools.count():
        log = folder / f"round-{number}-{attempt}.jsonl"
        others_s, began_s = _others_s(), time.monotonic()
        run(log, arguments.requests, arguments.rate, number)
        share = (_others_s() - others_s) / (time.monotonic() - began_s) / (os.cpu_count() or 1)
        if share <= arguments.others:
            break
        print(f"round {number} again: other work took {share:.0%} of the processors", flush=True)
    live = read_run(log)
    if arguments.engine:
        profile = profile_from_steps(live, timelines_of(log), f"round {number}")
    else:
        profile = profile_from_run(live, f"round {number}")
    return Recorded(live, profile, share)


def _others_s() -> float:
    """Return the seconds that processors worked so far, but for this process and its ended children."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own_s = sum(used.ru_utime + used.ru_stime for used in own)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - own_s


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        before = recorded(Path(folder), 0, arguments).profile
        for number in range(1, arguments.rounds + 1):
            found = recorded(Path(folder), number, arguments)
            live, own = found.live, found.profile
            rounds.append(
                {
                    "round_before": _errors(live, before, arguments.engine),
                    "same_round": _errors(live, own, arguments.engine),
                    "others_share": found.others_share,
                    "decisions": len(live.decisions),
                    "decisions_made_again_alike": num_made_alike(live),
                }
            )
            before = own
    return {
        "requests": arguments.requests,
        "rate": arguments.rate,
        "nodes": "SmolLM2, 1P1D" if arguments.engine else f"stub, {NODES}P{NODES}D",
        "median_error": {
            fitted: {name: median(row[fitted][name]["error"] for row in rounds) for name in rounds[0][fitted]}
            for fitted in ("round_before", "same_round")
        },
        "rounds": rounds,
    }


def _errors(live: LiveRun, profile: Profile, decode_caches: bool) -> dict[str, dict[str, float]]:
    measures = compared(live, simulated(live, profile, decode_caches).outcomes)
    print(f"{profile.name}\n{aligned(comparison_rows(live, measures))}", flush=True)
    return {
        each.name: {"live": each.live, "simulated": each.simulated, "error": each.error} for each in measures
    }


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
    for fitted, errors in result["median_error"].items():
        told = ", ".join(f"{name} {error:+.1%}" for name, error in errors.items())
        print(f"median error, profile of the {fitted.replace('_', ' ')}: {told}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": about, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
