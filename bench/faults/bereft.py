"""Processes that lose who holds them: supervisors, spares and Ray's parts are killed under a steady load."""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.faults.cluster import FaultCluster, fault_cluster, wait_until
from bench.faults.kills import with_cluster
from bench.faults.published import SETTLED_S
from bench.faults.small_model import small_model
from bench.faults.steady import SteadyLoad, Window, summed
from bench.faults.up_cluster import UpCluster, up_cluster, wait_while_running
from deploy.supervisor import STEADY_S

SERVES_ON_S = 90.0
"""How long a cluster is to serve without its Ray; Ray's own patience is over after a minute."""
BEGUN = 16
"""The number of answers that the load has had before a fault is injected."""
SERVED_AGAIN = 16
"""Whole answers to requests sent after a fault, and after who was killed has a successor."""
OBSERVED_S = 8.0
"""The least time looked at after a fault: a process that is to end because of it ends within."""
RECOVERED_S = 240.0
NOTICED_S = 240.0
"""The seconds that a supervisor has to restart a conductor that hangs; after that the row kills it."""
SPARE_READY_S = 10.0
"""The seconds that a spare process has to import everything: nothing says when it has."""


def _begin(load: SteadyLoad) -> None:
    """Wait until the load runs."""
    wait_until(lambda: load.num_whole() >= BEGUN)


def supervisor_killed(count: int) -> dict[str, Any]:
    """Kill the conductor's supervisor `count` times, and as often that of a node, of each role in turn."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        model = small_model(Path(folder) / "model")
        with up_cluster(model, Path(folder) / "run") as cluster:
            load = SteadyLoad(cluster.http_port, cluster.grpc_address, random.Random(count))
            windows: dict[str, list[Window]] = {"conductor": [], "node": []}
            try:
                for number in range(count):
                    node = ("decode-0", "prefill-0")[number % 2]
                    windows["conductor"].append(_kill_supervisor(cluster, load, "conductor"))
                    windows["node"].append(_kill_supervisor(cluster, load, node))
                    print(
                        number + 1, {name: _of_supervisor(each) for name, each in windows.items()}, flush=True
                    )
            finally:
                load.close()
            return {
                "injected": 2 * count,
                **{f"of_{name}": _of_supervisor(each) for name, each in windows.items()},
                **_of_ends([cluster.end()]),
            }


def _kill_supervisor(cluster: UpCluster, load: SteadyLoad, name: str) -> Window:
    _begin(load)
    life = cluster.life(name)
    before = cluster.kill_supervisor(name)
    killed_at_s = time.monotonic()
    if not wait_while_running(cluster, lambda: cluster.take_successor(name, before), RECOVERED_S):
        raise RuntimeError(f"{name} has no supervisor again; the cluster runs: {cluster.is_running}")
    successor_s = time.monotonic() - killed_at_s
    time.sleep(max(0.0, OBSERVED_S - successor_s))
    looked_at_s = time.monotonic()
    wait_while_running(
        cluster, lambda: load.has_recovered(killed_at_s, SERVED_AGAIN, looked_at_s), RECOVERED_S
    )
    window = load.taken(killed_at_s, time.monotonic())
    survived = bool(life) and cluster.life(name) == life
    window.more = {"survived": survived, "supervised_again_s": successor_s}
    return window


def _of_supervisor(windows: Sequence[Window]) -> dict[str, Any]:
    again_s = [window.more["supervised_again_s"] for window in windows]
    return {
        **summed(windows),
        "same_process_serves_on": sum(window.more["survived"] for window in windows),
        "supervised_again_s_median": round(statistics.median(again_s), 2),
        "supervised_again_s_max": round(max(again_s), 2),
    }


def _part_of_ray_killed(program: str, count: int) -> dict[str, Any]:
    """Kill it in `count` clusters, one after the other; let each serve on, then end it."""
    windows, ends = [], []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        model = small_model(Path(folder) / "model")
        for number in range(count):
            with up_cluster(model, Path(folder) / f"run-{number}") as cluster:
                windows.append(_serve_without(program, cluster, random.Random(number)))
                ends.append(cluster.end())
            print(number + 1, _of_ray(windows), _of_ends(ends), flush=True)
    return {**_of_ray(windows), **_of_ends(ends)}


def _serve_without(program: str, cluster: UpCluster, rng: random.Random) -> Window:
    load = SteadyLoad(cluster.http_port, cluster.grpc_address, rng)
    try:
        _begin(load)
        cluster.kill_part_of_ray(program)
        killed_at_s = time.monotonic()
        wait_while_running(cluster, lambda: False, SERVES_ON_S)
        is_shown = cluster.status().get("supervised") is False
    finally:
        load.close()
    window = load.taken(killed_at_s, killed_at_s + SERVES_ON_S)
    served_for_s = max([0.0, *(at_s - killed_at_s for at_s in window.first_tokens_at_s)])
    window.more = {"served_for_s": served_for_s, "is_shown": is_shown}
    return window


def _of_ray(windows: Sequence[Window]) -> dict[str, Any]:
    return {
        **summed(windows),
        "served_for_s_min": round(min(each.more["served_for_s"] for each in windows), 1),
        "status_says_unsupervised": sum(each.more["is_shown"] for each in windows),
    }


def _of_ends(ends: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how clusters ended that were asked to; clean is status 0 and nothing left."""
    stopped = [end for end in ends if not end["by_itself"]]
    return {
        "ended_by_themselves": len(ends) - len(stopped),
        "ended_cleanly_on_sigterm": sum(end["status"] == 0 and not end["left"] for end in stopped),
        "end_took_s_max": max((end["took_s"] for end in stopped), default=None),
        "exit_statuses": dict(Counter(str(end["status"]) for end in ends)),
        "processes_left": sum(len(end["left"]) for end in ends),
        "left": dict(Counter(program for end in ends for program in end["left"])),
    }


def spare_killed(count: int) -> dict[str, Any]:
    """Kill the spare; when there is another, kill the conductor, whose place that one takes.

    Each time in a new cluster: a spare that ends again and again is started ever later.
    """
    of_spare, of_conductor = [], []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        model = small_model(Path(folder) / "model")
        for number in range(count):
            with fault_cluster(model, Path(folder) / f"run-{number}", prefill=1, decode=1) as cluster:
                steady_at_s = time.monotonic() + STEADY_S
                load = SteadyLoad(cluster.http_port, cluster.grpc_address, random.Random(number))
                try:
                    of_spare.append(_kill_spare(cluster, load))
                    # Its supervisor lets one that fails soon after its start wait longer each time.
                    time.sleep(max(SPARE_READY_S, steady_at_s - time.monotonic()))
                    of_conductor.append(_kill_conductor(cluster, load))
                finally:
                    load.close()
            print(number + 1, _of_spares(of_spare, of_conductor), flush=True)
    return {"injected": 2 * count, **_of_spares(of_spare, of_conductor)}


def _of_spares(of_spare: Sequence[Window], of_conductor: Sequence[Window]) -> dict[str, Any]:
    next_s = max(window.more["next_spare_s"] for window in of_spare)
    took_place = sum(window.more["spare_took_its_place"] for window in of_conductor)
    return {
        "of_spare": {**summed(of_spare), "next_spare_s_max": round(next_s, 2)},
        "of_conductor_then": {**summed(of_conductor), "spare_took_its_place": took_place},
    }


def _kill_spare(cluster: FaultCluster, load: SteadyLoad) -> Window:
    killed = cluster.conductor.wait_spare()
    _begin(load)
    os.kill(killed, signal.SIGKILL)
    killed_at_s = time.monotonic()
    next_spare_s = wait_until(lambda: cluster.conductor.wait_spare() != killed, RECOVERED_S)
    wait_until(lambda: load.has_recovered(killed_at_s, SERVED_AGAIN), RECOVERED_S)
    window = load.taken(killed_at_s, time.monotonic())
    window.more = {"next_spare_s": next_spare_s}
    return window


def _kill_conductor(cluster: FaultCluster, load: SteadyLoad) -> Window:
    _begin(load)
    spare, pid = cluster.conductor.wait_spare(), cluster.conductor.pid()
    cluster.kill_conductor()
    killed_at_s = time.monotonic()
    wait_until(lambda: cluster.conductor.pid() != pid)
    dead_at_s = time.monotonic() + SETTLED_S
    wait_until(lambda: load.has_recovered(killed_at_s, SERVED_AGAIN), RECOVERED_S)
    window = load.taken(killed_at_s, time.monotonic())
    window.dead_at_s = dead_at_s
    window.more = {"spare_took_its_place": cluster.conductor.pid() == spare}
    return window


def _conductor_hung(cluster: FaultCluster, count: int) -> dict[str, Any]:
    """Block the event loop for ever, and wait for the supervisor to restart the conductor."""
    windows: list[Window] = []
    load = SteadyLoad(cluster.http_port, cluster.grpc_address, random.Random(count))
    try:
        for _ in range(count):
            windows.append(_hang_conductor(cluster, load))
            print(windows[-1].more, flush=True)
    finally:
        load.close()
    noticed_s = [window.more["noticed_s"] for window in windows]
    return {
        **summed(windows),
        "not_noticed": sum(each >= NOTICED_S for each in noticed_s),
        "noticed_s_max": round(max(noticed_s), 1),
    }


def _hang_conductor(cluster: FaultCluster, load: SteadyLoad) -> Window:
    _begin(load)
    pid = cluster.conductor.pid()
    assert pid is not None
    os.kill(pid, signal.SIGUSR1)
    hung_at_s = time.monotonic()
    try:
        noticed_s = wait_until(lambda: cluster.conductor.pid() != pid, NOTICED_S)
    except TimeoutError:
        noticed_s = NOTICED_S
        cluster.kill_conductor()
        wait_until(lambda: cluster.conductor.pid() != pid)
    dead_at_s = time.monotonic() + SETTLED_S
    wait_until(lambda: load.has_recovered(dead_at_s, SERVED_AGAIN), RECOVERED_S)
    window = load.taken(hung_at_s, time.monotonic())
    window.dead_at_s = dead_at_s
    window.more = {"noticed_s": noticed_s}
    return window


conductor_hung = with_cluster(_conductor_hung, prefill=1, decode=1, program="bench.faults.hanging_conductor")
raylet_killed: Callable[[int], dict[str, Any]] = partial(_part_of_ray_killed, "raylet")
gcs_killed: Callable[[int], dict[str, Any]] = partial(_part_of_ray_killed, "gcs_server")
