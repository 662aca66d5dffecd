"""`python -m bench.rules_live`: our placement rule beside others, where real nodes serve SmolLM2.

Two loads, each for two prefill nodes and a decode node of fixed roles on this machine's processor. A step of
a prefill node lasts four times its processor seconds (bench/paced_node.py), so that other work on the machine
hardly shows.

* `slow`: prompts that share nothing, while one prefill node is at a third of the other's pace
  (bench/slowed_node.py). Beside ours: ours with one pace for all nodes (`alike`), and peers' rules.
* `short`: the agents of `bench.regimes` at a sixteenth of their length, a closed loop of sessions whose
  prompts grow, in caches that hold a part of the sessions. Beside ours: ours without fetches (`local`) and
  with copies that cost only their seconds (`uncharged`), and peers' rules.

Each rule has a cluster of its own (bench/rules_conductor.py) and all are up at once, but one at a time gets a
load: in each round all get the same, one after another, and another begins each time. What a cluster has
learned and cached stays from round to round. The first round is for that, and counts for nothing.

    python -m bench.rules_live slow --out bench/results/rules_live_slow.json
    python -m bench.rules_live short --rules global,local --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from base.config import ClusterConfig, EngineConfig, PoolConfig, SchedulerConfig, ServerConfig
from base.distribution import distribution
from bench.about_run import about_run, write_result
from bench.goodput import driven
from bench.load import warm_up
from bench.local_cluster import LocalCluster, local_cluster, smollm2
from bench.others import OthersWatch
from bench.regimes.sessions import AgentKind, agents
from bench.sse_client import Server
from bench.workload import TOKEN_IDS, LoadRequest, gamma_arrivals, trace_load

BLOCK_SIZE = 32
"""A sixteenth of a trace's block: so much shorter are the agents' prompts."""
NODES = 3
SHORT_PROMPT, LONG_PROMPT = 48, 192
DECODE_CACHE_GIB = 0.5
"""The decode node's cache, which has room for all who decode."""
AGENTS = AgentKind(output_tokens=64, think_s=5.0, most_tokens=24_000)
"""Agents of the regimes, with answers and pauses that two cores bear."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a round sends, and to which nodes."""

    rules: tuple[str, ...]
    """Rules that are compared where none are named; ours first."""
    requests: int
    rate: float
    """Requests a second, or sessions."""
    make: Callable[[int, float, int], Iterator[LoadRequest]]
    """(requests, rate, number of the round) to a load."""
    kv_cache_gib: float
    modules: dict[str, str]
    """What runs instead of a node, by its name."""


def prompts(requests: int, rate: float, number: int) -> Iterator[LoadRequest]:
    """Yield prompts of 48 to 192 tokens, log-uniform, that share nothing."""
    rng = Random(f"prompts {number}")
    times_s = gamma_arrivals(rate, 1.0, rng)
    for _ in range(requests):
        length = int(SHORT_PROMPT * (LONG_PROMPT / SHORT_PROMPT) ** rng.random())
        yield LoadRequest(next(times_s), rng.choices(TOKEN_IDS, k=length), rng.randint(4, 8))


def sessions(requests: int, rate: float, number: int) -> Iterator[LoadRequest]:
    """Yield agents' sessions, each of whose turns comes after the answer before."""
    trace = agents(AGENTS, requests, rate, 1_000 + number, is_closed=True)
    return trace_load(trace, 1.0, None, BLOCK_SIZE)


LOADS = {
    "slow": Load(
        rules=("global", "alike", "dynamo"),
        requests=24,
        rate=0.4,
        make=prompts,
        kv_cache_gib=0.25,
        modules={"prefill-0": "bench.paced_node", "prefill-1": "bench.slowed_node"},
    ),
    "short": Load(
        rules=("global", "local", "uncharged"),
        requests=30,
        rate=0.1,
        make=sessions,
        kv_cache_gib=0.125,
        modules={"prefill-0": "bench.paced_node", "prefill-1": "bench.paced_node"},
    ),
}


def cluster_config(load: Load, rule: str) -> ClusterConfig:
    """Return the configuration of the cluster that serves by a rule."""
    prefill, decode = (
        PoolConfig(engine=EngineConfig(block_size=BLOCK_SIZE, kv_cache_gib=kv_cache_gib, threads=1))
        for kv_cache_gib in (load.kv_cache_gib, DECODE_CACHE_GIB)
    )
    policy = "global" if rule == "local" else rule
    return ClusterConfig(
        server=ServerConfig(http_port=0, grpc_port=0),
        # rivals have pools: what is compared is the rule that places prompts in one
        scheduler=SchedulerConfig(policy=policy, fetch=rule != "local", roles="fixed", reject="none"),
        prefill=replace(prefill, nodes=2),
        decode=decode,
    )


def started(load: Load, rules: list[str], folder: Path, running: ExitStack) -> dict[str, LocalCluster]:
    """Start a cluster for each rule; return them when all their nodes are attached."""
    model = smollm2()
    modules = {"conductor": "bench.rules_conductor", **load.modules}
    clusters = {}
    for rule in rules:
        own = folder / rule
        own.mkdir()
        config = cluster_config(load, rule)
        cluster = running.enter_context(local_cluster(config, model, own, modules))
        cluster.wait_nodes(NODES)
        clusters[rule] = cluster
    return clusters


def in_turns(rules: list[str], number: int) -> list[str]:
    """Return the order in which rules get the load of a round."""
    first = number % len(rules)
    return rules[first:] + rules[:first]


async def round_of(
    clusters: dict[str, LocalCluster], load: Load, requests: int, rate: float, number: int
) -> dict[str, dict[str, Any]]:
    """Send a round's load to each cluster in turn; return what came of it, by rule."""
    found = {}
    for rule in in_turns(list(clusters), number):
        server = Server(clusters[rule].url, "smollm2")
        if number == 0:
            await warm_up(server, 4, LONG_PROMPT)
        with OthersWatch() as others:
            began_s = time.monotonic()
            outcomes, figures = await driven(clusters[rule], server, load.make(requests, rate, number))
            ended_s = time.monotonic()
            await asyncio.sleep(1.0)  # for the watch's last look
        ttft_s = [round(item.ttft_s, 4) for item in outcomes if not item.error]
        found[rule] = {
            "ttft_s": ttft_s,
            "cached_tokens": sum(item.cached_tokens for item in outcomes),
            "prompt_tokens": sum(item.prompt_tokens for item in outcomes),
            "failed": figures["failed"],
            "duration_s": round(ended_s - began_s, 1),
            "others": round(others.share(began_s, ended_s), 3),
            "busy": busy(figures),
        }
        print(f"round {number}: {line(rule, found[rule])}", flush=True)
    return found


def busy(figures: dict[str, Any]) -> dict[str, float]:
    """Return the share of a load's time that each pool's nodes were in a step."""
    return {pool: round(share, 3) for pool, share in figures["busy_share"].items()}


def line(rule: str, found: dict[str, Any]) -> str:
    """Return what a rule came to in a round as a line of text."""
    spread = distribution(array("d", found["ttft_s"]))
    hits = found["cached_tokens"] / max(1, found["prompt_tokens"])
    return (
        f"{rule:10} TTFT s mean {spread['mean']:.3f}, p99 {spread['p99']:.3f}; "
        f"hits {hits:.0%}; {len(found['ttft_s'])} served, {found['failed']} not; "
        f"{found['duration_s']:.0f} s; "
        f"others {found['others']:.0%}; busy {found['busy']}"
    )


def summary(rounds: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each rule: its TTFT over all rounds, beside ours.

    The ratios are of the mean TTFT to ours in the same round: the median of the rounds, and each.
    """
    rows = []
    ours = next(iter(rounds[0]))
    for rule in rounds[0]:
        spread = distribution(array("d", [each for found in rounds for each in found[rule]["ttft_s"]]))
        ratios = [
            statistics.fmean(found[rule]["ttft_s"]) / statistics.fmean(found[ours]["ttft_s"])
            for found in rounds
        ]
        cached, prompt = (
            sum(found[rule][key] for found in rounds) for key in ("cached_tokens", "prompt_tokens")
        )
        rows.append(
            {
                "rule": rule,
                "ttft_mean_s": spread["mean"],
                "ttft_p50_s": spread["p50"],
                "ttft_p99_s": spread["p99"],
                "mean_to_ours": statistics.median(ratios),
                "mean_to_ours_by_round": ratios,
                "hit_rate": cached / max(1, prompt),
                "served": sum(len(found[rule]["ttft_s"]) for found in rounds),
                "failed": sum(found[rule]["failed"] for found in rounds),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("load", choices=[*LOADS])
    add("--rules", help="ours first")
    add("--rounds", type=int, default=5, help="that count")
    add("--requests", type=int, help="in a round, of each rule")
    add("--rate", type=float, help="requests a second, or sessions")
    add("--out", type=Path)
    options = parser.parse_args()
    load = LOADS[options.load]
    rules = options.rules.split(",") if options.rules else list(load.rules)
    requests, rate = options.requests or load.requests, options.rate or load.rate
    about, rounds = about_run("torch"), []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        clusters = started(load, rules, Path(folder), running)
        for number in range(1 + options.rounds):
            found = asyncio.run(round_of(clusters, load, requests, rate, number))
            if number:
                rounds.append({rule: found[rule] for rule in rules})
    rows = summary(rounds)
    for row in rows:
        print(
            f"{row['rule']:10} TTFT s mean {row['ttft_mean_s']:.3f}, p99 {row['ttft_p99_s']:.3f}; to ours "
            f"{row['mean_to_ours']:.2f}; hits {row['hit_rate']:.1%}; {row['failed']} failed"
        )
    result = {"about": about, "load": options.load, "requests": requests, "rate": rate}
    write_result(options.out, {**result, "rules": rows, "rounds": rounds})


if __name__ == "__main__":
    main()
