"""A hundred thousand requests while processes are killed: do memory, descriptors and blocks stay flat?

One node of each role lives through all of it and is measured; the other node of each role is killed
in turn, every 500 requests, and each twentieth time the conductor instead, which is measured in each
of its lives. Answers are compared with undisturbed ones, as in every row. Most prompts and answers
are short, so that so many fit into an hour of two cores; some are long, so that kills meet prompts
of many chunks and streams of many steps.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.faults.asking import Clients, Prompt, drawn_prompts
from bench.faults.cluster import FaultCluster, wait_until
from bench.faults.kills import counts, leaked_blocks, with_cluster
from bench.faults.samples import pooled_slope

CLIENTS = 48
SHAPES = {(8, 40): (170, 8), (100, 200): (24, 8), (400, 900): (6, 32)}
"""Numbers of prompts and tokens of their answers, by the tokens (least, most) of the prompts."""
REQUESTS_BETWEEN_KILLS = 500
KILLED_IN_TURN = [*(("prefill-1", "decode-1") * 9), "prefill-1", "conductor"]
SAMPLE_S = 2.0
WARM_UP_SHARE = 0.2
"""The share of a process's samples that is left out while caches, pools of threads and the allocator fill."""
SURVIVORS = ("prefill-0", "decode-0")


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process: its memory, files and threads when so many requests had been answered."""

    requests: int
    rss_mib: float
    num_fds: int
    num_threads: int


@dataclass(slots=True)
class Lives:
    """The samples of one process and of its successors, each warm-up left out."""

    by_pid: dict[int, list[Sample]] = field(default_factory=dict)

    def take(self, pid: int, requests: int) -> None:
        """Sample the process, unless it has just ended."""
        try:
            self.by_pid.setdefault(pid, []).append(sample(pid, requests))
        except (FileNotFoundError, ProcessLookupError):
            return

    def report(self) -> dict[str, Any]:
        lives = [each[int(WARM_UP_SHARE * len(each)) :] for each in self.by_pid.values() if len(each) > 10]
        every = [one for life in lives for one in life]
        points = [[(one.requests / 1e5, one.rss_mib) for one in life] for life in lives]
        return {
            "lives": len(lives),
            "rss_mib_slope_of_100k_requests": round(pooled_slope(points), 2),
            "after_warm_up": [asdict(life[0]) for life in lives],
            "at_the_end": [asdict(life[-1]) for life in lives],
            "rss_mib_max": round(max((one.rss_mib for one in every), default=0.0), 1),
            "fds_max": max((one.num_fds for one in every), default=0),
            "threads_max": max((one.num_threads for one in every), default=0),
        }


def sample(pid: int, requests: int) -> Sample:
    status = Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    rss_mib = int(values["VmRSS"].split()[0]) / 1024
    num_fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Sample(requests, round(rss_mib, 2), num_fds, int(values["Threads"]))


def _prompts(rng: random.Random) -> list[Prompt]:
    return [
        prompt
        for length, (count, max_tokens) in SHAPES.items()
        for prompt in drawn_prompts(rng, count, length, max_tokens)
    ]


@dataclass(slots=True)
class _Killer:
    """Kills when it is time."""

    cluster: FaultCluster
    clients: Clients
    killed: Counter[str] = field(default_factory=Counter)
    failed_beside: int = 0
    """Requests that failed from a conductor's end until all nodes were back: those in progress."""
    _killed_at: int = 0
    _failed_before: int | None = None

    def look(self) -> None:
        if len(self.cluster.nodes()) < len(self.cluster.pids):
            return
        seen = self.clients.seen
        if self._failed_before is not None:
            self.failed_beside += seen.failed - self._failed_before
            self._failed_before = None
        if seen.requests - self._killed_at >= REQUESTS_BETWEEN_KILLS:
            self._killed_at = seen.requests
            self._kill(KILLED_IN_TURN[self.killed.total() % len(KILLED_IN_TURN)])

    def _kill(self, name: str) -> None:
        self.killed[name] += 1
        if name == "conductor":
            self._failed_before = self.clients.seen.failed
            pid = self.cluster.conductor.pid()
            self.cluster.kill_conductor()
            wait_until(lambda: self.cluster.conductor.pid() != pid)
        else:
            self.cluster.kill(name)
            wait_until(lambda: not self.cluster.is_alive(name))
            self.cluster.revive()
        if self.killed.total() % 10 == 0:
            print(f"{dict(self.killed)}, {self.failed_beside} failed beside, {self.clients.seen}", flush=True)


def _soak(cluster: FaultCluster, count: int) -> dict[str, Any]:
    rng = random.Random(count)
    clients = Clients(cluster.grpc_address, _prompts(rng), rng, CLIENTS)
    killer = _Killer(cluster, clients)
    lives = {name: Lives() for name in ("conductor", *SURVIVORS)}
    began_s = sampled_s = time.monotonic()
    try:
        asked = clients.ask_many(count)
        while not all(future.done() for future in asked):
            time.sleep(0.2)
            killer.look()
            if time.monotonic() - sampled_s >= SAMPLE_S:
                sampled_s = time.monotonic()
                pids = {**cluster.pids, "conductor": cluster.conductor.pid()}
                for name, each in lives.items():
                    if (pid := pids[name]) is not None:
                        each.take(pid, clients.seen.requests)
        seconds = round(time.monotonic() - began_s)
        for future in asked:
            future.result()
        return {
            "injected": dict(killer.killed),
            **counts(clients),
            "failed_of_a_killed_conductor": killer.failed_beside,
            "seconds": seconds,
            "placed_again": cluster.lost_attempts(),
            "leaked_blocks": leaked_blocks(cluster),
            "processes": {name: each.report() for name, each in lives.items()},
        }
    finally:
        clients.close()


soak = with_cluster(_soak)
