"""`conductor doctor`: what is wrong with this host or with a running cluster, and what to do about it.

A check is a function from what was found to findings; reading the host and asking the cluster are apart, so
that every finding can be tested. The exit status is 1 if anything is wrong; a warning is not.

Nodes of a joined Ray are on hosts of their own, of whose disks nothing is known here. A disk that is too
small harms nobody, but keeps fewer blocks than the configuration says; memory as a folder is taken twice.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from huggingface_hub import snapshot_download
from rich.console import Console
from rich.markup import escape

from base.config import GIB, LOOPBACK, ClusterConfig
from base.errors import ConfigError
from deploy.api_client import ApiError, read_json
from deploy.capacity import Offer, needs, offer_of_host, refusal
from deploy.clusters import Running, chosen, running
from deploy.config_file import read_cluster_config
from deploy.doctor_processes import Finding, check_processes, look_at_processes, measure_links
from deploy.plan import require_disk, require_known
from deploy.ports import taken, wanted_ports
from transfer.rdma import topology

LEAST_OPEN_FILES = 4096
"""Ray and gRPC hold several for each peer, and the conductor one for each client."""

REDIS_PORT = 6379
PROBE_TIMEOUT_S = 2.0

REQUIRED = (
    "torch",
    "transformers",
    "grpcio",
    "protobuf",
    "ray",
    "safetensors",
    "tokenizers",
    "llguidance",
    "xxhash",
)


MEMORY = ("tmpfs", "ramfs")
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "beegfs", "9p", "virtiofs")
"""File systems of other hosts, by what the kernel calls them; what comes by FUSE is not known."""


@dataclass(frozen=True, slots=True)
class DiskSeen:
    """The file system of `store.disk_path`."""

    problem: str = ""
    """Why nodes cannot write there; empty: they can."""
    kind: str = ""
    """The kernel's name of it."""
    left_bytes: int = 0
    """Free bytes, and those that blocks take there already."""


@dataclass(frozen=True, slots=True)
class Host:
    """Facts about a host that a cluster depends on. Bytes; -1 is without limit."""

    versions: dict[str, str]
    """Versions of the packages that are needed; one that is missing is not in it."""
    open_files: int
    locked_memory_bytes: int
    offer: Offer
    busy_ports: tuple[str, ...]
    """Wanted ports that are taken: which, and who has it."""
    ray_token: bool
    own: str = ""
    """The cluster of this configuration that runs here: it has its ports and its memory already."""
    silent: tuple[tuple[str, str], ...] = ()
    """Services that are named and do not answer: by what, and where."""
    rails: tuple[str, ...] = ()
    """The NICs that carry each memory of the host."""
    disk: DiskSeen | None = None
    """Where nodes keep blocks; None: they keep none here."""
    weights: str = "smollm2"
    """The folder of the model's weights, where they are here; else what the configuration calls it."""


def main(
    config: Annotated[Path | None, typer.Option("-c", "--config", help="cluster.yaml")] = None,
    address: Annotated[str, typer.Option(help="host:port of a running cluster's HTTP API")] = "",
    measure: Annotated[
        bool, typer.Option(help="Send KV of 512 tokens from each prefill node to each decode node")
    ] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print the findings as JSON")] = False,
) -> None:
    """Look for what is wrong with this host or cluster."""
    cluster = ClusterConfig()
    try:
        cluster = read_cluster_config(config)
        require_known(cluster)
        findings = [Finding("ok", "the configuration can be read")]
    except ConfigError as error:
        findings = [Finding("wrong", str(error), "correct the file")]
    findings += check_host(_look_at_host(cluster, config, address), cluster)
    if address:
        try:
            status = read_json(address, "/status")
            findings += check_cluster(status)
            if measure:
                findings += measure_links(address, status)
            findings += check_processes(look_at_processes(cluster, address), status)
        except ApiError as error:
            findings.append(Finding("wrong", str(error), "start it with `conductor up`, or see its log"))
    if json_:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        _show(findings)
    raise typer.Exit(1 if any(finding.level == "wrong" for finding in findings) else 0)


def check_host(host: Host, config: ClusterConfig) -> Iterator[Finding]:
    """Judge a host against what a cluster asks of it."""
    for name in REQUIRED:
        if name in host.versions:
            yield Finding("ok", f"{name} {host.versions[name]}")
        else:
            yield Finding("wrong", f"{name} is not installed", "make .venv/.installed, or pip install it")
    if 0 <= host.open_files < LEAST_OPEN_FILES:
        mend = f"ulimit -Hn {LEAST_OPEN_FILES}, or LimitNOFILE= in the systemd unit"
        yield Finding("warning", f"only {host.open_files} files may be open", mend)
    if "rdma" in config.transfer.transports:
        if host.locked_memory_bytes >= 0:
            what = f"RDMA is allowed and only {host.locked_memory_bytes} bytes of memory may be locked"
            yield Finding("wrong", what, "ulimit -l unlimited, or LimitMEMLOCK=infinity in the systemd unit")
        for rail in host.rails:
            yield Finding("ok", f"RDMA of {rail}")
    if host.own:
        yield Finding("ok", f"the cluster {host.own} runs, and has its ports")
    else:
        yield from _check_memory(host, config)
    yield from check_disk(host.disk, config)
    for what in host.busy_ports:
        yield Finding("wrong", what, "end what has it, or set server.http_port and server.grpc_port")
    for named_by, where in host.silent:
        yield Finding("wrong", f"{named_by}: nobody answers at {where}", f"start it, or correct {named_by}")
    if not host.ray_token and config.server.host not in LOOPBACK:
        what = "there is no Ray token on this host, and the cluster has several"
        mend = "ray get-auth-token --generate, then copy ~/.ray/auth_token to every host"
        yield Finding("warning", what, mend)


def _check_memory(host: Host, config: ClusterConfig) -> Iterator[Finding]:
    sizes = {"prefill": config.prefill.nodes, "decode": config.decode.nodes}
    need = needs(config, host.weights)
    for what in refusal(sizes, need, host.offer, 0).splitlines():
        yield Finding("wrong", what, "lower kv_cache_gib or nodes")
    if any(sizes[pool] and not (each.weights or each.gpus) for pool, each in need.items()):
        what = f"memory was looked at without the weights of {config.model}: it is not known yet how many"
        yield Finding("warning", what, "`conductor up` counts them once it has fetched or converted them")


def look_at_disk(config: ClusterConfig, mounts: Path = Path("/proc/mounts")) -> DiskSeen | None:
    """Look at the disk of nodes on this host, whose file systems are in `mounts`; None: they have none."""
    if not config.store.disk_path or "RAY_ADDRESS" in os.environ:
        return None
    try:
        require_disk(config.store.disk_path)
    except ConfigError as error:
        return DiskSeen(str(error))
    folder = Path(config.store.disk_path).expanduser().resolve()
    left_bytes = shutil.disk_usage(folder).free
    for file in folder.glob("*/blocks.slots"):
        with contextlib.suppress(OSError):  # a store that ends meanwhile
            left_bytes += 512 * file.stat().st_blocks
    return DiskSeen("", _file_system(folder, mounts), left_bytes)


def check_disk(disk: DiskSeen | None, config: ClusterConfig) -> Iterator[Finding]:
    """Judge it against what nodes would keep there."""
    if disk is None:
        return
    path, wanted = config.store.disk_path, config.store.disk_gib
    num_nodes = config.prefill.nodes + config.decode.nodes
    if disk.problem:
        yield Finding("wrong", disk.problem, "correct store.disk_path")
    elif disk.kind in (*MEMORY, *REMOTE):
        what = "this host's memory" if disk.kind in MEMORY else "another host's disk"
        yield Finding(
            "warning", f"store.disk_path: {path} is {what} ({disk.kind})", "name a local disk's folder"
        )
    elif disk.left_bytes < num_nodes * wanted * GIB:
        what = f"{disk.left_bytes / GIB:.1f} GiB are left in {path}, for {num_nodes} nodes of {wanted:g} GiB"
        yield Finding("warning", f"store.disk_path: {what}", "lower store.disk_gib, or name another disk")
    else:
        yield Finding("ok", f"{path} has room for {num_nodes} times {wanted:g} GiB of blocks")


def _file_system(folder: Path, mounts: Path) -> str:
    """Return what the kernel calls the file system of a folder."""
    rows = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    kinds = {Path(point.replace(r"\040", " ")): kind for point, kind in rows}  # of two on a point the last
    return next((kinds[each] for each in (folder, *folder.parents) if each in kinds), "")


def check_cluster(status: dict[str, Any]) -> Iterator[Finding]:
    """Judge a conductor's `/status`."""
    nodes = status["nodes"]
    if status["ready"]:
        yield Finding("ok", f"the cluster is ready, with {len(nodes)} nodes")
    else:
        mend = "see the logs of the missing nodes in CACHE_DIR/runs/"
        yield Finding("wrong", "no node serves one of the roles", mend)
    if not status["supervised"]:
        mend = "restart `conductor up` in a quiet hour: Ray has ended, or the supervisor's actor has no place"
        yield Finding("warning", "the conductor serves, and nobody would start it again", mend)
    sizes = {node["id"]: node["block_size"] for node in nodes}
    if len(set(sizes.values())) > 1:
        yield Finding("wrong", f"block sizes differ: {sizes}", "set one block_size and restart the nodes")
    shared = set.intersection(*(set(node["transports"]) for node in nodes)) if nodes else set()
    if len(nodes) > 1 and not shared:
        yield Finding("wrong", "no transport is common to all nodes", "set transfer.transports alike")
    elif shared == {"tcp"} and len({node["host"] for node in nodes}) == 1:
        mend = "add shm to transfer.transports"
        yield Finding("warning", "nodes of one host move KV by tcp alone", mend)
    for node in nodes:
        if node.get("held_blocks") and not node.get("running") and not node["requests"]:
            what = f"{node['id']} holds {node['held_blocks']} blocks and runs nothing"
            yield Finding("warning", what, "if it lasts it is a leak: see docs/how-to/alerts.md")
        if node.get("draining"):
            yield Finding("ok", f"{node['id']} is draining")


def _look_at_host(config: ClusterConfig, file: Path | None, address: str) -> Host:
    versions = {}
    for name in REQUIRED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    own, others = _clusters(config, file)
    ports = [] if address or own else wanted_ports(config)
    return Host(
        versions=versions,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # processes raise the soft one to it
        locked_memory_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        offer=offer_of_host(),
        busy_ports=tuple(filter(None, (taken(config.server.host, port, others) for port in ports))),
        own=str(own) if own else "",
        silent=tuple(service for service in _services(config) if not _answers(service[1])),
        rails=tuple(topology.overview()),
        disk=look_at_disk(config),
        weights=_weights_of(config.model),
        ray_token="RAY_AUTH_TOKEN" in os.environ or Path("~/.ray/auth_token").expanduser().exists(),
    )


def _weights_of(model: str) -> str:
    """Return the folder of a model's weights: its own, or that of the hub's cache, if one is there."""
    path = os.path.expanduser(model)
    if model.count("/") == 1 and not os.path.exists(path):
        with contextlib.suppress(OSError, ValueError):
            return str(snapshot_download(model, local_files_only=True))
    return path


def _clusters(config: ClusterConfig, file: Path | None) -> tuple[Running | None, list[Running]]:
    """Return the cluster of this configuration, if it runs, and all that run here."""
    found = running(config.cache_dir)
    if file is not None:
        with contextlib.suppress(ConfigError):  # it does not run
            return chosen(config, file, ""), found
        return None, found
    wanted = set(wanted_ports(config))
    return next((each for each in found if wanted & set(each.ports)), None), found


def _services(config: ClusterConfig) -> Iterator[tuple[str, str]]:
    """Yield the other services that a configuration names: by which key, and its host:port."""
    if config.store.redis_url:
        url = urlsplit(config.store.redis_url)
        yield "store.redis_url", f"{url.hostname}:{url.port or REDIS_PORT}"
    for peer in config.store.peers:
        yield "store.peers", peer
    ray = os.environ.get("RAY_ADDRESS", "")
    if ":" in ray and "//" not in ray:  # not auto, nor a Ray client's
        yield "RAY_ADDRESS", ray


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _show(findings: list[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    marks = {"ok": "[green]✓[/green]", "warning": "[yellow]![/yellow]", "wrong": "[red]✗[/red]"}
    for finding in findings:
        console.print(f"{marks[finding.level]} {escape(finding.what)}")
        if finding.mend:
            console.print(f"  → {escape(finding.mend)}")
