"""A conductor with sixteen nodes is killed: when is the next request answered?

The conductor runs under its supervisor. The nodes are stubs (`bench/stub_cluster.py`): what is
timed is the conductor's start, the nodes' dialling and their registering.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc

from base.config import ClusterConfig, EngineConfig, PoolConfig, ServerConfig
from bench.faults.asking import CHANNEL_OPTIONS, TIMEOUT_S, Prompt, ask
from bench.faults.cluster import GRACE_S, supervised_conductor, wait_until
from bench.frontend_live import quick_profile
from bench.local_cluster import smollm2
from bench.stub_cluster import BLOCK_SIZE
from conductor.placing.profile import profile_json
from deploy.api_client import ApiError, read_json
from deploy.supervisor import STEADY_S, Supervisor
from protos.inference_pb2_grpc import InferenceStub

NODES_OF_A_ROLE = 8
PROMPT = Prompt(tuple(range(100, 150)), 4, 1)


def conductor_restarts(count: int) -> dict[str, Any]:
    """Return the row: seconds from SIGKILL to the first token of the next request, and to all nodes."""
    model = smollm2()
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        profile = Path(name) / "profile.json"
        profile.write_text(profile_json(quick_profile()))
        pool = PoolConfig(engine=EngineConfig(block_size=BLOCK_SIZE))
        server = ServerConfig(http_port=0, grpc_port=0)
        config = ClusterConfig(profile=str(profile), server=server, prefill=pool, decode=pool)
        conductor = supervised_conductor(config, model, Path(name))
        try:
            ready = conductor.wait_ready()
            counts = [f"--{role}={NODES_OF_A_ROLE}" for role in ("prefill", "decode")]
            stubs = [sys.executable, "-m", "bench.stub_cluster", f"127.0.0.1:{ready['attach_port']}"]
            nodes = subprocess.Popen([*stubs, model.model_id, str(profile), *counts])
            try:
                return _killed(conductor, ready, count)
            finally:
                nodes.terminate()
                nodes.wait()
        finally:
            conductor.drain(GRACE_S)


def _served_at_s(stub: InferenceStub, until_s: float) -> float:
    """Return when a client that tries again at once has its first token.

    Its first try may go to the dead process: the connection's end has not been read yet.
    """
    while time.monotonic() < until_s:
        answer = ask(stub, PROMPT.request())
        if not answer.error:
            return answer.arrived_at_s[0]
    raise RuntimeError(f"not served after a restart within {TIMEOUT_S} s: {answer.error}")


def _killed(conductor: Supervisor, ready: dict[str, Any], count: int) -> dict[str, Any]:
    def num_nodes() -> int:
        try:
            return len(read_json(f"127.0.0.1:{ready['http_port']}", "/status")["nodes"])
        except ApiError:
            return 0

    served_s, all_nodes_s = [], []
    address = f"127.0.0.1:{ready['grpc_port']}"
    with grpc.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        stub = InferenceStub(channel)
        for _ in range(count):
            wait_until(lambda: num_nodes() == 2 * NODES_OF_A_ROLE)
            # Its supervisor lets one that fails soon after its start wait longer each time.
            time.sleep(STEADY_S)
            ask(stub, PROMPT.request())
            pid = conductor.pid()
            assert pid is not None
            killed_at_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: conductor.pid() != pid)  # type: ignore[misc]
            served_s.append(_served_at_s(stub, killed_at_s + TIMEOUT_S) - killed_at_s)
            wait_until(lambda: num_nodes() == 2 * NODES_OF_A_ROLE)
            all_nodes_s.append(time.monotonic() - killed_at_s)
    return {
        "injected": count,
        "nodes": 2 * NODES_OF_A_ROLE,
        "first_token_again_s": [round(value, 2) for value in served_s],
        "first_token_again_s_median": round(statistics.median(served_s), 2),
        "all_nodes_again_s_median": round(statistics.median(all_nodes_s), 2),
    }
