"""The nodes of a running cluster: which there are, and how they become more, fewer or new ones.

What a change needs is looked at before anything starts (`capacity.py`). Nodes start a few at a time: the
first of many are ready while there is still time to say that they are enough. Where a change was stopped, the
names of a pool's nodes may have any numbers; the next change keeps those and fills the gaps.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from base.config import ClusterConfig
from base.errors import ConfigError
from base.request import Role
from deploy import plan
from deploy.capacity import Offer, needs, offer_of_host, refusal
from deploy.change import Change, ChangeStoppedError, unless
from deploy.launch import LaunchedProcess, free_resources

NODE_DRAIN_S = 40.0
"""The longest that a node which is taken out is waited for; it drains itself in 30 s."""

AT_ONCE = max(2, (os.cpu_count() or 1) // 2)
"""Nodes that start at a time on one host: each imports and loads on a processor of its own."""

AT_ONCE_JOINED = 32
"""Nodes that start at a time in a Ray of several hosts, where processors bound how many start on one."""

POOLS = ("prefill", "decode")


class Hands(Protocol):
    """The cluster, which starts and ends nodes for the pools."""

    async def launch_node(self, node: plan.PlannedNode) -> LaunchedProcess:
        """Start a node and wait until it is ready; raises RuntimeError if it does not become so."""

    async def end_node(self, name: str, grace_s: float) -> None:
        """Drain a node, started whole or in part, and give its resources back."""

    async def nodes_changed(self, come: set[str]) -> None:
        """Say where the nodes are, and wait until the conductors know those that came."""


class NodePools:
    """The nodes of both pools."""

    def __init__(
        self,
        config: ClusterConfig,
        model: plan.LocalModel,
        attach_addresses: tuple[str, ...],
        hands: Hands,
        is_local: bool,
    ) -> None:
        self._config = config
        self._model = model
        self._attach_addresses = attach_addresses
        self._hands = hands
        self._is_local = is_local
        self._at_once = AT_ONCE if is_local else AT_ONCE_JOINED
        self.ready: dict[str, dict[str, Any]] = {}
        """The line of each node that is ready, by name."""

    async def start(self, note: Callable[[str], None]) -> None:
        """Start the nodes of the configuration; raises RuntimeError if one does not become ready."""
        slots = asyncio.Semaphore(self._at_once)

        async def launch(node: plan.PlannedNode) -> LaunchedProcess:
            async with slots:
                return await self._hands.launch_node(node)

        planned = self._planned(self._config)
        note(", ".join(planned))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(launch(node)) for node in planned.values()]
        self.ready = {task.result().name: task.result().ready for task in tasks}

    async def scale(self, prefill: int | None, decode: int | None, change: Change) -> None:
        """Start nodes, wait until they are attached, then drain those that are too many.

        None: as many of that pool as there are.

        Raises:
            ConfigError: the sizes cannot be had by adding and removing nodes, or the nodes do not fit.
            ChangeStoppedError: the change was stopped; nodes that were ready by then stay.
            RuntimeError: a new node did not become ready. Nothing was removed.
        """
        added, removed = self._difference(prefill, decode)
        await self._require_fit(added, change.say)
        try:
            await self._add(added, change)
            for unit in removed:
                self._go_on(change)
                for name in unit:
                    await self._remove(name, change.say)
        finally:
            self._config = self._with_sizes(**self._sizes())

    async def say_plan(self, prefill: int | None, decode: int | None, say: Callable[[str], None]) -> None:
        """Say what `scale` to these sizes would do and take; raises ConfigError where it would."""
        added, removed = self._difference(prefill, decode)
        say(f"start, {self._at_once} at a time: {_in_short([node.process.node_id for node in added])}")
        say(f"drain, one after the other: {_in_short([name for unit in removed for name in unit])}")
        if self._is_local:
            for pool, need in needs(self._config, self._model.path).items():
                say(f"a {pool} node takes {need}")
            offer = await self._offer()
            say(f"this host has free: {offer}")
        await self._require_fit(added, say)

    async def restart(self, change: Change) -> None:
        """Restart all nodes, one after the other.

        A node that is its pool's only one is stood in for by another meanwhile.

        Raises:
            ConfigError: the other does not fit.
            ChangeStoppedError: the change was stopped; the node that it was at is back.
            RuntimeError: a node did not become ready; the rest go on as they were.
        """
        sizes = self._sizes()
        names = list(self.ready)
        unstopped = Change(change.what, change.say)
        with contextlib.suppress(ChangeStoppedError):
            doubled = {pool: 2 if size == 1 else None for pool, size in sizes.items()}
            await self.scale(**doubled, change=change)
        for number, name in enumerate(names):
            change.progress = f"{number} of {len(names)} nodes were restarted"
            if change.is_stopped:
                break
            node = self._planned(self._config)[name]
            await self._remove(name, change.say)
            await self._add([node], unstopped)
        await self.scale(**sizes, change=unstopped)
        if change.is_stopped:
            raise ChangeStoppedError(f"{change.why}: {change.progress}")

    def _difference(
        self, prefill: int | None, decode: int | None
    ) -> tuple[list[plan.PlannedNode], list[list[str]]]:
        """Return the nodes to start, and the names to drain, in units; raises ConfigError."""
        sizes = {}
        for (name, now), size in zip(self._sizes().items(), (prefill, decode), strict=True):
            sizes[name] = now if size is None else size
            if bool(sizes[name]) != bool(now):
                raise ConfigError(f"{name}={size}: with or without a pool is a start's choice; now {now}")
        try:
            wanted = self._planned(self._with_sizes(**sizes))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        added = [node for name, node in wanted.items() if name not in self.ready]
        return added, plan.in_units(self._config, sorted(self.ready.keys() - wanted.keys()))

    def _with_sizes(self, prefill: int, decode: int) -> ClusterConfig:
        return dataclasses.replace(
            self._config,
            prefill=dataclasses.replace(self._config.prefill, nodes=prefill),
            decode=dataclasses.replace(self._config.decode, nodes=decode),
        )

    def _sizes(self) -> dict[str, int]:
        return _count(self.ready)

    def _go_on(self, change: Change) -> None:
        """Raise ChangeStoppedError, with what there is now, if the change was stopped."""
        if change.is_stopped:
            now = " ".join(f"{pool}={size}" for pool, size in self._sizes().items())
            raise ChangeStoppedError(f"{change.why}: {change.progress}; there are {now} now")

    async def _offer(self) -> Offer:
        free = await asyncio.to_thread(free_resources)
        return await asyncio.to_thread(offer_of_host, gpus=free.get("GPU", 0.0))

    async def _require_fit(self, added: list[plan.PlannedNode], say: Callable[[str], None]) -> None:
        """Raise ConfigError if what is known of the hosts says that nodes cannot run there."""
        if not added:
            return
        if not self._is_local:
            free = await asyncio.to_thread(free_resources)
            for name, amount in plan.sum_of(node.resources for node in added).items():
                if amount > (has := free.get(name, 0.0)):
                    say(f"they take {amount:g} {name}, of which Ray has {has:g} free: some wait for hosts")
            return
        counts = _count(node.process.node_id for node in added)
        need = needs(self._config, self._model.path)
        if problem := refusal(counts, need, await self._offer(), len(self.ready)):
            raise ConfigError(problem)

    async def _add(self, nodes: list[plan.PlannedNode], change: Change) -> None:
        """Start nodes, a few at a time, until all are attached or the change is stopped."""
        if not nodes:
            return
        planned = {node.process.node_id: node for node in nodes}
        slots = asyncio.Semaphore(self._at_once)
        failures: list[RuntimeError] = []
        ready: set[str] = set()

        async def add(unit: list[str]) -> None:
            async with slots:
                if change.is_stopped or failures:
                    return
                try:
                    launched = await unless(change.stopped, self._launched([planned[name] for name in unit]))
                except RuntimeError as error:
                    launched = None
                    failures.append(error)
                if launched is None:
                    await asyncio.gather(*(self._hands.end_node(name, 0.0) for name in unit))
                    return
                for node in launched:
                    self.ready[node.name] = node.ready
                    ready.add(node.name)
                    change.progress = f"{len(ready)} of {len(nodes)} nodes were started"
                    change.say(f"{node.name}: ready")

        change.progress = f"0 of {len(nodes)} nodes were started"
        await asyncio.gather(*map(add, plan.in_units(self._config, planned)))
        await self._hands.nodes_changed(ready)
        if failures:
            raise failures[0]
        self._go_on(change)

    async def _remove(self, name: str, say: Callable[[str], None]) -> None:
        say(f"{name}: draining")
        await self._hands.end_node(name, NODE_DRAIN_S)
        del self.ready[name]
        await self._hands.nodes_changed(set())
        say(f"{name}: gone")

    async def _launched(self, nodes: list[plan.PlannedNode]) -> list[LaunchedProcess]:
        return await asyncio.gather(*map(self._hands.launch_node, nodes))

    def _planned(self, config: ClusterConfig) -> dict[str, plan.PlannedNode]:
        pools = ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode))
        numbers = {role: plan.node_numbers(self.ready, role, pool.nodes) for role, pool in pools}
        cores = os.cpu_count() or 1
        planned = plan.planned_nodes(config, self._model, self._attach_addresses, cores, numbers)
        return {node.process.node_id: node for node in planned}


def _count(names: Iterable[str]) -> dict[str, int]:
    """Return how many of these nodes each pool has."""
    names = list(names)
    return {pool: sum(name.startswith(f"{pool}-") for name in names) for pool in POOLS}


def _in_short(names: list[str]) -> str:
    """Return names as a list that can be read, however many."""
    some = [*names[:4], f"... ({len(names)} nodes)"] if len(names) > 6 else names
    return ", ".join(some) or "none"
