"""The doctor's look at the processes of a running cluster: their metrics, and what is wrong with them.

Where they are is in the file that `conductor up` writes for Prometheus (`targets.py`): so the doctor sees
what Prometheus sees, and needs no door of its own into a node. The bandwidth of a pair is what its last large
transfer had; `measure_links` has the conductor send one over each pair just before.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from base.clock import wall_clock_s
from base.config import ClusterConfig
from base.metrics import samples_of
from deploy.api_client import ApiError, read_json, read_text
from deploy.targets import processes_beside

MAX_OFFSET_S = 0.25
"""Clocks of two hosts that differ by more are a warning. Leases are durations and need none; logs, traces
and dashboards are hard to read."""

SLOW = 0.5
"""The share of its transport's median below which a link is worth a look."""
FEWEST_ALIKE = 3
"""Fewest links of one transport for a median to say something."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: str
    """ok, warning or wrong."""
    what: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class LinkSeen:
    """The last large transfer between two nodes."""

    peer: str
    transport: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """One process, as its metrics show it."""

    name: str
    silent: str = ""
    """Why it did not answer; empty: it did."""
    versions: tuple[tuple[str, str], ...] = ()
    offset_s: float = 0.0
    """Seconds by which the clock of the process's host is ahead of ours."""
    unsure_s: float = 0.0
    """Greatest error of `offset_s`: half of the time that the answer took."""
    links: tuple[LinkSeen, ...] = ()


def look_at_processes(config: ClusterConfig, address: str) -> list[ProcessSeen] | None:
    """Ask every process of the cluster at `address`; None: nothing here says where they are."""
    named = processes_beside(config.cache_dir, address)
    return None if named is None else [_look(name, where) for name, where in named]


def _look(name: str, address: str) -> ProcessSeen:
    asked_at_s = wall_clock_s()
    try:
        samples = list(samples_of(read_text(address, "/metrics")))
    except (ApiError, ValueError) as error:
        return ProcessSeen(name, silent=str(error))
    answered_at_s = wall_clock_s()
    versions: dict[str, str] = {}
    clock_s, links = answered_at_s, []
    for metric, labels, value in samples:
        if metric == "conductor_build_info":
            versions = labels
        elif metric == "conductor_wall_clock_seconds":
            clock_s = value
        elif metric == "transfer_link_bytes_per_second":
            links.append(LinkSeen(labels["peer"], labels["transport"], value))
    return ProcessSeen(
        name,
        versions=tuple(sorted(versions.items())),
        offset_s=clock_s - (asked_at_s + answered_at_s) / 2,
        unsure_s=(answered_at_s - asked_at_s) / 2,
        links=tuple(links),
    )


def check_processes(processes: list[ProcessSeen] | None, status: dict[str, Any]) -> Iterator[Finding]:
    """Judge what processes say of themselves; `status` is what the conductor says of its nodes."""
    if processes is None:
        what = "versions, clocks and bandwidths were not looked at: nothing in CACHE_DIR/targets/ names it"
        yield Finding("warning", what, "run it on the host of `conductor up`, with its -c cluster.yaml")
        return
    attached = {node["id"] for node in status["nodes"]}
    for process in processes:
        if process.silent:
            mend = f"see CACHE_DIR/runs/*/{process.name}.log; beyond loopback: server.open_metrics"
            yield Finding("wrong", f"{process.name} does not answer: {process.silent}", mend)
        elif process.name not in attached and not process.name.startswith("conductor"):
            mend = f"see {process.name}.log: a node of another model or layout is refused"
            yield Finding("wrong", f"{process.name} runs, and the conductor does not know it", mend)
    answering = [process for process in processes if not process.silent]
    yield from _check_versions(answering)
    yield from _check_clocks(answering)
    yield from _check_links(answering, status["nodes"])


def _check_versions(processes: Iterable[ProcessSeen]) -> Iterator[Finding]:
    found: dict[str, dict[str, list[str]]] = {}
    for process in processes:
        for package, number in process.versions:
            found.setdefault(package, {}).setdefault(number, []).append(process.name)
    for package, numbers in sorted(found.items()):
        if len(numbers) > 1:
            those = "; ".join(f"{number}: {', '.join(names)}" for number, names in sorted(numbers.items()))
            yield Finding(
                "wrong", f"{package} differs ({those})", "install the same everywhere, then restart"
            )
        else:
            yield Finding("ok", f"all processes have {package} {next(iter(numbers))}")


def _check_clocks(processes: Iterable[ProcessSeen]) -> Iterator[Finding]:
    worst = max(processes, key=lambda process: abs(process.offset_s) - process.unsure_s, default=None)
    if worst is None:
        return
    offset = f"{worst.name}'s clock is {worst.offset_s:+.3f} s from this host's (± {worst.unsure_s:.3f} s)"
    if abs(worst.offset_s) - worst.unsure_s > MAX_OFFSET_S:
        yield Finding("warning", offset, "let chrony or systemd-timesyncd set the clock of both hosts")
    else:
        yield Finding("ok", f"clocks agree; at most, {offset}")


def measure_links(address: str, status: dict[str, Any]) -> Iterator[Finding]:
    """Send KV from each prefill node to each decode node; find where that failed. Raises ApiError."""
    for prefill, decode in _pairs(status["nodes"]):
        if problem := read_json(address, f"/v1/links/{quote(prefill)},{quote(decode)}")["problem"]:
            mend = f"see {prefill}.log, {decode}.log; between hosts, let transfer.port through the firewall"
            yield Finding("wrong", f"{prefill} - {decode}: no KV goes there: {problem}", mend)


def _check_links(processes: Iterable[ProcessSeen], nodes: list[dict[str, Any]]) -> Iterator[Finding]:
    hosts = {node["id"]: node["host"] for node in nodes}
    offers = {node["id"]: set(node["transports"]) for node in nodes}
    links = [(process.name, link) for process in processes for link in process.links]
    for name, link in links:
        is_tcp = link.transport in ("tcp", "staged_tcp")
        what = f"{name} - {link.peer}: {link.transport}, {link.bytes_per_s / 1e9:.3g} GB/s"
        is_near = name in hosts and hosts[name] == hosts.get(link.peer)
        alike = [other.bytes_per_s for _, other in links if other.transport == link.transport]
        both = offers.get(name, set()) & offers.get(link.peer, set())
        on_host = {"cuda_ipc" if link.transport == "staged_tcp" else "shm"}
        faster = sorted(both & ({"rdma"} | on_host if is_near else {"rdma"}))
        if is_tcp and faster:
            mend = f"see 'transport failed' in {name}.log: a rail that is down, memory that is not registered"
            yield Finding("warning", f"{what}, though both offer {', '.join(faster)}", mend)
        elif is_tcp and is_near:
            mend = "add shm (GPUs: cuda_ipc) to transfer.transports"
            yield Finding("warning", f"{what}, on one host", mend)
        elif len(alike) >= FEWEST_ALIKE and link.bytes_per_s < SLOW * statistics.median(alike):
            median = f"{statistics.median(alike) / 1e9:.3g}"
            mend = "look at that host's links (ethtool, ibstat) and at what else uses them"
            yield Finding("warning", f"{what}; the median of its transport is {median}", mend)
        else:
            yield Finding("ok", f"{what} when it was last used")
    seen = {frozenset((name, link.peer)) for name, link in links}
    for prefill, decode in _pairs(nodes):
        if frozenset((prefill, decode)) not in seen:
            yield Finding("ok", f"{prefill} - {decode}: nothing of a MiB or more went between them yet")


def _pairs(nodes: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield each prefill node with each decode node."""
    of_role = {
        role: [node["id"] for node in nodes if role in node["roles"]] for role in ("prefill", "decode")
    }
    for prefill, decode in itertools.product(of_role["prefill"], of_role["decode"]):
        if prefill != decode:
            yield prefill, decode
