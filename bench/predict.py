"""How well the conductor predicts TTFT, live, on this machine's processor.

    python -m bench.predict [--requests 60] [--rate 0.8] [--json bench/results/predict.json]
    python -m bench.predict --log FOLDER/decisions.jsonl    # what `bench.goodput --logs` left, or any cluster

A cluster of one prefill and one decode node with SmolLM2 (bench/local_cluster.py, no Ray) serves
prompts of 20 to 800 tokens, a third of which go on from an earlier one: first one at a time,
which is left out, because the corrections begin there; then in an open loop. Its decision log
holds what was predicted and what came.

Reported for each term is |predicted / actual - 1|; TTFT is counted from placement, since what
a request waited before is known then. `profile alone` is the prefill term
without the ratio that was learned.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import grpc

from base.config import ClusterConfig, EngineConfig, PoolConfig, SchedulerConfig, ServerConfig
from bench.about_run import about_run, write_result
from bench.local_cluster import local_cluster, smollm2
from conductor.placing.cost_model import CostModel
from conductor.placing.decisions import Actual, Decision
from conductor.placing.placement import Placement
from conductor.placing.profile import Profile
from conductor.replay.decision_log import read_log
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub

VOCABULARY = 20_000
WARM_UP = 15
"""Requests one at a time, after which what was learned first weighs a fifth."""


def prompts(count: int, rng: random.Random) -> list[list[int]]:
    """Return prompts of 20 to 800 tokens, log-uniform; a third begin with an earlier one."""
    made: list[list[int]] = []
    for _ in range(count):
        length = int(20 * 40 ** rng.random())
        tokens = [17 + rng.randrange(VOCABULARY) for _ in range(length)]
        if made and rng.random() < 1 / 3:
            tokens = (rng.choice(made) + tokens)[:1_000]
        made.append(tokens)
    return made


async def ask(stub: InferenceStub, tokens: list[int], max_tokens: int) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=tokens),
        sampling=pb.Sampling(temperature=0.0),
        stop=pb.Stop(max_tokens=max_tokens, ignore_eos=True),
    )
    answer: Any = stub.Generate(request)
    async with asyncio.timeout(300):  # a deadline of the call would be a bound on TTFT
        async for _ in answer:
            pass


async def load(address: str, count: int, rate: float, rng: random.Random) -> None:
    """Send an open loop of requests; return when all are answered."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as group:
        stub = InferenceStub(channel)
        every = prompts(WARM_UP + count, rng)
        for tokens in every[:WARM_UP]:
            await ask(stub, tokens, 8)
        for tokens in every[WARM_UP:]:
            group.create_task(ask(stub, tokens, rng.randrange(4, 24)))
            await asyncio.sleep(rng.expovariate(rate))


def pairs(path: Path) -> tuple[list[tuple[Decision, Placement, Actual]], Profile]:
    """Return each placed decision of a log with what came of it, in order, and their profile."""
    decisions: dict[str, Decision] = {}
    found = []
    shared, items = read_log(path)
    for item in items:
        if isinstance(item, Decision):
            decisions[item.asked.request_id] = item
        else:
            made = decisions[item[0]]
            assert isinstance(made.result, Placement), "only what was placed has an outcome"
            found.append((made, made.result, item[1]))
    return sorted(found, key=lambda pair: pair[0].decided_at_s), shared.profile


def errors(found: list[tuple[Decision, Placement, Actual]], profile: Profile) -> dict[str, dict[str, float]]:
    """Return the median and the 90th percentile of each term's relative error."""
    terms: dict[str, list[float]] = {}
    cost = CostModel(profile)

    def note(term: str, predicted_s: float, actual_s: float | None) -> None:
        if actual_s:
            terms.setdefault(term, []).append(abs(predicted_s / actual_s - 1))

    for made, placed, actual in found:
        waited_s = made.decided_at_s - made.arrived_at_s
        note("ttft", placed.predicted_ttft_s, actual.ttft_s and actual.ttft_s - waited_s)
        note("prefill", placed.prefill_s, actual.compute_s)
        note("tbt", placed.predicted_tbt_s, actual.mean_tbt_s)
        new_tokens = made.asked.num_tokens - placed.matched_tokens
        note("prefill, profile alone", cost.prefill_s(new_tokens, placed.matched_tokens), actual.compute_s)
    return {
        term: {
            "median": statistics.median(values),
            "p90": statistics.quantiles(values, n=10)[-1],
            "count": len(values),
        }
        for term, values in terms.items()
    }


def measure(count: int, rate: float) -> dict[str, Any]:
    engine = EngineConfig(block_size=32, kv_cache_gib=0.75, threads=1)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "decisions.jsonl"
        config = ClusterConfig(
            server=ServerConfig(http_port=0, grpc_port=0),
            prefill=PoolConfig(engine=engine),
            decode=PoolConfig(engine=engine),
            scheduler=SchedulerConfig(roles="fixed", decision_log=str(log)),
        )
        with local_cluster(config, smollm2(), Path(folder)) as cluster:
            cluster.wait_nodes(2)
            asyncio.run(load(cluster.grpc_address, count, rate, random.Random(1)))
        found, profile = pairs(log)
    error = errors(found[WARM_UP:], profile)
    return {"requests": len(found) - WARM_UP, "rate": rate, "relative_error": error}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.predict", description=__doc__)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=0.8)
    parser.add_argument("--log", type=Path, help="of a cluster that served; nothing is started then")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    about = about_run()
    if arguments.log:
        result: dict[str, Any] = {"relative_error": errors(*pairs(arguments.log))}
    else:
        result = measure(arguments.requests, arguments.rate)
    for term, error in result["relative_error"].items():
        print(f"{term:<24}median {error['median']:6.1%}   p90 {error['p90']:6.1%}   of {error['count']}")
    write_result(arguments.json, {"about": about, **result})


if __name__ == "__main__":
    main()
