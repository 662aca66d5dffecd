"""The nodes attached to this conductor, and the requests that each one works on.

A `NodeSession` is one attached stream. It belongs to the event loop. Sending never
waits: what is sent goes into the outbox, and the stream takes it from there, much of it in one
message. A request opens an exchange with each node it was placed on, and everything
that either node says arrives in the request's one mailbox, so that the death of the
decode node is noticed while the prefill node is waited for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from base.errors import LostError, ProtocolError, error_named
from base.messages import (
    Failed,
    FromNode,
    Heartbeat,
    Lent,
    NodeInfo,
    Prefilled,
    Release,
    Reserved,
    Tokens,
    ToNode,
)
from base.request import RequestId

SNAPSHOT_PAUSE_S = 2.0
"""The first pause between two snapshots that are asked of a node: each may be some MB."""

Message = TypeVar("Message", Reserved, Lent, Prefilled, Tokens)
Wake = Callable[[asyncio.Future[None]], None]


def _resolve(reader: asyncio.Future[None]) -> None:
    if not reader.done():
        reader.set_result(None)


class Mailbox:
    """The messages of the nodes of one request, in order of arrival.

    Unbounded, and bounded all the same: a node sends at most one message for each token
    of the request, and a request has at most `max_tokens`. One task reads it: an
    `asyncio.Queue`, which allows for many, takes twice as long for each token.
    """

    def __init__(self) -> None:
        self._arrived: deque[FromNode] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._resolve: Wake = _resolve
        self._is_paused = False
        self._is_urgent = False
        self._is_due = False
        """Whether the reader is resolved, or is in line to be."""
        self._when_reserved: Callable[[Reserved], None] | None = None
        self._when_over: Callable[[bool], object] | None = None
        self.failed: Failed | None = None
        """The node's message for which `next` raised an error."""
        self.has_heard = False
        """A node has said something of the request, be it that it failed."""
        self.tokens_at_s = self.joined_at_s = 0.0
        """When the last tokens came, and the first, on the loop's clock: a pause has them read later."""
        self.num_joined = 0
        """Tokens in the first message that had some."""
        self.num_tokens = 0
        """Tokens in all messages that have arrived."""

    def put(self, item: FromNode) -> None:
        if self._when_reserved is not None and isinstance(item, Reserved):
            call, self._when_reserved = self._when_reserved, None
            call(item)
            return
        self._arrived.append(item)
        if isinstance(item, Tokens) and item.tokens:
            self._note_tokens(item)
        if not (isinstance(item, Tokens) and item.finish_reason is None):
            self._is_urgent = True
            self._note_last(item)
        if not self._is_paused or self._is_urgent:
            self._wake()

    def _note_tokens(self, item: Tokens) -> None:
        self.tokens_at_s = asyncio.get_running_loop().time()
        if not self.num_joined:
            self.joined_at_s, self.num_joined = self.tokens_at_s, len(item.tokens)
        self.num_tokens += len(item.tokens)

    def when_reserved(self, call: Callable[[Reserved], None]) -> None:
        """Hand `Reserved` to `call` as it comes, and not to `next`."""
        self._when_reserved = call
        if self._arrived and isinstance(self._arrived[0], Reserved):
            self.put(self._arrived.popleft())

    def when_over(self, call: Callable[[bool], object]) -> None:
        """Call `call` when the last tokens come, or are here (True); or a failure does (False)."""
        self._when_over = call
        if self._arrived:
            self._note_last(self._arrived[-1])

    def _note_last(self, item: FromNode) -> None:
        if self._when_over is not None and _is_last(item):
            call, self._when_over = self._when_over, None
            call(isinstance(item, Tokens))

    def close(self) -> None:
        """Hand nothing to anybody any more."""
        self._when_reserved = self._when_over = None

    async def next(self, kind: type[Message], pause_s: float = 0.0, resolve: Wake = _resolve) -> Message:
        """Return the next message; tokens that are not the last ones not before `pause_s`.

        Args:
            resolve: Resolves what the reader waits for, once there are tokens to read: at once, or soon. Any
                other message, and the last tokens, are read at once.

        Raises:
            ServeError: the class that a node's `Failed` names; LostError when a node
                left; ProtocolError where it is not of `kind`.
        """
        self._resolve = resolve
        if pause_s > 0 and not self._is_urgent:
            self._is_paused = True
            timer = asyncio.get_running_loop().call_later(pause_s, self._end_pause)
            try:
                await self._woken()
            finally:
                timer.cancel()
                self._is_paused = False
        elif not self._arrived:
            await self._woken()
        item = self._arrived.popleft()
        self._is_urgent = self._is_urgent and bool(self._arrived)
        if isinstance(item, Failed):
            self.failed = item
            raise error_named(item.reason, item.message)
        if not isinstance(item, kind):
            raise ProtocolError(f"{type(item).__name__} where {kind.__name__} was expected")
        return item

    async def _woken(self) -> None:
        self._reader, self._is_due = asyncio.get_running_loop().create_future(), False
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        """Have the reader go on; one that was to go on soon goes on at once where something is urgent."""
        if self._reader is None:
            return
        if self._is_urgent:
            _resolve(self._reader)
        elif not self._is_due:
            self._resolve(self._reader)
        self._is_due = True

    def _end_pause(self) -> None:
        self._is_paused = False
        if self._arrived:
            self._wake()

    def take_tokens(self) -> list[Tokens]:
        """Return the tokens that have arrived before anything else, without waiting."""
        taken: list[Tokens] = []
        while self._arrived and isinstance(tokens := self._arrived[0], Tokens):
            taken.append(tokens)
            self._arrived.popleft()
        return taken


class NodeSession:
    """One attached node, for as long as its stream lives."""

    def __init__(self, info: NodeInfo, wake: Callable[[int, bool], None] = lambda *_: None) -> None:
        """Begin.

        Args:
            wake: Called when something was said, with how much waits for `take_outgoing`, and whether
                anybody waits for an answer to it; and when the node is lost.
        """
        self.info = info
        self._wake = wake
        self.last_heartbeat: Heartbeat | None = None
        self.last_heartbeat_at_s = 0.0
        self._outbox: list[ToNode] = []
        self._mailboxes: dict[RequestId, Mailbox] = {}
        self.snapshot_after_s = 0.0
        """The time from which a snapshot may be asked for, on the conductor's clock."""
        self.snapshot_pause_s = SNAPSHOT_PAUSE_S
        self.is_lost = False
        """Whether the node's requests were ended: nothing is sent to it any more."""

    def begin(self, request_id: RequestId, mailbox: Mailbox) -> None:
        """Begin an exchange: deliver to `mailbox` what the node says of `request_id`, until `end`.

        Raises:
            LostError: the node has left.
        """
        if self.is_lost:
            raise LostError(f"node {self.info.node_id} has left")
        self._mailboxes[request_id] = mailbox

    def end(self, request_id: RequestId) -> None:
        """Release what the node holds of the request, unless it has said its last of it."""
        if self._mailboxes.pop(request_id, None) is not None:
            self.send(Release(request_id))

    def send(self, item: ToNode) -> None:
        """Queue `item`; the stream takes it. Nothing is sent to a lost node."""
        if not self.is_lost:
            self._outbox.append(item)
            self._wake(len(self._outbox), not isinstance(item, Release))

    def deliver(self, items: Iterable[FromNode]) -> None:
        """Hand each message to the request it is about; late ones go nowhere."""
        for item in items:
            mailbox = self._mailboxes.get(item.request_id)
            if mailbox is None:
                continue
            if _is_last(item):
                # The node holds nothing any more: there is nothing to release.
                del self._mailboxes[item.request_id]
            mailbox.has_heard = True
            mailbox.put(item)

    def lose(self, reason: str) -> None:
        """End every exchange: the stream is gone, and the node lets go of everything."""
        self.is_lost = True
        self._outbox.clear()
        self._wake(0, True)
        mailboxes, self._mailboxes = self._mailboxes, {}
        for request_id, mailbox in mailboxes.items():
            mailbox.put(
                Failed(request_id, LostError.__name__, f"node {self.info.node_id} was lost: {reason}")
            )

    def take_outgoing(self) -> list[ToNode]:
        """Return what waits to be sent, in order; it waits no more."""
        items, self._outbox = self._outbox, []
        return items

    @property
    def fence(self) -> int:
        """The number under which orders to the node are valid; 0: none are."""
        return self.last_heartbeat.fence if self.last_heartbeat is not None else 0

    @property
    def num_requests(self) -> int:
        return len(self._mailboxes)


def _is_last(item: FromNode) -> bool:
    """Return whether a node is done with a request when it says so."""
    if isinstance(item, Tokens):
        return item.finish_reason is not None
    if isinstance(item, Prefilled):
        return not item.stays
    return isinstance(item, Failed)
