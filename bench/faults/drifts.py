"""Nodes that change roles under requests: prompts half computed, KV on its way, tokens to come."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from bench.faults.asking import Clients, drawn_prompts
from bench.faults.cluster import FaultCluster, fault_cluster
from bench.faults.kills import counts, leaked_blocks
from bench.local_cluster import smollm2

PROMPTS = 12
LENGTH = (60, 300)
MAX_TOKENS = 12


def _num_changes(cluster: FaultCluster) -> int:
    return cluster.conductor.log_path.read_text(errors="replace").count("role change")


def roles_drift(count: int) -> dict[str, Any]:
    """Let roles change `count` times under four clients of SmolLM2."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        shape: dict[str, Any] = {"program": "bench.faults.drifting_conductor", "roles": "follow"}
        with fault_cluster(smollm2(), Path(folder) / "run", 2, 2, **shape) as cluster:
            return _drifted(cluster, count)


def _drifted(cluster: FaultCluster, count: int) -> dict[str, Any]:
    rng = random.Random(count)
    clients = Clients(cluster.grpc_address, drawn_prompts(rng, PROMPTS, LENGTH, MAX_TOKENS), rng)
    before = _num_changes(cluster)
    try:
        while _num_changes(cluster) - before < count:
            clients.finish(clients.begin())
            print(f"{_num_changes(cluster) - before} of {count}, {clients.seen}", flush=True)
    finally:
        clients.close()
    changes = _num_changes(cluster) - before
    return {"injected": changes, **counts(clients), "leaked_blocks": leaked_blocks(cluster)}
