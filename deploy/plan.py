"""The plan of a cluster: from a `ClusterConfig` to what each process is started with.

It reads a cost profile and nothing else. `launch.py` carries it out; it adds what only it
can know, the hosts' addresses.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from base.config import LOOPBACK, ClusterConfig, ConductorProcess, EngineConfig, NodeProcess, PoolConfig
from base.errors import ConfigError
from base.request import Role
from base.tables import read_object
from conductor.placing.prefill_policies import scheduler_settings
from conductor.profiles.reader import load_profile

ANY_ADDRESSES = ("0.0.0.0", "::")

HOST_ADDRESS = "{host address}"
"""The place in a configuration of the address of the host that the process lands on."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this host's disk, ready to be loaded."""

    path: str
    model_id: str
    name: str


def require_model_there(model: str) -> None:
    """Raise ConfigError, before anything is started, for a path without a model.

    What is in its folder is looked at when the model is prepared, while Ray starts."""
    path = Path(model).expanduser()
    is_path = model.startswith((".", "/", "~")) or path.suffix == ".gguf"
    if is_path and not path.exists():
        raise ConfigError(f"model: {model}: no such folder or file")
    if path.is_dir():
        try:
            read_object(path / "config.json")
        except ConfigError as error:
            raise ConfigError(f"model: {error}") from error


def require_known(config: ClusterConfig) -> None:
    """Raise ConfigError, before anything is started, for a profile or a policy that nobody knows."""
    load_profile(config.profile)
    scheduler_settings(config.scheduler)


def require_disk(path: str) -> None:
    """Raise ConfigError where nodes of this host could not write to `path`, their `store.disk_path`.

    The folder is made, as a node would make its own in it; an empty path is none."""
    try:
        if path:
            folder = Path(path).expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # the latter of a ~user whom nobody knows
        mend = "name a folder that nodes may write to, or leave it empty"
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"store.disk_path: {path}: {why}: {mend}") from error


@dataclass(frozen=True, slots=True)
class Together:
    """Processes that must share a host: what each takes of it, by Ray's names."""

    name: str
    bundles: tuple[tuple[tuple[str, float], ...], ...]
    index: int
    """The number of this process among the bundles."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The share of its host that a process takes, in Ray's units of account."""

    cpus: float = 0.0
    gpus: int = 0
    resource: str = ""
    """A custom resource, of which it takes one."""
    on_head: bool = False
    """Whether the process runs on the cluster's head node and no other."""
    together: Together | None = None
    """Processes that share its host; None: whoever is there."""

    def by_name(self) -> dict[str, float]:
        """Return the amounts, by Ray's names."""
        taken = {"CPU": self.cpus, "GPU": float(self.gpus), **({self.resource: 1.0} if self.resource else {})}
        return {name: amount for name, amount in taken.items() if amount}


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """One node process and what it takes of a host."""

    process: NodeProcess
    resources: Resources


def conductor_processes(config: ClusterConfig, model: LocalModel) -> dict[str, ConductorProcess]:
    """Return what each conductor is started with, by name."""
    return {
        f"conductor-{number}" if number else "conductor": conductor_process(config, model, number)
        for number in range(config.server.conductors)
    }


def conductor_process(config: ClusterConfig, model: LocalModel, number: int = 0) -> ConductorProcess:
    """Return what one conductor is started with: ports and decision log are its own."""
    server, nodes, scheduler = config.server, config.nodes, config.scheduler
    if number:
        server = dataclasses.replace(
            server,
            http_port=server.http_port and server.http_port + number,
            grpc_port=server.grpc_port and server.grpc_port + number,
        )
        nodes = dataclasses.replace(nodes, attach_port=nodes.attach_port and nodes.attach_port + number)
        log = scheduler.decision_log and f"{scheduler.decision_log}-{number}"
        scheduler = dataclasses.replace(scheduler, decision_log=log)
    return ConductorProcess(
        model_path=model.path,
        model_id=model.model_id,
        served_model_name=config.served_model_name or model.name,
        block_size=config.prefill.engine.block_size,
        profile=config.profile,
        server=server,
        slo=config.slo,
        scheduler=scheduler,
        nodes=nodes,
        tracing=config.tracing,
        store=config.store,
    )


def planned_nodes(
    config: ClusterConfig,
    model: LocalModel,
    conductor_addresses: tuple[str, ...],
    host_cores: int,
    numbers: Mapping[Role, Sequence[int]] | None = None,
) -> list[PlannedNode]:
    """Return the nodes of both pools, prefill first.

    A pool of no nodes leaves its role to the other: its nodes then have both.

    Args:
        conductor_addresses: `host:port` of each conductor, for nodes.
        host_cores: Processors of one host, shared by the nodes that leave `threads` open.
        numbers: Numbers of each pool's nodes, in their names; None: from 0.
    """
    num_nodes = max(config.prefill.nodes + config.decode.nodes, 1)
    pools = ((Role.PREFILL, config.prefill, config.decode), (Role.DECODE, config.decode, config.prefill))
    planned = []
    for role, pool, other in pools:
        roles = (role.value,) if other.nodes else (Role.PREFILL.value, Role.DECODE.value)
        threads = pool.engine.threads or max(int(pool.cpus_per_node), host_cores // num_nodes, 1)
        for number in range(pool.nodes) if numbers is None else numbers[role]:
            process = NodeProcess(
                node_id=f"{role.value}-{number}",
                roles=roles,
                model_path=model.path,
                model_id=model.model_id,
                rounded=str(Path(config.cache_dir).expanduser() / "rounded" / model.model_id),
                conductor_addresses=conductor_addresses,
                engine=dataclasses.replace(
                    pool.engine, threads=threads, chunk_attention=chunk_attention(pool.engine, config.profile)
                ),
                transfer=dataclasses.replace(config.transfer, host=_transfer_host(config)),
                store=config.store,
                tls=config.nodes.tls,
                mixed_weights=config.mixed_weights,
                trace_out=config.trace_out,
                metrics_host=_metrics_host(config),
                metrics_port=config.nodes.metrics_port,
                tracing=config.tracing,
            )
            resources = dataclasses.replace(_resources(pool), together=_together(config, role, number))
            planned.append(PlannedNode(process, resources))
    return planned


def node_numbers(names: Iterable[str], role: Role, size: int) -> list[int]:
    """Return the numbers of a pool of `size` nodes that keeps as many of its nodes in `names` as it can."""
    prefix = f"{role.value}-"
    have = sorted(int(name.removeprefix(prefix)) for name in names if name.startswith(prefix))[:size]
    free = (number for number in range(size + len(have)) if number not in have)
    return sorted([*have, *(number for number, _ in zip(free, range(size - len(have)), strict=False))])


def in_units(config: ClusterConfig, names: Iterable[str]) -> list[list[str]]:
    """Return names of nodes in groups that come and go as one: pairs, where the pools share hosts."""
    units: dict[str, list[str]] = {}
    for name in names:
        units.setdefault(name.rpartition("-")[2] if config.hosts == "together" else name, []).append(name)
    return list(units.values())


def chunk_attention(engine: EngineConfig, profile: str) -> float:
    """Return what an engine's `chunk_attention` is, where it leaves that open; raises ConfigError."""
    if engine.chunk_attention >= 0 or engine.pipeline_parallel == 1:
        return max(engine.chunk_attention, 0.0)
    costs = load_profile(profile)
    return costs.prefill_token2_s / costs.prefill_token_s


def _transfer_host(config: ClusterConfig) -> str:
    if config.transfer.host != "auto":
        return config.transfer.host
    return "127.0.0.1" if config.server.host in LOOPBACK else HOST_ADDRESS


def _metrics_host(config: ClusterConfig) -> str:
    """Return where nodes have their metrics: beyond loopback only where metrics may be read without a key."""
    is_open = config.server.open_metrics or config.server.insecure
    return _transfer_host(config) if is_open and config.server.host not in LOOPBACK else "127.0.0.1"


def sum_of(taken: Iterable[Resources]) -> dict[str, float]:
    """Return what several processes take together, by Ray's names."""
    amounts: Counter[str] = Counter()
    for each in taken:
        amounts.update(each.by_name())
    return dict(amounts)


def _together(config: ClusterConfig, role: Role, number: int) -> Together | None:
    if config.hosts != "together":
        return None
    pair = tuple(tuple(_resources(pool).by_name().items()) for pool in (config.prefill, config.decode))
    return Together(f"pair-{number}", pair, (Role.PREFILL, Role.DECODE).index(role))


def _resources(pool: PoolConfig) -> Resources:
    return Resources(pool.cpus_per_node, pool.gpus_per_node, pool.resource)


def node_environment(threads: int) -> dict[str, str]:
    """Return what a node's environment must hold before torch is imported.

    OMP_WAIT_POLICY: two processes whose idle OpenMP threads spin on the same cores run 10
    to 20 times slower than two that sleep (measured, 2 cores, 2026-11-21). HF_HUB_OFFLINE:
    the model was prepared; a node that asks the network for one has a bug.
    """
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
