"""A cluster on this host without Ray: the same processes, under the same supervisors.

For benches and tests on machines that have no Ray. `deploy/cluster.py` is what operators use.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from base.clock import SystemClock
from base.config import ClusterConfig
from base.errors import ConfigError
from deploy.api_client import read_json, read_text
from deploy.plan import LocalModel, conductor_processes, node_environment, planned_nodes
from deploy.supervisor import ProcessSpec, Supervisor
from engine.model_store import prepare

LOOK_EVERY_S = 0.05
GRACE_S = 10.0
"""The longest that a process may take to drain when the cluster ends."""


CACHE_DIR = Path("~/.cache/conductor-cluster")


def smollm2() -> LocalModel:
    """Return SmolLM2, which is fetched where it is not here; what takes long is said on standard error."""
    found = prepare("smollm2", CACHE_DIR, partial(print, file=sys.stderr))
    return LocalModel(str(found.path), found.model_id, found.name)


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A running cluster."""

    ready: dict[str, dict[str, Any]]
    """The line that each process printed when it was ready, by name."""
    processes: dict[str, Supervisor]
    """Supervisors by the names of their processes: conductor, prefill-0, decode-0."""

    @property
    def http_port(self) -> int:
        return self.http_port_of("conductor")

    def http_port_of(self, conductor: str) -> int:
        """Return the HTTP port of one of several conductors."""
        return int(self.ready[conductor]["http_port"])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return self.grpc_address_of("conductor")

    @property
    def attach_address(self) -> str:
        """Return where the first conductor listens for nodes."""
        return f"127.0.0.1:{self.ready['conductor']['attach_port']}"

    def grpc_address_of(self, conductor: str) -> str:
        """Return where one of several conductors takes gRPC."""
        return f"127.0.0.1:{self.ready[conductor]['grpc_port']}"

    def status(self, conductor: str = "conductor") -> dict[str, Any]:
        """Return what GET /status answers; raises ApiError."""
        status: dict[str, Any] = read_json(f"127.0.0.1:{self.http_port_of(conductor)}", "/status")
        return status

    def wait_nodes(self, count: int) -> None:
        """Return when so many nodes are attached to the first conductor."""
        while len(self.status()["nodes"]) < count:
            time.sleep(LOOK_EVERY_S)

    def metrics(self) -> dict[str, str]:
        """Return what each node answers to GET /metrics, by name; raises ApiError."""
        ports = {name: said["metrics_port"] for name, said in self.ready.items() if "metrics_port" in said}
        return {name: read_text(f"127.0.0.1:{port}", "/metrics") for name, port in ports.items()}


@contextmanager
def local_cluster(
    config: ClusterConfig, model: LocalModel, folder: Path, modules: Mapping[str, str] | None = None
) -> Iterator[LocalCluster]:
    """Run a cluster in the body; nothing of it is left when the body is left.

    Args:
        folder: For configuration files and logs.
        modules: What to run instead of `conductor` or `node.process`, by the name of a process.

    Raises:
        RuntimeError: a process did not become ready; the message holds its log's end.
        ConfigError: CUDA_VISIBLE_DEVICES names fewer GPUs than the nodes want.
    """
    with ExitStack() as running:

        def start(name: str, module: str, process: Any, environment: dict[str, str]) -> Supervisor:
            spec = ProcessSpec(
                name=name,
                command=(sys.executable, "-m", (modules or {}).get(name, module)),
                config=dataclasses.asdict(process),
                environment=environment,
                folder=str(folder),
            )
            supervisor = Supervisor(spec, SystemClock())
            running.callback(supervisor.drain, GRACE_S)
            return supervisor

        processes = {
            name: start(name, "conductor", process, {})
            for name, process in conductor_processes(config, model).items()
        }
        ready = {name: conductor.wait_ready() for name, conductor in processes.items()}
        addresses = tuple(f"127.0.0.1:{said['attach_port']}" for said in ready.values())
        gpus = _visible_gpus()
        for node in planned_nodes(config, model, addresses, os.cpu_count() or 1):
            environment = node_environment(node.process.engine.threads)
            if node.resources.gpus:
                environment["CUDA_VISIBLE_DEVICES"] = _taken(gpus, node.resources.gpus)
            processes[node.process.node_id] = start(
                node.process.node_id, "node.process", node.process, environment
            )
        ready |= {name: supervisor.wait_ready() for name, supervisor in processes.items()}
        yield LocalCluster(ready, processes)


def _visible_gpus() -> Iterator[str]:
    """Yield the names of the GPUs that this process may use: those it was shown, or all, by number."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return map(str, count()) if shown is None else filter(None, shown.split(","))


def _taken(gpus: Iterator[str], num_gpus: int) -> str:
    taken = list(islice(gpus, num_gpus))
    if len(taken) < num_gpus:
        raise ConfigError("CUDA_VISIBLE_DEVICES: fewer GPUs than gpus_per_node of all nodes; name more")
    return ",".join(taken)
