"""The arguments of `conductor replay`, and of what is built on it: their bounds, and their defaults.

Every number is checked as it is read (`base/option_values.py`). What stands for a setting of the service has
the service's default.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

from base.config import ClusterConfig, EngineConfig, SchedulerConfig
from base.option_values import real, whole
from base.request import Slo
from conductor.placing.retries import MAX_ATTEMPTS
from conductor.placing.scheduler_settings import RejectPolicy
from conductor.profiles.reader import preset_names
from conductor.replay.policies import POLICIES
from conductor.replay.trace_formats import FORMATS
from kvstore.eviction import BY_NAME

DEFAULT_PROFILE = "a800-llama70b"

SERVICE = SchedulerConfig()
"""The settings that the service ships with, which replay takes unless it is asked for others."""

# The paper's real-trace bounds (arXiv 2407.00079, section 8.1.3).
DEFAULT_SLO = Slo(ttft_slo_s=30.0, tbt_slo_s=0.1)

MAX_NODES = 10_000
"""Nodes of a role. A mask of more is slow, and nobody has so many behind one conductor."""

MAX_SECONDS = 1e9
MAX_COUNT = 1 << 40

seconds = real(0, MAX_SECONDS)
factor = real(0, 1e6, above=True)
share = real(0, 1, above=True)


def make_parser(more_policies: Sequence[str] = (), more_traces: str = "") -> argparse.ArgumentParser:
    """Return the parser of the command's arguments, and of what a command that is built on it adds."""
    parser = argparse.ArgumentParser(
        prog="conductor replay", description="Run a trace through the scheduler in virtual time."
    )
    add = parser.add_argument
    add("trace", type=Path, help=f"a file (docs/reference/trace-formats.md), plain or .gz{more_traces}")
    _add_trace(add)
    _add_cluster(add)
    policy = "the rule that chooses a prompt's node (%(default)s)"
    add("--policy", choices=[*POLICIES, "all", *more_policies], default="global", help=policy)
    bound, unit = real(0, above=True, finite=False), "in seconds; inf: no bound (%(default)g)"
    first, between = f"to the first token, {unit}", f"between tokens in the mean, {unit}"
    add("--slo-ttft", type=bound, default=DEFAULT_SLO.ttft_slo_s, metavar="S", help=first)
    add("--slo-tbt", type=bound, default=DEFAULT_SLO.tbt_slo_s, metavar="S", help=between)
    _add_settings(add)
    add("--seed", type=whole(0, MAX_COUNT), default=0, metavar="N", help="of what is drawn (%(default)s)")
    add("--report", type=Path, metavar="OUT.json", help="write the report that --json prints")
    add("--requests", type=Path, metavar="OUT", help="a row for each request: .csv, .csv.gz or .parquet")
    add("--progress", action="store_true", help="say on stderr how far a run is")
    add("--json", action="store_true", help="print the report instead of the table")
    add(
        "--conformance",
        action="store_true",
        help="TRACE is a decision log: what happened beside its simulation, with its own nodes",
    )
    return parser


def _add_trace(add: Callable[..., object]) -> None:
    """Add the options that say how a trace is read and how its requests come."""
    add("--format", choices=FORMATS, help="of the trace, where its rows do not show it")
    add("--block-size", type=whole(1, 1 << 20), metavar="N", help="tokens per hash id (the header's, or 512)")
    add("--skip-bad", action="store_true", help="count bad rows instead of stopping")
    add("--until", type=whole(1, MAX_COUNT), metavar="N", help="the first N requests or sessions only")
    add(
        "--speed", type=factor, default=1.0, help="arrivals, and pauses of sessions, so many times faster (1)"
    )
    add(
        "--scale",
        type=whole(1, 10_000),
        default=1,
        help="so many copies of the trace, each with its own blocks",
    )
    add("--jitter", type=seconds, default=0.0, metavar="S", help="spread each arrival over S seconds")
    begin = "of the trace, whatever its times"
    add(
        "--sessions",
        type=whole(1, MAX_COUNT),
        metavar="N",
        help=f"at a time, the next when one ends, {begin}",
    )
    add("--session-rate", type=factor, metavar="R", help=f"sessions that begin a second, {begin}")


def _add_cluster(add: Callable[..., object]) -> None:
    """Add the options that describe the nodes."""
    add(
        "--nodes",
        type=parse_nodes,
        default=Nodes(8, 8, 0),
        metavar="8P8D|16C|4P4D2C",
        help="nodes p0, p1 ... that prefill, d0 ... that decode, c0 ... that do both (8P8D)",
    )
    other, slow = "nodes of another profile: p0-3=FILE|NAME", "nodes that compute slower: d0=3"
    add("--node-profile", type=parse_node_profile, action="append", default=[], metavar="N=P", help=other)
    add("--slow-node", type=parse_slow_node, action="append", default=[], metavar="N=X", help=slow)
    usual = f"{DEFAULT_PROFILE}; with --conformance the log's own"
    add("--profile", help=f"file, or one of {', '.join(preset_names())} ({usual})")
    add("--eviction", choices=list(BY_NAME), default="lru", help="policy of the nodes' caches (lru)")
    many = "conductors that share the nodes, and take requests in turn"
    add("--conductors", type=whole(1, 100), default=1, metavar="N", help=many)
    add("--view-delay", type=seconds, default=0.0, metavar="S", help="KV events reach the conductor late")
    add(
        "--fault",
        type=Path,
        metavar="FILE",
        help='nodes that die: {"at_s": 600, "node": "p3", "for_s": 120} a line',
    )
    chunk = "of a step (as the profile's device has it); 0: all of a prompt"
    add("--chunk-tokens", type=whole(0, 1 << 20), metavar="N", help=chunk)
    batch = "sequences in one step (256, as on a GPU; with --plain any number)"
    add("--max-batch", type=whole(1, MAX_COUNT), metavar="N", help=batch)
    pipeline = "prefill nodes that pipeline each prompt (CPP)"
    add("--stages", type=whole(1, MAX_NODES), default=1, metavar="X", help=pipeline)
    where = "nodes have no store: what they find of a prompt lies on the device, and no more than fits there"
    add("--no-store", action="store_true", help=where)
    disk = "tokens of KV on each node's disk (the profile's)"
    add("--disk", type=real(0, 1e15), metavar="TOKENS", help=disk)
    add(
        "--disk-rate",
        type=real(0, 1e15, above=True),
        metavar="B/S",
        help="bytes a second of a disk (the profile's)",
    )
    add("--decode-caches", action="store_true", help="decode nodes keep and lend the prompts they receive")


def _add_settings(add: Callable[..., object]) -> None:
    """Add the options that stand for settings of the service, with what it ships with as defaults."""
    plain = "as the papers: nobody waits or is refused, nothing is learned"
    add("--plain", action="store_true", help=plain)
    reject = f"when decode load is tested ({SERVICE.reject}; with --plain none)"
    add("--reject", choices=[policy.value for policy in RejectPolicy], help=reject)
    roles = f"whether they follow the load ({SERVICE.roles}; with --plain, --stages or --whole-chunks fixed)"
    add("--roles", choices=["follow", "fixed"], help=roles)
    add("--no-fetch", action="store_true", help="no prefix is loaded from another node")
    ahead, most = real(0, finite=False), "at most (%(default)g)"
    add("--ahead", type=ahead, default=SERVICE.ahead_s, metavar="S", help=f"seconds queued on a node, {most}")
    add(
        "--headroom",
        type=share,
        default=SERVICE.ttft_headroom,
        metavar="X",
        help="share of a TTFT bound (%(default)g)",
    )
    threshold = "kvcache_balancing_threshold (cost model decides)"
    add("--threshold", type=factor, metavar="X", help=threshold)
    add("--whole-chunks", action="store_true", help="steps take whole chunks, whoever decodes in them")
    waiting = whole(1, MAX_COUNT)
    add(
        "--max-waiting",
        type=waiting,
        default=SERVICE.max_waiting,
        metavar="N",
        help="requests, before one is let go (%(default)s)",
    )
    add(
        "--role-wait",
        type=seconds,
        default=SERVICE.role_wait_s,
        metavar="S",
        help=f"seconds for a role without a node, {most}",
    )
    add(
        "--patience",
        type=real(0, MAX_SECONDS, above=True),
        default=SERVICE.patience_s,
        metavar="S",
        help=f"seconds that a request without bounds waits, unless nobody is refused, {most}",
    )
    attempts = f"placements of a request, at most, as its nodes are lost ({MAX_ATTEMPTS})"
    add("--attempts", type=whole(1, 1_000), default=MAX_ATTEMPTS, metavar="N", help=attempts)
    add("--no-fair-queue", action="store_true", help="those who wait are placed in the order that they came")
    add(
        "--no-learning",
        action="store_true",
        help="predictions by the profile alone, not by what was measured",
    )
    add("--no-retest", action="store_true", help="a decode node takes what was admitted, whatever its load")


class Nodes(NamedTuple):
    """How many nodes of each kind."""

    prefill: int
    decode: int
    both: int


def parse_nodes(text: str) -> Nodes:
    """Return the nodes of a text like 8P8D, 16C or 4P4D2C."""
    match = re.fullmatch(r"(?:([1-9]\d{0,5})P([1-9]\d{0,5})D)?(?:([1-9]\d{0,5})C)?", text, re.IGNORECASE)
    if not match or not text:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: like 8P8D, at least one of each, 16C or 4P4D2C")
    sizes = Nodes(*(int(size or 0) for size in match.groups()))
    if max(sizes) > MAX_NODES:
        raise argparse.ArgumentTypeError(f"{text!r}: at most {MAX_NODES} nodes of a kind")
    return sizes


def parse_node_profile(text: str) -> list[tuple[str, str]]:
    """Return (node, profile) for each node that a text like p0-3=h100-llama8b names."""
    names, profile = _named_nodes(text)
    return [(name, profile) for name in names]


def parse_slow_node(text: str) -> list[tuple[str, float]]:
    """Return (node, times slower) for each node that a text like d0-1=3 names."""
    names, times = _named_nodes(text)
    slower = real(0.01, 1000)(times)
    return [(name, slower) for name in names]


def _named_nodes(text: str) -> tuple[list[str], str]:
    match = re.fullmatch(r"([pdc])(\d{1,5})(?:-(\d{1,5}))?=(.+)", text)
    first, last = (int(match[2]), int(match[3] or match[2])) if match else (1, 0)
    if not match or not first <= last < MAX_NODES:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: like p0=VALUE, or p0-3=VALUE")
    return [f"{match[1]}{number}" for number in range(first, last + 1)], match[4]


def service_arguments(config: ClusterConfig) -> list[str]:
    """Return the arguments under which replay does as a cluster of this configuration, but for its nodes."""
    scheduler, slo = config.scheduler, config.slo
    given: dict[str, object] = {
        "--profile": config.profile,
        "--policy": scheduler.policy,
        "--reject": scheduler.reject,
        "--roles": scheduler.roles,
        "--headroom": scheduler.ttft_headroom,
        "--ahead": scheduler.ahead_s,
        "--max-waiting": scheduler.max_waiting,
        "--role-wait": scheduler.role_wait_s,
        "--patience": scheduler.patience_s,
        "--slo-ttft": slo.ttft_s or inf,
        "--slo-tbt": slo.tbt_s or inf,
    }
    if scheduler.kvcache_balancing_threshold:
        given["--threshold"] = scheduler.kvcache_balancing_threshold
    if (chunk_tokens := config.prefill.engine.chunk_tokens) != EngineConfig().chunk_tokens:
        given["--chunk-tokens"] = chunk_tokens
    switches = {
        "--no-fetch": not scheduler.fetch,
        "--no-store": not config.store.is_used,
        "--whole-chunks": not scheduler.step_budgets,
    }
    words = [word for name, value in given.items() for word in (name, str(value))]
    return words + [name for name, is_on in switches.items() if is_on]
