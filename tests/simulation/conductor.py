"""The conductor of a simulated cluster: the shipped classes, and clients that ask it for streams.

What a client is sent is compared, token for token, with what one undisturbed process would say.
"""

from __future__ import annotations

import asyncio
import functools
from contextlib import aclosing

from base.config import SchedulerConfig, ServerConfig
from base.errors import ProtocolError, RejectedError, ServeError
from base.messages import Registered
from base.metrics import ConductorMetrics, process_registry
from base.request import FinishReason
from bench.overload import stub_profile
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.explain import Decisions
from conductor.serving.attach import AttachService
from conductor.serving.dispatch import Dispatcher
from conductor.serving.membership import Membership
from conductor.serving.observer import Observer
from tests.simulation.attach_stream import AttachStream
from tests.simulation.device import LAYOUT, continuation, vector_of
from tests.simulation.loop import Process
from tests.simulation.node import MODEL_ID, OffsetClock

LEASE_S = 10.0
HEARTBEAT_S = 2.0
SERVER = ServerConfig(request_timeout_s=60.0)
WAITING = SchedulerConfig(max_waiting=16, role_wait_s=10.0)


@functools.cache
def _cost():
    return CostModel(stub_profile())


@functools.cache
def _metrics():
    """One for all runs: nothing reads them, and a registry takes longer than a request."""
    return ConductorMetrics(process_registry(), MODEL_ID)


class SimConductor:
    """One conductor process after the other."""

    def __init__(self, world, name):
        self.world, self.name = world, name
        self.process = None

    def start(self):
        world = self.world
        self.process = Process(self.name)
        clock = OffsetClock(world.loop, world.rng.uniform(0, 1e6))
        self.view = ClusterView(_cost(), LAYOUT.block_size)
        self.membership = Membership(MODEL_ID, self.view, clock)
        settings = world.plan.scheduler
        observer = Observer(_metrics(), self.view, _cost(), Decisions(_cost(), settings), clock)
        self.dispatcher = Dispatcher(
            self.membership, self.view, _cost(), [observer], clock, settings, SERVER, WAITING
        )
        lease = Registered(LEASE_S, HEARTBEAT_S, world.rng.getrandbits(63))
        self.service = self.process.context.run(AttachService, self.membership, lease, clock)

    def kill(self):
        self.process.kill()
        for node in self.world.nodes:
            self.world.network.cut(self.name, node.plan.name, told=node.plan.name)
        for client in self.world.clients:
            if client.conductor is self:
                client.lost_conductor()

    def attach(self, node_process):
        return AttachStream(
            self.world.network,
            node_process,
            self.process,
            self.service.stream,
            self.world.trace,
        )

    def require_idle(self):
        assert self.dispatcher.num_running == 0, f"{self.name} runs requests"
        assert len(self.dispatcher.queue) == 0, "requests wait to be placed"
        assert self.view.num_in_flight == 0, "the view counts requests"
        for session in self.membership.sessions:
            assert session.num_requests == 0, f"{session.info.node_id} has exchanges"


class Client:
    """One request: what it should be answered, and what it was."""

    def __init__(self, world, conductor, request):
        self.world, self.conductor, self.request = world, conductor, request
        if request.pooling is None:
            self.expected, self._stops = continuation(
                request.token_ids, request.stop, request.sampling.grammar
            )
        else:
            self.expected, self._stops = [], True
        self.tokens = []
        self.end = None
        """A FinishReason, an error's class name, 'left' or 'conductor lost'."""
        self.num_ends = 0
        self._task = None

    def ask(self):
        conductor = self.conductor
        if conductor.process.is_dead:
            self._ended("conductor lost")
            return
        self._process = conductor.process
        self._task = conductor.process.context.run(asyncio.ensure_future, self._stream(conductor.dispatcher))

    def leave(self):
        """Disconnect, as grpc has it: the handler is cancelled."""
        if self.end is None and self._task is not None:
            self._ended("left")
            self.world.loop.call_soon(self._task.cancel, context=self._process.context)

    def lost_conductor(self):
        if self._task is not None and self.end is None:
            self._ended("conductor lost")

    async def _stream(self, dispatcher):
        finish = None
        try:
            async with aclosing(dispatcher.generate(self.request)) as pieces:
                async for piece in pieces:
                    self._require(finish is None, "it goes on after its end")
                    self._take(piece)
                    finish = piece.finish_reason
                    if self.world.chance("slow_client"):
                        await asyncio.sleep(self.world.rng.uniform(0.0, 1.0))
        except ServeError as error:
            if self.end != "left":
                self._failed(error)
        else:
            if self.end != "left":
                self._finished(finish)

    def _take(self, piece):
        self.tokens += [token.token_id for token in piece.tokens]
        self.world.trace("client", self.request.request_id, len(self.tokens), piece.finish_reason)
        wanted = self.expected[: len(self.tokens)]
        self._require(self.tokens == wanted, f"tokens {self.tokens} where {self.expected} were due")
        pooling = self.request.pooling
        vector = None if pooling is None else vector_of(self.request.token_ids, pooling)
        self._require(piece.embedding == vector, f"the vector {piece.embedding} where {vector} was due")
        self._require(0 <= piece.num_cached_tokens < len(self.request.token_ids), "num_cached_tokens")

    def _finished(self, finish):
        reason = FinishReason.STOP if self._stops else FinishReason.LENGTH
        self._require(finish is reason, f"finish reason {finish}, not {reason}")
        self._require(self.tokens == self.expected, f"only {self.tokens} of {self.expected}")
        self._ended(finish.value)

    def _failed(self, error):
        self._require(not isinstance(error, ProtocolError), f"ProtocolError: {error}")
        self._require(
            not self.tokens or not isinstance(error, RejectedError), f"rejected after tokens: {error!r}"
        )
        if not self.world.may_fail(self.request, error):
            self._require(False, f"{type(error).__name__}: {error}")
        self._ended(type(error).__name__)

    def _ended(self, how):
        self.num_ends += 1
        self._require(self.num_ends == 1, f"it ended twice: {self.end}, {how}")
        self.end = how
        self.world.trace("ended", self.request.request_id, how, len(self.tokens))

    def _require(self, is_so, what):
        if not is_so:
            self.world.loop.violations.append(f"{self.request.request_id}: {what}")
