"""`conductor autoscale`: resize a running cluster by what the conductor itself would advise.

What was asked of the cluster in the last hour is in its decision log. It is replayed in virtual time
(`conductor replay`) on the cluster as it is and on every one that is a step away: a node more or fewer
in a pool, or, where roles are fixed, one moved from a pool to the other. Of those that would have served the
wanted share of requests within their bounds the one with the fewest nodes is taken, or the best one where
none would;
then the running `conductor up` is asked for it, as by `conductor scale`.

One step at a time: the next look sees what it did. A controller by thresholds on queues was left: it cannot
say beforehand what a node would have brought, and it needs thresholds for each model and machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from base.config import ClusterConfig
from base.errors import ConfigError
from conductor.replay.arguments import service_arguments
from deploy.api_client import read_json
from deploy.clusters import chosen
from deploy.config_file import read_cluster_config
from deploy.control import ask
from deploy.options import MAX_PAUSE_S

REPLAY_TIMEOUT_S = 600.0
STEPS = ((0, 0), (1, 0), (0, 1), (-1, 0), (0, -1))
MOVES = ((1, -1), (-1, 1))
"""Where roles follow the load, nodes make them by themselves."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Nodes of each pool."""

    prefill: int
    decode: int

    @property
    def nodes(self) -> int:
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the choice: sizes of a cluster, and when one is good enough."""

    min_nodes: int
    max_nodes: int
    share: float
    """The least share of requests to be served within their bounds."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The sizes to go to, and what each candidate would have served."""

    wanted: Sizes
    served: dict[Sizes, float]


def advised(now: Sizes, bounds: Bounds, served_share: Callable[[Sizes], float], roles_follow: bool) -> Advice:
    """Return the best cluster at most a step from `now`, by the share of requests that each had served."""
    steps = STEPS if roles_follow else (*STEPS, *MOVES)
    candidates = [Sizes(now.prefill + prefill, now.decode + decode) for prefill, decode in steps]
    served = {
        sizes: served_share(sizes)
        for sizes in candidates
        if min(sizes.prefill, sizes.decode) >= 1 and (sizes == now or _is_allowed(sizes, bounds))
    }
    allowed = [sizes for sizes in served if _is_allowed(sizes, bounds)] or [now]
    enough = [sizes for sizes in allowed if served[sizes] >= bounds.share]
    # `now` first among equals: nothing is moved for nothing
    if enough:
        wanted = min(enough, key=lambda sizes: (sizes.nodes, sizes != now, -served[sizes]))
    else:
        wanted = max(allowed, key=lambda sizes: (served[sizes], -sizes.nodes, sizes == now))
    return Advice(wanted, served)


def _is_allowed(sizes: Sizes, bounds: Bounds) -> bool:
    return bounds.min_nodes <= sizes.nodes <= bounds.max_nodes


def last_of_log(path: Path, last_s: float) -> Iterator[str]:
    """Yield the lines of a decision log about requests that arrived in its last `last_s` seconds.

    What a full file was renamed to is read too, unless its clock is another start's. Raises ConfigError where
    there is no such log, or it is none.
    """
    older = path.with_name(f"{path.name}.1")
    try:
        files = [each for each in (older, path) if each == path or each.exists()]
        parsed = [[json.loads(line) for line in each.read_text().splitlines()] for each in files]
        if len(parsed) == 2 and not _goes_on(*parsed):
            del parsed[0]
        since_s = max(at_s for rows in parsed for at_s in _arrivals(rows)) - last_s
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: {error}: is scheduler.decision_log set, and was anything asked?"
        ) from error
    kept = set()
    yield json.dumps(parsed[-1][0])
    for row in (row for rows in parsed for row in rows[1:]):
        if row["kind"] == "decision" and row["arrived_at_s"] >= since_s:
            kept.add(row["request_id"])
        if row["request_id"] in kept:
            yield json.dumps(row)


def _goes_on(older: list[dict[str, Any]], newer: list[dict[str, Any]]) -> bool:
    """Return whether a file may be of the same start as the one that was renamed before it.

    One that begins with how a request ended has the decision in the other, and one that has just begun may
    have none of its own yet.
    """
    if len(newer) < 2 or newer[1]["kind"] != "decision":
        return True
    return max(_arrivals(older), default=-inf) <= min(_arrivals(newer))


def _arrivals(rows: list[dict[str, Any]]) -> list[float]:
    return [float(row["arrived_at_s"]) for row in rows[1:] if row["kind"] == "decision"]


def replayed_share(trace: Path, config: ClusterConfig, sizes: Sizes) -> float:
    """Return the share of a log's requests that a cluster would have served in bounds; raises ConfigError."""
    command = [sys.executable, "-m", "conductor.replay", str(trace), "--json"]
    command += ["--nodes", f"{sizes.prefill}P{sizes.decode}D", *service_arguments(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=REPLAY_TIMEOUT_S, check=False)
    if done.returncode:
        raise ConfigError(done.stderr.strip() or f"the replay ended with status {done.returncode}")
    [run] = json.loads(done.stdout)["runs"]
    return float(run["served_within"])


def main(
    config: Annotated[
        Path, typer.Option("-c", "--config", help="The cluster.yaml that `conductor up` was given")
    ],
    address: Annotated[str, typer.Option(help="host:port of the HTTP API; default: the cluster's")] = "",
    min_nodes: Annotated[int, typer.Option("--min", min=2, help="Nodes of both pools at least")] = 2,
    max_nodes: Annotated[int, typer.Option("--max", min=2, help="At most")] = 16,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Of requests, to be served within their bounds")
    ] = 0.99,
    last_s: Annotated[
        float, typer.Option("--last", min=1, help="Seconds of the decision log to judge by")
    ] = 3600.0,
    every_s: Annotated[
        float, typer.Option("--every", min=0, max=MAX_PAUSE_S, help="Seconds between two looks; 0: once")
    ] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say it, and change nothing")] = False,
) -> None:
    """Resize a running cluster to what would have served its last hour."""
    tick = threading.Event()  # never set: its wait is a pause that Ctrl-C ends
    if min_nodes > max_nodes:
        raise ConfigError(f"--min {min_nodes}: at most --max is wanted, {max_nodes}")
    bounds = Bounds(min_nodes, max_nodes, share)
    cluster = read_cluster_config(config)
    _require_judgeable(cluster)
    while True:
        request = _advice(cluster, address or chosen(cluster, config, "").http_address, bounds, last_s)
        for line in ask(chosen(cluster, config, ""), request) if request and not dry_run else []:
            print(line, flush=True)
        if not every_s:
            return
        tick.wait(every_s)


def _require_judgeable(cluster: ClusterConfig) -> None:
    if not cluster.scheduler.decision_log:
        raise ConfigError("scheduler.decision_log: a file is wanted: it is what advice is made from")
    if not (cluster.slo.ttft_s or cluster.slo.tbt_s):
        raise ConfigError("slo: a bound is wanted: without one every cluster is large enough")
    if cluster.server.conductors > 1:
        raise ConfigError("server.conductors: each has a log of its own, and advice is made from one")
    if cluster.hosts == "together":
        raise ConfigError("hosts: together has pools of one size, and advice changes one of them")


def _advice(cluster: ClusterConfig, address: str, bounds: Bounds, last_s: float) -> dict[str, Any] | None:
    """Print what each candidate would have served; return what to ask the cluster for, None for nothing."""
    # of a node's pool says its name: its role follows the load
    pools = [node["id"].rpartition("-")[0] for node in read_json(address, "/status")["nodes"]]
    now = Sizes(pools.count("prefill"), pools.count("decode"))
    if min(now.prefill, now.decode) < 1:
        raise ConfigError("there are not both prefill and decode nodes: nothing can be moved between them")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "asked.jsonl"
        lines = last_of_log(Path(cluster.scheduler.decision_log).expanduser(), last_s)
        trace.write_text("".join(f"{line}\n" for line in lines))
        follows = cluster.scheduler.roles == "follow"
        advice = advised(now, bounds, lambda sizes: replayed_share(trace, cluster, sizes), follows)
    for sizes, served in advice.served.items():
        mark = "*" if sizes == advice.wanted else " "
        print(f"{mark} prefill={sizes.prefill} decode={sizes.decode}: {served:.1%} within bounds")
    if advice.wanted == now:
        print("nothing to change", flush=True)
        return None
    return {"verb": "scale", "prefill": advice.wanted.prefill, "decode": advice.wanted.decode}
