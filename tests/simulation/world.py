"""One run: a cluster made of shipped classes, in virtual time, under what one seed does to it.

Safety is looked at after every event: a block in two places or used without being held, a byte
that arrives in memory with another owner, KV that is read and is not its own, a token that is
wrong, missing or repeated, a request that ends twice, an exception nobody expected.

Liveness from the moment that the faults end: every request ends within `END_S`, and within
`IDLE_S` more nothing is held anywhere and the conductor's index is what the nodes have.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import warnings
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass

from base.errors import CapacityError, DeadlineError, LostError, RejectedError, UnavailableError
from tests.kvstore.memory_directory import MemoryBoard
from tests.simulation.carriage import Wires
from tests.simulation.conductor import Client, SimConductor
from tests.simulation.faults import carry_out
from tests.simulation.loop import SimLoop, Violation
from tests.simulation.network import Network
from tests.simulation.node import SimNode
from tests.simulation.plan import FAULTS_END_S, RAISING, SILENT, plan_of

END_S = 30.0
"""Longer than a lease (10 s), in which an end is noticed of which nobody is told, and another for
the last of a request's attempts."""
IDLE_S = 45.0
"""Longer than the 30 s for which a store holds what nobody gave back."""


class World:
    """Everything of one run."""

    def __init__(self, seed, violations, plan=None):
        self.seed, self.plan = seed, plan or plan_of(seed)
        self.rng = random.Random(f"{seed}/world")
        self.lines = []
        self._tasks = {}
        self.loop = SimLoop(self._work_s, self._after_each, self.plan.grain_s, violations)
        network_rng = random.Random(f"{seed}/network")
        self.network = Network(self.loop, network_rng, self.plan.base_s, self.plan.chances.get("slow", 0.0))
        self.wires = Wires(self.loop, self.network, network_rng, self.plan, self.trace)
        self.board = self.new_board()
        self.stores = {}
        self.nodes = [SimNode(self, plan) for plan in self.plan.nodes]
        self.conductors = [SimConductor(self, name) for name in self.plan.conductors]
        self.names = {*self.plan.conductors, *(node.plan.name for node in self.nodes)}
        self.clients = []
        self.context = copy_context()
        self.is_disturbed = True
        self.num_losses = 0
        """Deeds and faults that may have cost requests an attempt."""

    # what the parts ask for

    def started(self, coroutine):
        """Run `coroutine` in the process that asks for it; a task that nobody keeps may be collected."""
        task = asyncio.ensure_future(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    @staticmethod
    def new_board():
        return MemoryBoard()

    def trace(self, *words):
        self.lines.append((round(self.loop.time(), 6), *words))

    def chance(self, kind):
        is_so = self.is_disturbed and self.rng.random() < self.plan.chances.get(kind, 0.0)
        if is_so:
            self.num_losses += kind == "step"
            self.trace("chance", kind)
        return is_so

    def transfer_fault(self):
        if not self.plan.transfer_faults or not self.chance("transfer"):
            return None
        fault = self.rng.choice(self.plan.transfer_faults)
        self.num_losses += fault in SILENT or fault in RAISING
        self.trace("fault", fault.value)
        return fault

    def may_fail(self, request, error):
        """Whether a request may end so, after what has been done to the cluster."""
        if isinstance(error, DeadlineError):
            return request.deadline_s is not None
        if isinstance(error, RejectedError):
            return self.plan.is_tight or isinstance(error, CapacityError)
        if isinstance(error, UnavailableError):
            return bool(self.plan.deeds)
        # One loss costs a request one attempt at most, and it has four.
        return isinstance(error, LostError) and self.num_losses > 3

    def processes(self):
        return [*(each.process for each in self.conductors), *(node.process for node in self.nodes)]

    # the run

    async def run(self):
        for conductor in self.conductors:
            conductor.start()
        for node in self.nodes:
            node.start()
        for at_s, request, leaves_after_s in self.plan.requests:
            client = Client(self, self.rng.choice(self.conductors), request)
            self.clients.append(client)
            self.loop.call_at(at_s, client.ask)
            if leaves_after_s is not None:
                self.loop.call_at(at_s + leaves_after_s, client.leave)
        for deed in self.plan.deeds:
            carry_out(self, deed)
        await self._until(max([FAULTS_END_S, *(deed.at_s + deed.for_s + 0.1 for deed in self.plan.deeds)]))
        self._end_faults()
        await self._until_all(self._require_ended, END_S)
        await self._until_all(self._require_idle, IDLE_S)
        for agent in [agent for node in self.nodes for agent in node.agents]:
            await agent.close()

    def _end_faults(self):
        self.is_disturbed = False
        self.trace("faults end")

    async def _until(self, at_s):
        await asyncio.sleep(at_s - self.loop.time())

    async def _until_all(self, require, within_s):
        """Return when `require` is content, looking now and then; it must be within so long."""
        until_s = self.loop.time() + within_s
        while True:
            try:
                require()
            except AssertionError as error:
                if self.loop.time() >= until_s:
                    raise Violation(f"not within {within_s} s: {error}") from None
                await asyncio.sleep(0.5)
            else:
                return

    def _require_ended(self):
        for client in self.clients:
            assert client.end is not None, f"{client.request.request_id} has not ended"

    def _require_idle(self):
        for node in self.nodes:
            assert node.is_up, f"{node.plan.name} is gone"
            assert node.state is not None, f"{node.plan.name} is starting"
            node.require_idle()
        for conductor in self.conductors:
            assert not conductor.process.is_dead, f"{conductor.name} is gone"
            conductor.require_idle()
            attached = {session.info.node_id for session in conductor.membership.sessions}
            for node in self.nodes:
                assert node.plan.name in attached, f"{node.plan.name} is not attached"
                node.require_known(conductor.view)

    def _after_each(self):
        if self.loop.violations:
            raise Violation("; ".join(str(each) for each in self.loop.violations))

    def _work_s(self):
        return self.plan.step_s * self.rng.uniform(0.05, 1.0), self.rng.random() < 0.5


@dataclass(frozen=True)
class Outcome:
    """What came of one seed."""

    seed: int
    violation: str | None
    lines: list[tuple]
    """The trace."""

    @property
    def report(self):
        """What to tell of a violation: it, and how to see it again."""
        return f"{self.violation}\n  python -m tests.simulation --seed {self.seed} --trace"


def run_seed(seed, plan=None):
    """Run a seed to its end: what it stands for, or `plan` with its chances."""
    violations = []
    with _quiet(violations):
        outcome = _run(seed, violations, plan)
        gc.collect()
    return outcome


def _run(seed, violations, plan):
    world, violation = World(seed, violations, plan), None
    try:
        world.loop.run_until_complete(world.run())
    except Violation as error:
        violation = str(error)
    finally:
        for process in world.processes():
            process.kill()
        world.loop.close()
    return Outcome(seed, violation, world.lines)


class _Errors(logging.Handler):
    """What is logged as an error is a violation, but for the failures of steps that we made."""

    def __init__(self, violations):
        super().__init__(logging.ERROR)
        self._violations = violations

    def emit(self, record):
        text = record.getMessage()
        if "the device failed" not in text:
            self._violations.append(text if record.exc_info is None else f"{text}: {record.exc_info[1]!r}")


@contextmanager
def _quiet(violations):
    """Keep errors that are logged; collect garbage between runs alone, where it is no event."""
    root, handler = logging.getLogger(), _Errors(violations)
    level, hook = root.level, sys.unraisablehook
    root.addHandler(handler)
    root.setLevel(logging.ERROR)
    sys.unraisablehook = lambda told: None
    gc.disable()
    # What was there before, torch and all, is not looked through for each of a thousand runs.
    gc.freeze()
    try:
        with warnings.catch_warnings():
            # Coroutines that were to begin in a process that was killed.
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        gc.enable()
        root.removeHandler(handler)
        root.setLevel(level)
        sys.unraisablehook = hook
