"""Nodes that are killed, or stopped for a while, under requests."""

from __future__ import annotations

import random
import signal
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.faults.asking import Clients, drawn_prompts
from bench.faults.cluster import FaultCluster, fault_cluster, wait_until
from bench.faults.small_model import small_model

PROMPTS = 24
SHAPES = {"prefill": ((1_000, 2_000), 8), "decode": ((60, 200), 60)}
"""Tokens of prompts (least, most) and of answers by role, so that most time goes to the role that is hurt."""
LEASE_S = 10.0
CUT_DRAIN_S = 0.05
"""A drain that is shorter than an answer."""
PATIENCE_S = 60.0


@dataclass(slots=True)
class Recovered:
    """Seconds that things took, one for each fault."""

    node_back_s: list[float] = field(default_factory=list)
    """Seconds from each fault until every node is attached again."""
    blocks_free_s: list[float] = field(default_factory=list)
    """Seconds from the end of the last request until no block is held."""
    noticed_s: list[float] = field(default_factory=list)
    """Seconds from a fault until the conductor counts on the node no more, at most a poll of /status late."""
    leaked_blocks: int = 0
    """Blocks that are held one lease after the last request ended."""
    hits: int = 0
    """Requests that were placed again."""


def with_cluster(row: Callable[[FaultCluster, int], dict[str, Any]], **shape: Any) -> Callable[[int], Any]:
    """Return `row` run on a cluster of its own."""

    def run(count: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            model = small_model(Path(folder) / "model")
            with fault_cluster(model, Path(folder) / "run", **shape) as cluster:
                return row(cluster, count)

    return run


def hurt_nodes(
    cluster: FaultCluster, count: int, role: str, hurt: Callable[[FaultCluster, str, random.Random], float]
) -> dict[str, Any]:
    """Hurt `count` nodes of `role` that are at work, each at a random moment of four requests."""
    rng = random.Random(count)
    length, max_tokens = SHAPES[role]
    clients = Clients(cluster.grpc_address, drawn_prompts(rng, PROMPTS, length, max_tokens), rng)
    began_s = time.monotonic()
    clients.finish(clients.begin())
    unhurt_s = deque([time.monotonic() - began_s], maxlen=5)
    recovered, num_nodes, injected = Recovered(), len(cluster.pids), 0
    lost_before = cluster.lost_attempts()
    try:
        while injected < count:
            begun_s = time.monotonic()
            asked = clients.begin()
            # The longest of the latest: a machine that is shared is now faster, now slower.
            time.sleep(rng.uniform(0, max(unhurt_s)))
            at_work = cluster.at_work(role)
            if at_work:
                injected += 1
                hurt_at_s = time.monotonic()
                recovered.noticed_s.append(hurt(cluster, rng.choice(at_work), rng))
            ended_s = clients.finish(asked)
            _wait_free(cluster, recovered)
            if not at_work:
                unhurt_s.append(ended_s - begun_s)
            else:
                cluster.revive()
                wait_until(lambda: len(cluster.nodes()) == num_nodes)
                recovered.node_back_s.append(time.monotonic() - hurt_at_s)
                if injected % 10 == 0:
                    print(f"{role}: {injected} of {count}, {clients.seen}", flush=True)
    finally:
        clients.close()
    recovered.hits = cluster.lost_attempts() - lost_before
    usual_s = round(max(unhurt_s), 3)
    return {"injected": injected, **report(clients, recovered), "usual_s_of_four_requests": usual_s}


def _wait_free(cluster: FaultCluster, recovered: Recovered) -> None:
    """Wait until no block is held; what still is after a lease has leaked."""
    try:
        recovered.blocks_free_s.append(wait_until(lambda: cluster.held_blocks() == 0, LEASE_S))
    except TimeoutError:
        recovered.leaked_blocks += cluster.held_blocks()


def report(clients: Clients, recovered: Recovered) -> dict[str, Any]:
    return {
        **counts(clients),
        "placed_again": recovered.hits,
        "leaked_blocks": recovered.leaked_blocks,
        "blocks_free_s_max": round(max(recovered.blocks_free_s, default=0.0), 3),
        "noticed_s_max": round(max(recovered.noticed_s, default=0.0), 3),
        "node_back_s_median": round(statistics.median(recovered.node_back_s or [0.0]), 3),
        "node_back_s_max": round(max(recovered.node_back_s, default=0.0), 3),
    }


def counts(clients: Clients) -> dict[str, Any]:
    """Return what the clients saw."""
    seen = asdict(clients.seen)
    return seen | {"longest_gap_s": round(seen["longest_gap_s"], 3)}


def leaked_blocks(cluster: FaultCluster) -> int:
    """Return the blocks that are held one lease after the last request."""
    try:
        wait_until(lambda: cluster.held_blocks() == 0, LEASE_S)
    except TimeoutError:
        return cluster.held_blocks()
    return 0


def kill(cluster: FaultCluster, name: str, rng: random.Random) -> float:
    """SIGKILL; the successor is started at once, as by a supervisor. Return when it was noticed."""
    epoch = cluster.nodes()[name]["epoch"]
    cluster.kill(name)
    noticed_s = wait_until(lambda: cluster.nodes().get(name, {}).get("epoch") != epoch)
    wait_until(lambda: not cluster.is_alive(name))
    cluster.revive()
    return noticed_s


def stop_for_a_while(cluster: FaultCluster, name: str, rng: random.Random) -> float:
    """SIGSTOP, and SIGCONT 0.2 to 14 s later: within the lease of 10 s, or after it.

    Return when it was noticed, 0 if it was not.
    """
    cluster.signal(name, signal.SIGSTOP)
    stopped_s = rng.uniform(0.2, 14.0)
    try:
        return wait_until(lambda: name not in cluster.nodes(), stopped_s)
    except TimeoutError:
        return 0.0
    finally:
        cluster.signal(name, signal.SIGCONT)


def end_amid_requests(cluster: FaultCluster, name: str, rng: random.Random) -> float:
    """SIGTERM, after which the node drains for less time than its requests take; return when it has ended."""
    cluster.signal(name, signal.SIGTERM)
    return wait_until(lambda: not cluster.is_alive(name))


def decode_ended(count: int) -> Any:
    """Return the row of nodes whose drain is cut short: `noticed_s_max` is the last one's end."""

    def row(cluster: FaultCluster, number: int) -> dict[str, Any]:
        cluster.drain_s = CUT_DRAIN_S
        for name in cluster.pids:
            cluster.kill(name)
            wait_until(lambda name=name: not cluster.is_alive(name))  # type: ignore[misc]
        cluster.revive()
        wait_until(lambda: len(cluster.nodes()) == len(cluster.pids))
        return hurt_nodes(cluster, number, "decode", end_amid_requests)

    return with_cluster(row)(count)


def prefill_killed(count: int) -> Any:
    return with_cluster(lambda cluster, n: hurt_nodes(cluster, n, "prefill", kill))(count)


def decode_killed(count: int) -> Any:
    return with_cluster(lambda cluster, n: hurt_nodes(cluster, n, "decode", kill))(count)


def prefill_stopped(count: int) -> Any:
    return with_cluster(lambda cluster, n: hurt_nodes(cluster, n, "prefill", stop_for_a_while))(count)


def decode_stopped(count: int) -> Any:
    return with_cluster(lambda cluster, n: hurt_nodes(cluster, n, "decode", stop_for_a_while))(count)
