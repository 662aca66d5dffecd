"""The node's side of the stream to a conductor. `conductor/attach.py` is the other.

The client dials, registers, and serves until the stream ends or stays silent for the
lease; then the node lets go of everything it held for that conductor and dials again.
A node has a client, and a `NodeWork`, for each conductor of its cluster.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol, TypeAlias

import grpc

from base.errors import ProtocolError
from base.logs import event
from base.messages import FromNode, Heartbeat, KvEvents, Lease, NodeInfo, ToNode
from base.wire import from_node, to_node_from
from base.wire_membership import add_state, lease_from, register
from protos import nodes_pb2 as pb
from protos.nodes_pb2_grpc import NodesStub

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
"""To open the stream and be registered. Loopback and a datacentre need milliseconds."""

# A conductor that restarts is back in a tenth of a second, or three without a spare, so the wait
# between two dials stays short; it is jittered so that a thousand nodes do not dial at once.
MAX_BACKOFF_S = 1.0
MIN_BACKOFF_S = 0.1

SEND_GAP_S = 0.001
"""Between two messages at least; the first after a pause goes at once."""

WAKE_DELAY_S = 0.002
"""From a change of a node's state to the heartbeat that tells of it."""

CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Nothing else backs off for us: the library's own would wait up to two minutes.
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A dial begins anew: of a pool that is shared, it would wait out the backoff of the one before.
    ("grpc.use_local_subchannel_pool", 1),
)

Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.NodeMessage, pb.ConductorMessage]"


class NodeWork(Protocol):
    """What a node does with its conductor's messages, and what it has to say."""

    def attached(self, conductor_epoch: int) -> None:
        """The stream is open. What follows is of that conductor, until `lost`."""
        ...

    def receive(self, items: list[ToNode]) -> None: ...

    def heartbeat(self) -> Heartbeat: ...

    def kv_events(self) -> KvEvents | None: ...

    def kv_snapshot(self) -> KvEvents: ...

    def lost(self) -> None:
        """Let go of everything held for the conductor; also where none was attached."""
        ...


class AttachClient:
    """Keeps one node attached to one conductor."""

    def __init__(
        self,
        info: NodeInfo,
        address: str,
        rng: random.Random,
        credentials: grpc.ChannelCredentials | None = None,
        dial: Callable[[], grpc.aio.Channel] | None = None,
    ) -> None:
        """Begin unattached.

        Args:
            credentials: From `base/tls.py`; None: the conductor has no TLS.
            dial: Makes the channel; None: to `address`. A simulation's goes nowhere else.
        """
        self._info = info
        self._address = address
        self._credentials = credentials
        self._dial = dial or self._channel
        self._rng = rng
        self._outbox: list[FromNode] = []
        self._outgoing = asyncio.Event()
        self._is_attached = False
        self._waking: asyncio.TimerHandle | None = None

    def send(self, item: FromNode) -> None:
        """Queue `item` for the conductor; while there is none, it is dropped: all the
        requests it could be about ended with the stream."""
        if self._is_attached:
            self._outbox.append(item)
            self._outgoing.set()

    async def run(self, work: NodeWork) -> None:
        """Serve until cancelled."""
        backoff_s = MIN_BACKOFF_S
        while True:
            try:
                async with self._attached() as (call, lease):
                    backoff_s = MIN_BACKOFF_S
                    await self._serve(call, lease, work)
            except (grpc.aio.AioRpcError, TimeoutError, ProtocolError) as error:
                event(
                    log, "conductor lost", level=logging.WARNING, address=self._address, reason=_reason(error)
                )
            finally:
                self._is_attached = False
                self._outbox.clear()
                work.lost()
            await _pause(backoff_s * self._rng.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    @asynccontextmanager
    async def _attached(self) -> AsyncIterator[tuple[Call, Lease]]:
        async with self._dial() as channel:
            call: Call = NodesStub(channel).Attach()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await _write(call, register(self._info))
                    lease = lease_from(await _read(call))
                event(log, "attached", address=self._address, conductor_epoch=lease.conductor_epoch)
                self._is_attached = True
                yield call, lease
            finally:
                call.cancel()

    def _channel(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(self._address, self._credentials, options=CHANNEL_OPTIONS)

    async def _serve(self, call: Call, lease: Lease, work: NodeWork) -> None:
        work.attached(lease.conductor_epoch)
        message = pb.NodeMessage()
        add_state(message, work.heartbeat(), work.kv_snapshot())
        await _write(call, message)
        # In a task of its own: before Python 3.11.4 a group whose member fails leaves its task half
        # cancelled, and the next time-out in it cancels the task.
        await asyncio.create_task(self._exchange(call, lease, work))

    async def _exchange(self, call: Call, lease: Lease, work: NodeWork) -> None:
        lost: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(call, lease, work))
                tasks.create_task(self._send(call, lease, work))
        except* (grpc.aio.AioRpcError, TimeoutError, ProtocolError) as errors:
            lost.extend(errors.exceptions)
        if lost:
            # Not within `except*`: before Python 3.11.4 that wraps it in a group again.
            raise lost[0]

    async def _receive(self, call: Call, lease: Lease, work: NodeWork) -> None:
        while True:
            async with asyncio.timeout(lease.lease_s):
                message = await _read(call)
            work.receive(to_node_from(message))

    async def _send(self, call: Call, lease: Lease, work: NodeWork) -> None:
        """Send what waits, and the node's load with it, at least every heartbeat."""
        sent_at_s = 0.0
        while True:
            if not self._outgoing.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(lease.heartbeat_s):
                        await self._outgoing.wait()
            # What is about to be said goes along: each message is a system call, here and there.
            now_s = asyncio.get_running_loop().time()
            if sent_at_s + SEND_GAP_S > now_s:
                await asyncio.sleep(sent_at_s + SEND_GAP_S - now_s)
            sent_at_s = max(now_s, sent_at_s + SEND_GAP_S)
            self._outgoing.clear()
            if self._waking is not None:
                self._waking.cancel()
                self._waking = None
            items, self._outbox = self._outbox, []
            message = from_node(items)
            add_state(message, work.heartbeat(), work.kv_events())
            await _write(call, message)

    def wake(self) -> None:
        """Send a heartbeat soon: the node's state changed.

        Not at once: what changes the state mostly has something to say as well, which would
        wait until the heartbeat is written.
        """
        if self._waking is None:
            self._waking = asyncio.get_running_loop().call_later(WAKE_DELAY_S, self._outgoing.set)


async def _read(call: Call) -> pb.ConductorMessage:
    message = await call.read()
    if not isinstance(message, pb.ConductorMessage):
        raise ProtocolError("the conductor closed the stream")
    return message


async def _write(call: Call, message: pb.NodeMessage) -> None:
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        # What grpc.aio says of a call that has ended, whatever ended it, before `read` has said so.
        raise ProtocolError("the conductor closed the stream") from None


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
