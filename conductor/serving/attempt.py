"""One attempt to run a request: it holds things on nodes, and lets go of them however it ends.

    with Attempt(state, finished) as attempt:
        attempt.placed = ...                          counted in the view, until `finished`
        attempt.begin(session, request_id, mailbox)   held on a node, until `Release` or its last word

A class of its own in place of a stack of callbacks: every request makes one, and a stack takes three
times as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from base.block_hash import BlockHash
from base.request import NodeId, RequestId
from conductor.placing.placement import Placement, PlacementRequest
from conductor.serving.generated import EnoughError
from conductor.serving.nodes import Mailbox, NodeSession
from conductor.serving.request_state import RequestState


class Placed(NamedTuple):
    """Where an attempt runs."""

    asked: PlacementRequest
    placement: Placement
    root: BlockHash
    evict_first_on: NodeId | None
    """The node that evicts the prompt's KV before all else, of two that will have it; None: one will."""


class Attempt:
    """One attempt, for the length of a `with`."""

    __slots__ = (
        "_exchanges",
        "_finished",
        "deadline",
        "has_left",
        "is_decided",
        "is_reserved",
        "is_streaming",
        "placed",
        "state",
    )

    def __init__(
        self, state: RequestState, finished: Callable[[Attempt, BaseException | None], None]
    ) -> None:
        """Begin, with nothing held. `finished` is called at the end of an attempt that was placed."""
        self.state = state
        self.placed: Placed | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.is_decided = False
        """Whether observers were notified of a placement or a refusal."""
        self.is_reserved = False
        """The decode node has set the blocks aside."""
        self.is_streaming = False
        self.has_left = False
        """The nodes hold nothing of it any more, and it is not counted in the view."""
        self._exchanges: list[tuple[NodeSession, RequestId]] = []
        self._finished = finished

    def begin(self, session: NodeSession, request_id: RequestId, mailbox: Mailbox) -> None:
        """Have what a node says of `request_id` delivered to `mailbox`; raises LostError if it has left."""
        session.begin(request_id, mailbox)
        self._exchanges.append((session, request_id))

    def end_all_but(self, kept: RequestId) -> None:
        """Let go of what all other exchanges hold: what was lent for a prompt that is computed."""
        for session, request_id in self._exchanges:
            if request_id != kept:
                session.end(request_id)

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.state.mailbox.close()
        if isinstance(error, EnoughError):
            self.state.stopped()
        for session, request_id in self._exchanges:
            session.end(request_id)
        if self.deadline is not None:
            self.deadline.cancel()
        if self.placed is not None:
            self._finished(self, error)
