"""A conductor stopped for longer than a lease while it streams: which streams are whole afterwards?"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

from bench.faults.asking import Clients, drawn_prompts
from bench.faults.cluster import FaultCluster, wait_until
from bench.faults.kills import counts, leaked_blocks, with_cluster

STOPS_S = (15.0, 30.0, 60.0)
"""Seconds of a stop: all exceed the lease of 10 s, the last exceeds every wait of the conductor's own."""
STREAMS = 50
TOKENS_OF_PROMPT = (60, 200)
TOKENS_OF_ANSWER = 200
BEGUN_S = 0.5
"""Seconds from the moment when all streams are in progress to the stop: most have tokens by then."""


def _conductor_stopped(cluster: FaultCluster, count: int) -> dict[str, Any]:
    """Stop it `count` times for each length, every time when all streams have begun."""
    rng = random.Random(count)
    prompts = drawn_prompts(rng, 24, TOKENS_OF_PROMPT, TOKENS_OF_ANSWER)
    rows = {}
    for stop_s in STOPS_S:
        clients = Clients(cluster.grpc_address, prompts, rng, STREAMS)
        lost_before = cluster.lost_attempts()
        try:
            ended_s = [_stop(cluster, clients, stop_s) for _ in range(count)]
        finally:
            clients.close()
        rows[f"stopped_{stop_s:g}_s"] = counts(clients) | {
            "placed_again": cluster.lost_attempts() - lost_before,
            "leaked_blocks": leaked_blocks(cluster),
            "all_ended_after_s_max": round(max(ended_s), 3),
        }
        print(rows, flush=True)
    return {"injected": count * len(STOPS_S), "streams_at_once": STREAMS, **rows}


def _stop(cluster: FaultCluster, clients: Clients, stop_s: float) -> float:
    """Return how many seconds after it went on the last stream had ended."""
    pid = cluster.conductor.pid()
    assert pid is not None
    asked = clients.begin()
    wait_until(lambda: cluster.status()["running_requests"] == STREAMS)
    time.sleep(BEGUN_S)
    os.kill(pid, signal.SIGSTOP)
    num_ended = sum(future.done() for future in asked)
    try:
        time.sleep(stop_s)
    finally:
        os.kill(pid, signal.SIGCONT)
    went_on_s = time.monotonic()
    ended_s = clients.finish(asked) - went_on_s
    if num_ended or cluster.conductor.pid() != pid:
        raise RuntimeError(f"{num_ended} streams had ended when it was stopped, or it was restarted")
    wait_until(lambda: len(cluster.nodes()) == len(cluster.pids))
    return ended_s


conductor_stopped = with_cluster(_conductor_stopped)
