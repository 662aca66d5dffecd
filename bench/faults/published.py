"""The faults that Dynamo publishes of itself: eight clients, a hundred requests each, one process killed.

A client sends its next request when its last has ended. Nodes and conductor are started again
at once, as by their supervisors; restarting a node for its operator is a row of its own here.
"""

from __future__ import annotations

import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.faults.asking import Clients, drawn_prompts
from bench.faults.cluster import FaultCluster, wait_until
from bench.faults.kills import counts, kill, leaked_blocks, with_cluster

CLIENTS = 8
REQUESTS = 800
FEW_REQUESTS = 200
"""The number of requests in rows that no other project publishes."""
TOKENS_OF_PROMPT = (60, 200)
TOKENS_OF_ANSWER = 30
LOAD_S = 3_600.0
"""The seconds that half of the requests may take, on a machine however busy."""
SETTLED_S = 0.1
"""Seconds after a kill in which clients read what is in their sockets."""


def _under_load(
    cluster: FaultCluster, fault: Callable[[Clients], dict[str, Any]], requests: int
) -> dict[str, Any]:
    """Ask so many requests and inject `fault` when half of them have been answered."""
    rng = random.Random(1)
    prompts = drawn_prompts(rng, 24, TOKENS_OF_PROMPT, TOKENS_OF_ANSWER)
    clients = Clients(cluster.grpc_address, prompts, rng, CLIENTS)
    num_nodes = len(cluster.pids)
    try:
        asked = clients.ask_many(requests)
        wait_until(lambda: clients.seen.requests >= requests // 2, LOAD_S)
        of_fault = fault(clients)
        for future in asked:
            future.result()
        wait_until(lambda: len(cluster.nodes()) == num_nodes)
        return counts(clients) | {"leaked_blocks": leaked_blocks(cluster)} | of_fault
    finally:
        clients.close()


def _repeated(
    cluster: FaultCluster,
    count: int,
    fault: Callable[[Clients], dict[str, Any]],
    requests: int = REQUESTS,
) -> dict[str, Any]:
    runs = []
    for _ in range(count):
        runs.append(_under_load(cluster, fault, requests))
        print(runs[-1], flush=True)
    failed = [run["failed"] for run in runs]
    return {"injected": count, "failed_median": statistics.median(failed), "runs": runs}


def _conductor_killed(cluster: FaultCluster, count: int) -> dict[str, Any]:
    def fault(clients: Clients) -> dict[str, Any]:
        killed_at_s = time.monotonic()
        cluster.kill_conductor()

        def served_again() -> list[float]:
            return [at_s for at_s in list(clients.first_token_at_s) if at_s > killed_at_s + SETTLED_S]

        wait_until(lambda: bool(served_again()))
        wait_until(lambda: len(cluster.nodes()) == len(cluster.pids))
        return {
            "first_token_again_s": round(min(served_again()) - killed_at_s, 3),
            "all_nodes_again_s": round(time.monotonic() - killed_at_s, 3),
        }

    return _repeated(cluster, count, fault)


def _decode_killed(cluster: FaultCluster, count: int) -> dict[str, Any]:
    def fault(clients: Clients) -> dict[str, Any]:
        kill(cluster, random.Random(count).choice(["decode-0", "decode-1"]), random.Random(0))
        return {}

    return _repeated(cluster, count, fault)


def _conductor_twice(cluster: FaultCluster, count: int) -> dict[str, Any]:
    """A second conductor with the first one's configuration, ports included."""

    def fault(clients: Clients) -> dict[str, Any]:
        config = cluster.folder / "conductor.json"
        began_s = time.monotonic()
        second = subprocess.run(
            [sys.executable, "-m", "conductor", "--config", str(config)],
            stdin=subprocess.PIPE,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if second.returncode != 2:
            raise RuntimeError(f"the second conductor ended with {second.returncode}: {second.stderr}")
        said = second.stderr.strip().splitlines()[-1]
        return {"second_ended_after_s": round(time.monotonic() - began_s, 2), "second_said": said}

    return _repeated(cluster, count, fault, FEW_REQUESTS)


def _rolling_restart(cluster: FaultCluster, count: int) -> dict[str, Any]:
    """SIGTERM to each node in turn, the next when the last is back."""

    def fault(clients: Clients) -> dict[str, Any]:
        began_s = time.monotonic()
        for name in list(cluster.pids):
            cluster.signal(name, signal.SIGTERM)
            wait_until(lambda name=name: not cluster.is_alive(name))  # type: ignore[misc]
            cluster.revive()
            wait_until(lambda: len(cluster.nodes()) == len(cluster.pids))
        return {"all_restarted_s": round(time.monotonic() - began_s, 2)}

    return _repeated(cluster, count, fault, FEW_REQUESTS)


conductor_killed = with_cluster(_conductor_killed)
decode_killed_of_800 = with_cluster(_decode_killed)
conductor_twice = with_cluster(_conductor_twice)
rolling_restart = with_cluster(_rolling_restart)
