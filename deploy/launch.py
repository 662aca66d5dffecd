"""Ray: hosts, placement, and an actor for each process. The one door to Ray.

Ray starts processes where they fit, and starts an actor again when its worker dies. It carries no tensor, no
token and no request, and it does not decide who is alive: the conductor's own leases do, much sooner.

A Ray that is running is joined when `RAY_ADDRESS` names it. Otherwise one is started for this process alone,
as its children, with no dashboard, and ends with it. `ray stop` is called nowhere: it ends every Ray process
on the machine, whosever it is.

A local Ray listens on loopback alone (`deploy/__init__.py` sees to it), where token authentication,
Ray's default since 2.54 for clusters it starts, keeps other users of the host out. Its token lies in a
file, which Ray makes readable to all: the folder is made private before, and the file after.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import logging
import os
import socket
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from base.clock import SystemClock
from base.errors import ConfigError
from base.private import FILE_MODE, make_private
from deploy.plan import HOST_ADDRESS, Resources, Together
from deploy.supervisor import NOTHING_SEEN, ProcessSpec, Seen, Supervisor

OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's least: nothing of ours goes there, and the default takes 30 % of the memory."""

PLACEMENT_TIMEOUT_S = 60.0
"""The longest that a local Ray may take to start an actor."""

JOINED_PLACEMENT_TIMEOUT_S = 1800.0
"""The longest that a cluster may take to start an actor: its autoscaler may have to start hosts first."""

DRAIN_CALL_S = 5.0
"""Seconds that a drain may take beyond its grace, to kill what did not end."""

ELSEWHERE = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Addresses for documentation (RFC 5737 and 3849): any that the default route leads to would do."""

HEAD = {"node:__internal_head__": 0.001}
"""Ray's mark of its head node. The conductor is there, where clients are sent."""


class ActorProcess(Supervisor):
    """A `Supervisor` that Ray can construct: from plain values alone."""

    def __init__(self, spec: dict[str, Any]) -> None:
        config = _with_host(spec["config"], self.host_address())
        super().__init__(ProcessSpec(**{**spec, "config": config}), SystemClock())

    def host_address(self) -> str:
        """Return the address by which other hosts reach this one."""
        return reachable_address(str(ray.util.get_node_ip_address()))


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """One process: what it said when it was ready, and the address of its host."""

    name: str
    ready: dict[str, Any]
    host: str


class RayCluster:
    """The Ray we started or joined, and the actors that are ours in it."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._groups: dict[str, PlacementGroup] = {}
        self._members: dict[str, str] = {}
        """The group of each process that is in one."""
        self._seen: dict[str, Seen] = {}
        """The last event of each process that was returned, or the `ready` of its start."""
        self.is_local = "RAY_ADDRESS" not in os.environ

    def start(self, num_gpus: int) -> None:
        """Start a local Ray for nodes of `num_gpus`, or join the one of `RAY_ADDRESS`. Blocks some seconds.

        Raises ConfigError where no Ray answers at `RAY_ADDRESS`, or this host has too few GPUs. A cluster may
        have too little of anything: its autoscaler sees what waits.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # What an actor supervises outlives it (`supervisor.py`).
        os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "0")
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if not self.is_local:
            try:
                ray.init(address="auto", **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {error}") from error
            return
        token = Path("~/.ray/auth_token").expanduser()  # where RAY_AUTH_TOKEN_PATH names none
        make_private(token.parent)
        ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
        if token.exists():
            token.chmod(FILE_MODE)
        gpus = ray.cluster_resources().get("GPU", 0.0)
        if gpus < num_gpus:
            raise ConfigError(f"the nodes take {num_gpus} GPUs and this host has {gpus:g}")

    def num_hosts(self) -> int:
        return sum(1 for node in ray.nodes() if node["Alive"])

    async def launch(self, spec: ProcessSpec, resources: Resources) -> LaunchedProcess:
        """Start a process on some host; return when it is ready. Raises RuntimeError, which says why not."""
        # Restarted without end, and calls to it repeated: an actor's worker may be killed
        # (by the kernel for memory, by hand) without the cluster's end being meant.
        options: dict[str, Any] = {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": 4}
        # On one host CPUs are no more than Ray's unit of account, a laptop with two cores may well
        # run four nodes, and custom resources only keep hosts apart. GPUs are counted.
        cpus, resource = (0.0, "") if self.is_local else (resources.cpus, resources.resource)
        taken = {"num_cpus": cpus, "num_gpus": resources.gpus}
        custom = {**({resource: 1.0} if resource else {}), **(HEAD if resources.on_head else {})}
        if resources.together is not None and not self.is_local:  # one host has them together anyway
            options["scheduling_strategy"] = self._bundle(resources.together)
            self._members[spec.name] = resources.together.name
        actor = (
            ray.remote(ActorProcess)
            .options(**options, **taken, resources=custom)
            .remote(dataclasses.asdict(spec))
        )
        self._actors[spec.name] = actor
        timeout_s = PLACEMENT_TIMEOUT_S if self.is_local else JOINED_PLACEMENT_TIMEOUT_S
        try:
            host = await asyncio.wait_for(_result(actor.host_address.remote()), timeout_s)
        except TimeoutError as error:
            raise RuntimeError(f"{spec.name}: Ray found no place for it in {timeout_s:g} s") from error
        ready = await _result(actor.wait_ready.remote())
        self._seen[spec.name], _ = await _result(actor.wait_event.remote(NOTHING_SEEN))
        return LaunchedProcess(spec.name, ready, host)

    def _bundle(self, together: Together) -> PlacementGroupSchedulingStrategy:
        """Return the place in its group; Ray moves a group whose host is lost as a whole."""
        if together.name not in self._groups:
            bundles = [dict(bundle) for bundle in together.bundles]
            self._groups[together.name] = placement_group(bundles, strategy="STRICT_PACK")
        return PlacementGroupSchedulingStrategy(self._groups[together.name], together.index)

    async def next_event(self, name: str) -> dict[str, Any]:
        """Return what happens next to a process, after its start."""
        self._seen[name], event = await _result(self._actors[name].wait_event.remote(self._seen[name]))
        return dict(event)

    @property
    def names(self) -> set[str]:
        """The processes that were launched, ready or not."""
        return set(self._actors)

    async def drain(self, names: set[str], grace_s: float) -> None:
        """Let processes finish what they have, all at once; end them after `grace_s`."""
        calls = [
            asyncio.wait_for(_result(self._actors[name].drain.remote(grace_s)), grace_s + DRAIN_CALL_S)
            for name in names & self.names
        ]
        # A call to an actor whose worker died waits for the next one, which adopts the process first.
        # One that has no place does not answer: what it leaves is its host's (`cluster.py`, `lifetime.py`).
        await asyncio.gather(*calls, return_exceptions=True)

    async def end(self, name: str, grace_s: float) -> None:
        """Drain one process, and give its resources back."""
        await self.drain({name}, grace_s)
        ray.kill(self._actors.pop(name))
        self._seen.pop(name, None)
        group = self._members.pop(name, None)
        if group is not None and group not in self._members.values():
            remove_placement_group(self._groups.pop(group))

    def stop(self) -> None:
        """End our actors, and the Ray that we started. Idempotent."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()
        ray.shutdown()


def reachable_address(by_ray: str) -> str:
    """Return `by_ray`; where that is loopback, as a local Ray says, the address of the host if it has one.

    The kernel chooses it, as it would for a packet that leaves the host; none is sent.
    """
    if not ipaddress.ip_address(by_ray).is_loopback:
        return by_ray
    for address, family in ELSEWHERE:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
            except OSError:  # no route: the host is alone
                continue
            return str(probe.getsockname()[0])
    return by_ray


def _with_host(value: Any, address: str) -> Any:
    """Return a configuration with `address` wherever it says `HOST_ADDRESS`."""
    if isinstance(value, dict):
        return {key: _with_host(inner, address) for key, inner in value.items()}
    return address if value == HOST_ADDRESS else value


async def _result(ref: Any) -> Any:
    """Return what an actor's call returned; Ray's own errors become RuntimeErrors."""
    try:
        return await asyncio.wrap_future(ref.future())
    except ray.exceptions.RayTaskError as error:
        raise RuntimeError(str(error.cause)) from error
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"Ray: {error}") from error


def free_resources() -> dict[str, float]:
    """Return the amounts that no process has taken, by Ray's names of resources."""
    return {str(name): float(amount) for name, amount in ray.available_resources().items()}
