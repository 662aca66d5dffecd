"""A simulated node and a request on its way through it.

Every node has both halves, as a live one does: a prefill queue with a cache in host
memory, and a decode batch. Which of them gets work is the view's business.
"""

from __future__ import annotations

from collections import deque

from base.request import NodeId, RequestId
from conductor.placement import Placement
from conductor.replay.block_cache import Cache
from conductor.replay.decode_node import DecodeNode
from conductor.replay.links import Flow, Link
from conductor.replay.outcome import Segment
from conductor.replay.trace import TraceRequest


class SimRequest:
    """One request on its way, through one attempt or several."""

    __slots__ = (
        "arrival_s",
        "attempt",
        "chain",
        "fetching",
        "first_token_s",
        "flow",
        "gaps",
        "last_token_s",
        "next_turn",
        "num_tokens",
        "number",
        "output_tokens",
        "placement",
        "prefill_s",
        "prefix_tokens",
        "prompt_tokens",
        "request_id",
        "started_at_s",
        "tokens_left",
        "waits_for",
    )

    def __init__(self, row: TraceRequest, number: int, output_limit: int | None) -> None:
        self.arrival_s, self.prompt_tokens, output_tokens, self.chain, self.next_turn = row
        if output_limit is not None and output_limit < output_tokens:
            output_tokens = output_limit
        self.number = number
        self.attempt = 0
        self.request_id = RequestId(str(number))
        """Of the present attempt."""
        self.num_tokens = self.prompt_tokens
        """To have in the cache before the next token: the prompt, and after a fault what came of it."""
        self.output_tokens = self.tokens_left = output_tokens
        self.placement: Placement
        self.flow: Flow | None = None
        self.fetching = False
        self.waits_for = 0
        self.started_at_s = 0.0
        self.prefill_s = 0.0
        self.prefix_tokens = 0
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.gaps: list[Segment] = []

    def begin_again(self) -> None:
        """Become another attempt, which has yet to be placed."""
        self.attempt += 1
        self.request_id = RequestId(f"{self.number}.{self.attempt}")
        self.fetching = False


class SimNode:
    """A prefill queue in order of arrival, one prompt at a time; a cache; a decode batch; a link."""

    __slots__ = (
        "busy_s",
        "cache",
        "decode",
        "epoch",
        "free_at_s",
        "next_event",
        "node_id",
        "queue",
        "receives",
        "running",
        "sends",
    )

    def __init__(
        self,
        node_id: NodeId,
        cache: Cache,
        decode: DecodeNode[SimRequest],
        link_rate: float,
        stages: int = 1,
    ) -> None:
        self.node_id = node_id
        self.cache = cache
        self.decode = decode
        self.queue: deque[SimRequest] = deque()
        self.running: SimRequest | None = None
        """In the first stage."""
        self.free_at_s = [0.0] * stages if stages > 1 else []
        """When each stage of a pipelined group is free."""
        self.sends = Link(link_rate)
        self.receives = Link(link_rate)
        self.busy_s = 0.0
        self.epoch = 1
        self.next_event = 1

    def take_ready(self) -> SimRequest | None:
        """Return and dequeue the first request whose blocks have come."""
        queue = self.queue
        if not queue[0].fetching:
            return queue.popleft()
        for at, request in enumerate(queue):
            if not request.fetching:
                del queue[at]
                return request
        return None
