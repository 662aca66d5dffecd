"""A conductor's node side on a real port with scripted nodes, and requests asked of its dispatcher."""

import asyncio
import random
from contextlib import aclosing, asynccontextmanager
from unittest.mock import patch

from base import attach
from base.attach import AttachClient
from base.clock import SystemClock
from base.config import SchedulerConfig, ServerConfig
from base.link import listen
from base.messages import Prefill, Registered, Reserve, Start, Tokens
from base.request import Request, Role, SamplingParams, StopParams
from conductor.api.server import tcp_listener
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.profiles.reader import load_profile
from conductor.serving.attach import AttachService
from conductor.serving.dispatch import Dispatcher, RequestObserver
from conductor.serving.membership import Membership
from tests.conductor.scripted_node import BLOCK_SIZE, MODEL_ID, ScriptedWork, node_info

PATIENCE_S = 600.0
"""Longer than any machine stands still: no node and no request of a test is lost by a pause."""
LEASE = Registered(lease_s=PATIENCE_S, heartbeat_s=0.2, conductor_epoch=1)


class Watched(RequestObserver):
    def __init__(self):
        self.made, self.endings, self.firsts = [], [], []

    def decided(self, made):
        self.made.append(made)

    def ended(self, attempt_id, actual):
        self.endings.append((attempt_id, actual))

    def first_token(self, ttft_s, prefilled, asked, placement):
        self.firsts.append(asked.request_id)


class Conductor:
    """A conductor's node side on a real port, and the scripted nodes attached to it."""

    def __init__(self, server, waiting, settings, observers, clock):
        self.cost = cost = CostModel(load_profile("cpu-smollm2"))
        self.settings = settings
        self.view = ClusterView(cost, BLOCK_SIZE)
        self.membership = Membership(MODEL_ID, self.view, clock)
        self.seen = Watched()
        observers = [self.seen, *observers]
        self.dispatcher = Dispatcher(
            self.membership, self.view, cost, observers, clock, settings, server, waiting
        )
        self.service = AttachService(self.membership, LEASE, clock)
        self.address = ""
        self.clients = {}
        self._group = None

    async def attach(self, work, **info):
        """Attach a node and wait until it is a member; return its task."""
        told = node_info(**info)
        client = AttachClient(told, self.address, random.Random(0))
        work.send = client.send
        task = self._group.create_task(client.run(work))
        self.clients[told.node_id] = task
        await until(lambda: told.node_id in {session.info.node_id for session in self.membership.sessions})
        return task

    def close_streams(self):
        for stream in list(self.service.streams):
            stream.give_up(ConnectionResetError("the test ends it"))

    @asynccontextmanager
    async def serving(self):
        listener = tcp_listener("127.0.0.1", 0, "port")
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        server = await listen(self.service.stream, listener, None)
        async with asyncio.TaskGroup() as self._group:
            try:
                with patch.object(attach, "CONNECT_TIMEOUT_S", PATIENCE_S):
                    yield self
            finally:
                for task in self.clients.values():
                    task.cancel()
                self.close_streams()
                server.close()


@asynccontextmanager
async def conductor(
    request_timeout_s=PATIENCE_S,
    role_wait_s=0.0,
    max_waiting=8,
    patience_s=60.0,
    observers=(),
    clock=None,
    **settings,
):
    """Run one. On a `ManualClock` no prediction of it comes true before the test says so."""
    server = ServerConfig(request_timeout_s=request_timeout_s)
    waiting = SchedulerConfig(max_waiting=max_waiting, role_wait_s=role_wait_s, patience_s=patience_s)
    settings, clock = SchedulerSettings(**settings), clock or SystemClock()
    async with Conductor(server, waiting, settings, observers, clock).serving() as running:
        yield running


async def until(condition):
    """Let the loop run until `condition` holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


STAGES = (Reserve, Prefill, Start, "lone Prefill", "lone Tokens")
"""Where a request waits for a node: for one of two, or for the one that does both."""


class Stuck:
    """One node or two that answer up to a stage."""

    def __init__(self, stage):
        self.is_lone = isinstance(stage, str)
        self.stage = {"lone Prefill": Prefill, "lone Tokens": Tokens}.get(stage, stage)
        self.works = [ScriptedWork(silent_on=self.stage) for _ in range(1 if self.is_lone else 2)]
        self.is_after_first = self.stage in (Start, Tokens)
        """Whether the client has its first token when they are stuck."""

    async def attach(self, running):
        roles = [(Role.PREFILL, Role.DECODE)] if self.is_lone else [(Role.PREFILL,), (Role.DECODE,)]
        for number, (work, of_node) in enumerate(zip(self.works, roles, strict=True)):
            await running.attach(work, node_id=f"a{number}", roles=of_node)

    def is_stuck(self):
        last = Prefill if self.stage is Tokens else self.stage
        return any(isinstance(item, last) for work in self.works for item in work.received)

    def held(self):
        return set().union(*(work.held() for work in self.works))

    def lose(self, running):
        for number in range(len(self.works)):
            running.clients[f"a{number}"].cancel()


def prefills(work):
    """Return the names of the requests whose Prefill came, in order."""
    return [item.work.request_id.partition(".")[0] for item in work.received if isinstance(item, Prefill)]


def request(max_tokens=10, request_id="r", **fields):
    return Request(
        request_id,
        tuple(range(20)),
        SamplingParams(temperature=0),
        StopParams(max_tokens=max_tokens),
        **fields,
    )


async def answer(dispatcher, asked):
    tokens, reason = [], None
    async with aclosing(dispatcher.generate(asked)) as pieces:
        async for piece in pieces:
            tokens += [token.token_id for token in piece.tokens]
            reason = piece.finish_reason
    return tokens, reason
