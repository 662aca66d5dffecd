"""A whole cluster, from a configuration to nothing left running.

    prepare the model  ─┐
                        ├─> conductor ready ─> all nodes ready ─> serving ─> drained
    start or join Ray  ─┘

The conductor is first, because nodes dial its port. Draining goes the other way for
work: the conductor finishes what it admitted, for which it needs the nodes; then they go.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from base.config import ClusterConfig
from base.errors import ConfigError
from deploy import plan
from deploy.api_client import ApiError, is_healthy, read_json
from deploy.capacity import needs, offer_of_host, refusal
from deploy.clusters import Running, record, running
from deploy.held import end_at
from deploy.launch import LaunchedProcess, RayCluster
from deploy.pools import NodePools
from deploy.progress import Progress
from deploy.supervisor import LOG_TAIL_LINES, SPARE_AFTER_S, ProcessSpec
from deploy.targets import write_targets

ATTACH_TIMEOUT_S = 30.0
HEALTH_PERIOD_S = 0.1

MAX_EVENTS = 100
"""The most events of processes that wait to be shown."""

MAX_KEPT_RUNS = 10
"""Folders of logs, one for each start."""

PACKAGES = str(Path(__file__).resolve().parent.parent)
"""The folder that our packages are imported from."""


@dataclass(frozen=True, slots=True)
class Programs:
    """The commands of each kind of process; tests put others here."""

    prepare: tuple[str, ...] = (sys.executable, "-m", "engine.model_store")
    conductor: tuple[str, ...] = (sys.executable, "-m", "conductor")
    node: tuple[str, ...] = (sys.executable, "-m", "node.process")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a started cluster is reached."""

    http_address: str
    grpc_address: str
    model: str


class RayGoneError(RuntimeError):
    """The Ray that we started has ended."""


class Cluster:
    """Owns every process of one cluster, and Ray if it started that."""

    def __init__(
        self,
        config: ClusterConfig,
        identity: Running,
        programs: Programs,
        progress: Progress,
        watch_signals: Callable[[], None],
        outlive: Callable[[], None],
    ) -> None:
        """Begin. `identity` names the folder of this run: configurations, sockets and logs.

        `watch_signals` takes signals, from whoever has them; `outlive` is called when processes are ready
        that shall outlive a Ray that we started.
        """
        self._config = config
        self._watch_signals = watch_signals
        self._programs = programs
        self._progress = progress
        self._identity = identity
        self.log_folder = Path(identity.log_folder)
        self._outlive = outlive
        self._is_started = False
        self._ray = RayCluster()
        self._ray_start: asyncio.Future[None] | None = None
        self._pools: NodePools | None = None
        self._conductors: dict[str, str] = {}
        """HTTP addresses, by name."""
        self._events: asyncio.Queue[dict[str, Any] | RuntimeError] = asyncio.Queue(MAX_EVENTS)
        self._watchers: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> Endpoints:
        """Start everything; return when every process is ready.

        Raises:
            ConfigError: the model cannot be prepared, or this host has no room for the nodes, or no disk.
            RuntimeError: a process did not become ready; the message holds its log's end.
        """
        if self._config.prefill.nodes + self._config.decode.nodes == 0:
            raise ConfigError("prefill.nodes and decode.nodes are both 0: there is nothing to start")
        if self._config.hosts == "apart" and self._ray.is_local:
            raise ConfigError("hosts: apart wants several hosts, those of the Ray at RAY_ADDRESS")
        if self._ray.is_local:
            plan.require_disk(self._config.store.disk_path)
        in_use = {Path(cluster.log_folder) for cluster in running(self._identity.cache_dir)}
        _forget_old_runs(self.log_folder.parent, in_use)
        async with asyncio.TaskGroup() as group:
            model_task = group.create_task(self._prepare_model())
            group.create_task(self._start_ray())
        model = model_task.result()
        endpoints, attach_addresses = await self._start_conductors(model)
        self._pools = NodePools(self._config, model, attach_addresses, self, self._ray.is_local)
        with self._progress.stage("nodes") as note:
            await self._pools.start(note)
        for http_address in self._conductors.values():
            # A node is ready when it can serve; it attaches to the conductor a moment later.
            problem = f"not healthy {ATTACH_TIMEOUT_S:g} s after its nodes were ready"
            await self._wait(partial(is_healthy, http_address), f"{http_address}/health: {problem}")
        self._write_targets()
        record(dataclasses.replace(self._identity, http_address=endpoints.http_address))
        self._is_started = True
        self._report()
        return endpoints

    def _report(self) -> None:
        # Those of a joined Ray are on other hosts too, where nobody holds them: all of them drain together.
        if self._is_started and self._ray.is_local:
            self._outlive()

    async def _start_conductors(self, model: plan.LocalModel) -> tuple[Endpoints, tuple[str, ...]]:
        """Return where the first one is reached, and where nodes attach to each."""
        endpoints, attach_addresses, ports = [], [], set(self._identity.ports)
        with self._progress.stage("conductor") as note:
            for name, conductor in plan.conductor_processes(self._config, model).items():
                launched = await self._launch(
                    name, self._programs.conductor, conductor, {}, plan.Resources(on_head=True), SPARE_AFTER_S
                )
                host, ready = _reachable(conductor.server.host, launched.host), launched.ready
                scheme = "https://" if conductor.server.tls.is_set else ""
                found = Endpoints(
                    http_address=f"{scheme}{host}:{ready['http_port']}",
                    grpc_address=f"{host}:{ready['grpc_port']}",
                    model=conductor.served_model_name,
                )
                endpoints.append(found)
                attach_addresses.append(f"{host}:{ready['attach_port']}")
                self._conductors[name] = found.http_address
                ports |= {int(ready["http_port"]), int(ready["grpc_port"])}
            note("; ".join(f"http {found.http_address}, grpc {found.grpc_address}" for found in endpoints))
        self._identity = dataclasses.replace(self._identity, ports=tuple(sorted(ports)))
        return endpoints[0], tuple(attach_addresses)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield what happens to processes after their start: ready, exited.

        Raises RayGoneError where Ray ended (what it started serves on), and RuntimeError where the Ray that
        was joined has lost an actor for good.
        """
        for name in self._ray.names:
            self._watch(name)
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, RuntimeError):
                    raise event
                if event["event"] == "ready" and event["name"] in self.pools.ready:
                    # Its metrics may be on another host now.
                    self.pools.ready[event["name"]] = event
                    self._write_targets()
                yield event
        finally:
            for watcher in self._watchers.values():
                watcher.cancel()

    def _watch(self, name: str) -> None:
        async def watch() -> None:
            try:
                while True:
                    await self._events.put(await self._ray.next_event(name))
                    self._report()
            except RuntimeError as error:
                await self._events.put(RayGoneError(str(error)) if self._ray.is_local else error)

        self._watchers[name] = asyncio.create_task(watch())

    @property
    def pools(self) -> NodePools:
        """The nodes of a cluster that has started."""
        assert self._pools is not None
        return self._pools

    async def launch_node(self, node: plan.PlannedNode) -> LaunchedProcess:
        process = node.process
        environment = plan.node_environment(process.engine.threads)
        return await self._launch(process.node_id, self._programs.node, process, environment, node.resources)

    async def end_node(self, name: str, grace_s: float) -> None:
        if name in self._watchers:
            self._watchers.pop(name).cancel()
        await self._ray.end(name, grace_s)
        if self._ray.is_local:
            # Its supervisor's worker may have died, and the keeper would hold it for ever.
            await asyncio.to_thread(end_at, self.log_folder / f"{name}.sock", grace_s)

    async def nodes_changed(self, come: set[str]) -> None:
        for name in come:
            self._watch(name)
        self._write_targets()
        for http_address in self._conductors.values() if come else ():
            # Others may go when the conductor knows those that came.
            is_attached = partial(_has_attached, http_address, come)
            await self._wait(is_attached, f"{', '.join(sorted(come))}: not attached")

    async def drain(self, grace_s: float) -> None:
        """Finish admitted requests, then end every process; `grace_s` for each half."""
        if self._ray_start is None or not self._ray_start.done():
            return
        conductors = set(self._conductors)
        await self._ray.drain(conductors, grace_s)
        await self._ray.drain(self._ray.names - conductors, grace_s)

    async def stop(self) -> None:
        """End whatever is left, at once. Idempotent."""
        if self._ray_start is not None:
            # Ray half started is nothing that can be ended: first let it start.
            with contextlib.suppress(ConfigError):
                await self._ray_start
            self._ray.stop()

    async def _prepare_model(self) -> plan.LocalModel:
        with self._progress.stage("model") as note:
            command = (*self._programs.prepare, self._config.model, "--cache-dir", self._identity.cache_dir)
            said = await _run(command, note)
            model = plan.LocalModel(**json.loads(said))
            note(model.name)
        if self._ray.is_local:
            counts = {"prefill": self._config.prefill.nodes, "decode": self._config.decode.nodes}
            offer = await asyncio.to_thread(offer_of_host)  # a local Ray counts the GPUs itself
            if problem := refusal(counts, needs(self._config, model.path), offer, 0):
                raise ConfigError(problem)
        return model

    async def _start_ray(self) -> None:
        num_gpus = sum(
            pool.nodes * pool.gpus_per_node for pool in (self._config.prefill, self._config.decode)
        )
        with self._progress.stage("ray") as note:
            self._ray_start = asyncio.ensure_future(asyncio.to_thread(self._ray.start, num_gpus))
            await asyncio.shield(self._ray_start)
            # Ray has put its own handler of SIGTERM over ours: a stack trace, then, when 3 s
            # have passed, abort().
            self._watch_signals()
            note(
                "a local one, on loopback" if self._ray.is_local else f"joined, {self._ray.num_hosts()} hosts"
            )

    def _write_targets(self) -> None:
        write_targets(self._identity.cache_dir, self._identity.name, self._conductors, self.pools.ready)

    async def _wait(self, is_so: Callable[[], bool], problem: str) -> None:
        """Wait until a conductor answers that something is so; raises RuntimeError with `problem`."""
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                # The event would have to come from another process: a probe is what there is.
                while not await asyncio.to_thread(is_so):  # noqa: ASYNC110
                    await asyncio.sleep(HEALTH_PERIOD_S)
        except TimeoutError as error:
            why = "".join(f": {reason}" for reason in await asyncio.to_thread(refusals, self.log_folder))
            raise RuntimeError(f"{problem}{why}; logs: {self.log_folder}") from error

    async def _launch(
        self,
        name: str,
        command: tuple[str, ...],
        config: Any,
        environment: dict[str, str],
        resources: plan.Resources,
        spare_after_s: float | None = None,
    ) -> LaunchedProcess:
        python_path = os.pathsep.join(filter(None, (PACKAGES, os.environ.get("PYTHONPATH"))))
        spec = ProcessSpec(
            name=name,
            command=command,
            config=dataclasses.asdict(config),
            environment={"PYTHONPATH": python_path, **environment},
            folder=str(self.log_folder),
            spare_after_s=spare_after_s,
        )
        launched = await self._ray.launch(spec, resources)
        self._report()
        return launched


def _has_attached(http_address: str, names: set[str]) -> bool:
    try:
        return names <= {node["id"] for node in read_json(http_address, "/status")["nodes"]}
    except ApiError:
        return False


def _reachable(bound: str, host: str) -> str:
    """Return the address to dial for a server bound to `bound` on `host`."""
    if bound in plan.ANY_ADDRESSES:
        return host
    return f"[{bound}]" if ":" in bound else bound


async def _run(command: tuple[str, ...], note: Callable[[str], None]) -> str:
    """Return a program's last line of standard output; raises ConfigError with the end of what it logged."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    answer = asyncio.create_task(process.stdout.read())
    logged: deque[str] = deque(maxlen=LOG_TAIL_LINES)
    try:
        async for line in process.stderr:
            logged.append(line.decode(errors="replace").rstrip())
            note(logged[-1][:60])
        status = await process.wait()
        lines = (await answer).decode().strip().splitlines()
    finally:
        answer.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()
    if status != 0 or not lines:
        raise ConfigError("\n".join(logged) or f"{' '.join(command)} ended with status {status}")
    return lines[-1]


def refusals(folder: Path) -> list[str]:
    """Return why conductors refused the nodes that came last, by their logs in a run's folder."""
    found = []
    for path in sorted(folder.glob("conductor*.log")):
        with path.open(errors="replace") as log:
            last = deque((line for line in log if " node refused reason=" in line), maxlen=1)
        if last:
            reason = last[0].partition(" node refused reason=")[2].strip()
            with contextlib.suppress(json.JSONDecodeError):  # it is not quoted, or the line is not whole yet
                reason = str(json.JSONDecoder().raw_decode(reason)[0])
            found.append(reason)
    return found


def _forget_old_runs(folder: Path, in_use: set[Path]) -> None:
    """Delete the logs of all but the latest starts and of the clusters that run."""
    runs = sorted(folder.iterdir()) if folder.is_dir() else []
    for run in set(runs[: -MAX_KEPT_RUNS + 1]) - in_use:
        for file in run.iterdir():
            file.unlink(missing_ok=True)
        run.rmdir()
