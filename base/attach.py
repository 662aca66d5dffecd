"""The node's side of the stream to a conductor. `conductor/serving/attach.py` is the other.

The client dials, registers, and serves until the stream ends or stays silent for the
lease; then the node lets go of everything it held for that conductor and dials again.
A node has a client, and a `NodeWork`, for each conductor of its cluster.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

from google.protobuf.message import DecodeError

from base.errors import ForeignPeerError, ProtocolError, ServeError
from base.link import EARLY_S, End, MessageStream, dial
from base.logs import event
from base.messages import FromNode, Heartbeat, KvEvents, NodeInfo, Prefilled, Registered, Tokens, ToNode
from base.turns import TURN_UNITS
from base.wire import add_state, from_node, lease_from, register, to_node_from
from protos import nodes_pb2 as pb

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
"""Limit for opening the stream and being registered. Loopback and a datacentre need milliseconds."""

# A conductor that restarts is back in a tenth of a second, or three without a spare, so the wait
# between two dials stays short; it is jittered so that a thousand nodes do not dial at once.
MAX_BACKOFF_S = 1.0
MIN_BACKOFF_S = 0.1
FOREIGN_BACKOFF_S = 30.0
"""The wait before an address is dialled again where something else than a conductor listens for nodes."""

STATE_GAP_S = 0.01
"""Least time between two messages with the node's state, which costs more than most that goes with it."""
STATE_DELAY_S = 0.02
"""Time from a message without the state to one for the state alone, where no other message comes."""
WAKE_DELAY_S = 0.002
"""Time from a change of a node's state to the message that reports it."""


class NodeWork(Protocol):
    """A node's work for one conductor: messages come in, and its state goes out."""

    def attached(self, lease: Registered) -> None:
        """The stream is open. What follows is of the conductor that gives the lease, until `lost`."""
        ...

    def receive(self, items: list[ToNode]) -> None: ...

    def heartbeat(self) -> Heartbeat: ...

    def kv_events(self) -> KvEvents | None: ...

    def kv_snapshot(self) -> KvEvents: ...

    def lost(self) -> None:
        """Let go of everything held for the conductor; also where none was attached."""
        ...


class MessageObserver:
    """Is notified of one conductor's messages where they pass, in the event loop; raises nothing."""

    def received(self, items: Sequence[ToNode]) -> None:
        """Note what the conductor asks, before the node's work has it."""

    def sent(self, item: FromNode) -> None:
        """Note what the node answers."""

    def lost(self) -> None:
        """Note that the stream is over, and with it all that was asked."""


class AttachClient:
    """Keeps one node attached to one conductor."""

    def __init__(
        self,
        info: NodeInfo,
        address: str,
        rng: random.Random,
        secured: Callable[[], ssl.SSLContext] | None = None,
        dial_end: Callable[[End], Awaitable[None]] | None = None,
        observers: Sequence[MessageObserver] = (),
    ) -> None:
        """Begin unattached.

        Args:
            secured: Makes what is dialled with (`base/tls.py`); None: the conductor has no TLS.
            dial_end: Gives the end a link; None: to `address`. A simulation's goes nowhere else.
        """
        self._info = info
        self._address = address
        self._dial = dial_end or partial(dial, address=address, secured=secured)
        self._rng = rng
        self._observers = observers
        self._stream: _Stream | None = None

    def send(self, item: FromNode) -> None:
        """Say `item` to the conductor; while there is none, it is dropped: all the
        requests it could be about ended with the stream."""
        if self._stream is not None:
            for observer in self._observers:
                observer.sent(item)
            self._stream.send(item)

    def wake(self) -> None:
        """Send a heartbeat soon: the node's state changed.

        Not at once: what changes the state mostly has something to say as well.
        """
        if self._stream is not None:
            self._stream.send_state_in(WAKE_DELAY_S)

    async def run(self, work: NodeWork) -> None:
        """Serve until cancelled."""
        backoff_s = MIN_BACKOFF_S
        while True:
            stream = _Stream(self._info, work, self._attached, self._observers)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await self._dial(stream)
                    await stream.answered.wait()
                if stream.is_attached:
                    backoff_s = MIN_BACKOFF_S
                await stream.over()
            except ForeignPeerError as error:
                backoff_s = FOREIGN_BACKOFF_S
                mend = "nodes attach to the conductor's nodes.attach_port, not to its HTTP or gRPC port"
                event(
                    log,
                    "no conductor at this address",
                    level=logging.ERROR,
                    address=self._address,
                    reason=error,
                    mend=mend,
                )
            except (OSError, ServeError) as error:  # a TimeoutError is an OSError
                event(
                    log,
                    "conductor lost",
                    level=logging.WARNING,
                    address=self._address,
                    reason=str(error) or type(error).__name__,
                )
            finally:
                self._stream = None
                stream.close()
                for observer in self._observers:
                    observer.lost()
                work.lost()
            await asyncio.sleep(backoff_s * self._rng.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _attached(self, stream: _Stream, conductor_epoch: int) -> None:
        event(log, "attached", address=self._address, conductor_epoch=conductor_epoch)
        self._stream = stream


class _Stream:
    """One stream, from its registration to its end: an `End`."""

    def __init__(
        self,
        info: NodeInfo,
        work: NodeWork,
        attached: Callable[[_Stream, int], None],
        observers: Sequence[MessageObserver],
    ) -> None:
        self._info = info
        self._work = work
        self._attached = attached
        self._observers = observers
        self._loop = asyncio.get_running_loop()
        self._link: MessageStream | None = None
        self._lease: Registered | None = None
        self._outbox: deque[FromNode] = deque()
        self._is_flushing = self._has_computed = False
        self._heard_at_s = self._sent_at_s = 0.0
        self._owes_snapshot = False
        self._silence: asyncio.TimerHandle | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._beat_due_s = 0.0
        """When the state is came next, whatever else is said."""
        self._ended: asyncio.Future[Exception] = self._loop.create_future()
        self.answered = asyncio.Event()
        """The conductor took the node in, or the stream is over."""

    @property
    def is_attached(self) -> bool:
        return self._lease is not None

    async def over(self) -> None:
        """Wait for the end, and raise what it was."""
        raise await self._ended

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def send(self, item: FromNode) -> None:
        # What is said in one turn of the loop goes in one message, as the tokens of a step.
        self._outbox.append(item)
        # Whoever learns that a prompt is computed places the next ones by its blocks.
        self._has_computed = self._has_computed or isinstance(item, Prefilled)
        self._flush_soon()

    def send_state_in(self, delay_s: float) -> None:
        """Send the state once so much time has passed, if no message brings it before."""
        if self._lease is not None:
            due_s = self._loop.time() + delay_s
            if due_s < self._beat_due_s:
                self._beat_at(due_s)

    # End

    def opened(self, link: MessageStream) -> None:
        self._link = link
        link.send(register(self._info).SerializeToString())

    def received(self, message: bytes) -> None:
        try:
            came = pb.ConductorMessage.FromString(message)
        except DecodeError as error:
            raise ProtocolError(f"no message of a conductor: {error}") from error
        self._heard_at_s = self._loop.time()
        if self._lease is None:
            self._registered(came)
        else:
            items = to_node_from(came)
            for observer in self._observers:
                observer.received(items)
            self._work.receive(items)
            if came.wants_snapshot:
                self._owes_snapshot = True
                self.send_state_in(WAKE_DELAY_S)

    def writable(self) -> None:
        self._flush()

    def closed(self, error: Exception | None) -> None:
        for timer in (self._silence, self._beat):
            if timer is not None:
                timer.cancel()
        self._lease = None
        self._outbox.clear()
        if not self._ended.done():
            self._ended.set_result(error or ProtocolError("the conductor closed the stream"))
        self.answered.set()

    def _registered(self, came: pb.ConductorMessage) -> None:
        self._lease = lease = lease_from(came)
        self._attached(self, lease.conductor_epoch)
        self._work.attached(lease)
        self._owes_snapshot = True
        self._send_all()
        self._silence = self._loop.call_later(lease.lease_s, self._hear)
        self.answered.set()

    def _hear(self) -> None:
        """End the stream if nothing came for the lease."""
        assert self._link is not None
        assert self._lease is not None
        due_s = self._heard_at_s + self._lease.lease_s
        if due_s > self._loop.time() + EARLY_S:
            self._silence = self._loop.call_at(due_s, self._hear)
        else:
            self._link.close(TimeoutError(f"silent for {self._lease.lease_s} s"))

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if self._link is None or self._lease is None or self._link.is_choked or not self._outbox:
            return
        if self._has_computed or self._loop.time() >= self._sent_at_s + STATE_GAP_S:
            self._send_all()
        else:
            self._write(from_node(self._take_outbox()))
            self.send_state_in(STATE_DELAY_S)

    def _send_state(self) -> None:
        assert self._link is not None
        if self._link.is_choked:
            self._beat_at(self._loop.time() + STATE_DELAY_S)
        else:
            self._send_all()

    def _send_all(self) -> None:
        """Send what waits, and the state with it."""
        assert self._lease is not None
        news = self._work.kv_snapshot() if self._owes_snapshot else self._work.kv_events()
        self._owes_snapshot = False
        message = from_node(self._take_outbox())
        add_state(message, self._work.heartbeat(), news)
        self._write(message)
        self._sent_at_s, self._has_computed = self._loop.time(), False
        self._beat_at(self._sent_at_s + self._lease.heartbeat_s)

    def _write(self, message: pb.NodeMessage) -> None:
        assert self._link is not None
        self._link.send(message.SerializeToString())

    def _take_outbox(self) -> list[FromNode]:
        """Return what waits, of tokens what a conductor takes in in one turn; the rest goes in our next one.

        A conductor that does not read for a while would else be sent all of that in one message.
        """
        items: list[FromNode] = []
        units = 0
        while self._outbox and units < TURN_UNITS:
            item = self._outbox.popleft()
            units += _units(item)
            items.append(item)
        if self._outbox:
            self._flush_soon()
        return items

    def _beat_at(self, due_s: float) -> None:
        if self._beat is not None:
            self._beat.cancel()
        self._beat_due_s = due_s
        self._beat = self._loop.call_at(due_s, self._send_state)


def _units(item: FromNode) -> int:
    """Return what an item costs a conductor, as `base/turns.py` counts: its tokens, likely ones too."""
    if not isinstance(item, Tokens) or not item.tokens:
        return 1
    logprobs = item.tokens[0].logprobs
    return len(item.tokens) * (1 if logprobs is None else 1 + len(logprobs.top))
