"""A conductor and nodes with a small model, each a process that a row may kill, stop and start again.

The conductor is started as it is deployed, under its supervisor; nodes are forked
(`node_forks.py`) and started again by `revive`, so that how long a node stays away is the row's to say.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from base.clock import SystemClock
from base.config import (
    ClusterConfig,
    EngineConfig,
    PoolConfig,
    SchedulerConfig,
    ServerConfig,
    StoreConfig,
)
from deploy.api_client import ApiError, read_json
from deploy.plan import LocalModel, conductor_process, node_environment, planned_nodes
from deploy.supervisor import SPARE_AFTER_S, ProcessSpec, Supervisor
from node.process import DRAIN_S

BLOCK_SIZE = 32
CHUNK_TOKENS = 50
"""Tokens of a chunk, so many that they divide neither prompts nor blocks."""
KV_CACHE_GIB = 0.1
GRACE_S = 5.0
PAUSE_S = 0.02
READY_S = 600.0


class NodeForks:
    """The process that forks nodes (`node_forks.py`), and they. All end with `close`."""

    def __init__(self, environment: dict[str, str]) -> None:
        lifeline, self._lifeline = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.faults.node_forks", str(lifeline)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(lifeline,),
            text=True,
            env={**os.environ, **environment},
        )
        os.close(lifeline)

    def start(self, config: Path, log: Path, drain_s: float) -> int:
        """Return the new process's id."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(
            json.dumps({"config": str(config), "log": str(log), "drain_s": drain_s}) + "\n"
        )
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        os.close(self._lifeline)
        self._process.communicate()


class FaultCluster:
    """The processes, by name: conductor, prefill-0, decode-0."""

    drain_s = DRAIN_S
    """The longest drain of a node that is started from now on."""

    def __init__(self, conductor: Supervisor, ready: dict[str, Any], forks: NodeForks, folder: Path) -> None:
        self.conductor = conductor
        self.http_port: int = ready["http_port"]
        self.grpc_address = f"127.0.0.1:{ready['grpc_port']}"
        self.attach_port: int = ready["attach_port"]
        """The port at which the conductor listens for nodes."""
        self.folder = folder
        self._forks = forks
        self.pids: dict[str, int] = {}
        self.num_started = 0

    def status(self) -> dict[str, Any]:
        """Return what GET /status answers; a conductor that is away has no node and no request."""
        try:
            status: dict[str, Any] = read_json(f"127.0.0.1:{self.http_port}", "/status")
        except ApiError:
            return {"ready": False, "running_requests": 0, "nodes": []}
        return status

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Return what /status says of each attached node."""
        return {node["id"]: node for node in self.status()["nodes"]}

    def held_blocks(self) -> int:
        return sum(node.get("held_blocks", 0) for node in self.nodes().values())

    def at_work(self, role: str) -> list[str]:
        """Return the attached nodes of `role` that work on a request."""
        return [name for name, node in self.nodes().items() if role in node["roles"] and node["requests"]]

    def start(self, name: str) -> None:
        self.num_started += 1
        self.pids[name] = self._forks.start(
            self.folder / f"{name}.json", self.folder / f"{name}.log", self.drain_s
        )

    def signal(self, name: str, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pids[name], number)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)

    def kill_conductor(self) -> None:
        """SIGKILL; its supervisor starts it again, at once if it had run for 30 s."""
        pid = self.conductor.pid()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    def is_alive(self, name: str) -> bool:
        try:
            os.kill(self.pids[name], 0)
        except ProcessLookupError:
            return False
        return True

    def revive(self) -> None:
        """Start again whichever node has ended."""
        for name in self.pids:
            if not self.is_alive(name):
                self.start(name)

    def lost_attempts(self) -> int:
        """Return how many times the conductor placed a request again, by its log."""
        return self.conductor.log_path.read_text(errors="replace").count("attempt lost")


def wait_until(condition: Callable[[], bool], timeout_s: float = READY_S) -> float:
    """Return after how many seconds `condition` held; raises TimeoutError."""
    begin_s = time.monotonic()
    while not condition():
        if time.monotonic() - begin_s > timeout_s:
            raise TimeoutError(f"not so within {timeout_s} s")
        time.sleep(PAUSE_S)
    return time.monotonic() - begin_s


def supervised_conductor(
    config: ClusterConfig, model: LocalModel, folder: Path, program: str = "conductor"
) -> Supervisor:
    """Start a cluster's conductor under a supervisor, a spare beside it; `program` is its module."""
    command, values = (sys.executable, "-m", program), asdict(conductor_process(config, model))
    spec = ProcessSpec("conductor", command, values, {}, str(folder), spare_after_s=SPARE_AFTER_S)
    return Supervisor(spec, SystemClock())


@contextmanager
def fault_cluster(
    model: LocalModel,
    folder: Path,
    prefill: int = 2,
    decode: int = 2,
    store: StoreConfig | None = None,
    server: ServerConfig | None = None,
    program: str = "conductor",
    roles: str = "fixed",
) -> Iterator[FaultCluster]:
    """Run one in the body; nothing of it is left afterwards.

    Args:
        program: The conductor's module.
        roles: Whether they follow the load; a row that hurts nodes of one role wants it at work.
    """
    engine = EngineConfig(
        block_size=BLOCK_SIZE, kv_cache_gib=KV_CACHE_GIB, chunk_tokens=CHUNK_TOKENS, threads=1
    )
    config = ClusterConfig(
        server=server or ServerConfig(http_port=0, grpc_port=0),
        prefill=PoolConfig(nodes=prefill, engine=engine),
        decode=PoolConfig(nodes=decode, engine=engine),
        store=store or StoreConfig(),
        scheduler=SchedulerConfig(roles=roles),
    )
    folder.mkdir(parents=True, exist_ok=True)
    conductor = supervised_conductor(config, model, folder, program)
    forks = NodeForks(node_environment(1))
    try:
        cluster = FaultCluster(conductor, conductor.wait_ready(), forks, folder)
        for node in planned_nodes(config, model, (f"127.0.0.1:{cluster.attach_port}",), 1):
            (folder / f"{node.process.node_id}.json").write_text(json.dumps(asdict(node.process)))
            cluster.start(node.process.node_id)
        wait_until(lambda: len(cluster.nodes()) == prefill + decode)
        yield cluster
    finally:
        forks.close()
        conductor.drain(GRACE_S)


def pretty(table: object) -> str:
    return json.dumps(table, indent=1) + "\n"
