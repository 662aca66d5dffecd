"""A hundred thousand requests while nodes are killed: do memory, descriptors and blocks stay flat?

The conductor and one node of each role live through all of it, and are measured; the other node of
each role is killed in turn. Answers are compared with undisturbed ones, as in every row.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.faults.asking import Clients, drawn_prompts
from bench.faults.cluster import FaultCluster, wait_until
from bench.faults.kills import counts, leaked_blocks, with_cluster
from bench.faults.samples import slope

CLIENTS = 24
SHAPE = ((40, 160), 8)
REQUESTS_BETWEEN_KILLS = 500
SAMPLE_S = 2.0
WARM_UP_SHARE = 0.2
"""Of the requests: caches, pools of threads and the allocator fill up."""
SURVIVORS = ("conductor", "prefill-0", "decode-0")


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process had when so many requests had been answered."""

    requests: int
    at_s: float
    rss_mib: float
    num_fds: int
    num_threads: int


def sample(pid: int, requests: int) -> Sample:
    status = Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    rss_mib = int(values["VmRSS"].split()[0]) / 1024
    num_fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Sample(requests, time.monotonic(), rss_mib, num_fds, int(values["Threads"]))


def _told(samples: list[Sample]) -> dict[str, Any]:
    first, last = samples[0], samples[-1]
    return {
        "rss_mib_slope_of_100k_requests": round(
            slope([(each.requests / 1e5, each.rss_mib) for each in samples]), 2
        ),
        "after_warm_up": asdict(first),
        "at_the_end": asdict(last),
        "rss_mib_max": round(max(each.rss_mib for each in samples), 1),
        "fds_max": max(each.num_fds for each in samples),
    }


def _soak(cluster: FaultCluster, count: int) -> dict[str, Any]:
    rng = random.Random(count)
    clients = Clients(cluster.grpc_address, drawn_prompts(rng, 200, *SHAPE), rng, CLIENTS)
    pids = {"conductor": cluster.conductor.pid() or 0, **cluster.pids}
    samples: dict[str, list[Sample]] = {name: [] for name in SURVIVORS}
    began_s = time.monotonic()
    try:
        asked = clients.ask_many(count)
        over = threading.Event()
        killing = threading.Thread(target=_kill_in_turn, args=(cluster, clients, over))
        killing.start()
        while not all(future.done() for future in asked):
            time.sleep(SAMPLE_S)
            if clients.seen.requests >= WARM_UP_SHARE * count:
                for name in SURVIVORS:
                    samples[name].append(sample(pids[name], clients.seen.requests))
        over.set()
        killing.join()
        return {
            "injected": cluster.num_started - len(cluster.pids),
            **counts(clients),
            "seconds": round(time.monotonic() - began_s),
            "placed_again": cluster.lost_attempts(),
            "leaked_blocks": leaked_blocks(cluster),
            "processes": {name: _told(samples[name]) for name in SURVIVORS},
        }
    finally:
        clients.close()


def _kill_in_turn(cluster: FaultCluster, clients: Clients, over: threading.Event) -> None:
    turn, killed_at = 0, clients.seen.requests
    while not over.wait(0.1):
        if clients.seen.requests - killed_at < REQUESTS_BETWEEN_KILLS or len(cluster.nodes()) < 4:
            continue
        name = ("prefill-1", "decode-1")[turn % 2]
        cluster.kill(name)
        wait_until(lambda name=name: not cluster.is_alive(name))  # type: ignore[misc]
        cluster.revive()
        turn, killed_at = turn + 1, clients.seen.requests
        if turn % 10 == 0:
            print(f"{turn} kills, {clients.seen}", flush=True)


soak = with_cluster(_soak)
