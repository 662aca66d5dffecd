"""A node's spans, made by observers of its messages and transfers.

    prefill      Prefill to Prefilled; below it, from the times it reports: queue, compute, exposed transfer
      transfer   each batch, read or written, with the transport that carried it
    decode       Start, or Prefilled of a sequence that stays, to the last Tokens
    receive      Reserve to Start: blocks are set aside and their KV arrives

They are below the conductor's span of the request, whose name comes with the work. The roles know
nothing of spans: where tracing is off nothing of this file runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from base.attach import MessageObserver
from base.grants import Grant
from base.messages import (
    Failed,
    FromNode,
    Granted,
    Prefill,
    Prefilled,
    Release,
    Reserve,
    Start,
    Tokens,
    ToNode,
)
from base.request import RequestId
from transfer.transport import TransferFacts, TransferObserver

if TYPE_CHECKING:
    from base.tracing import Span, Tracer


class NodeTracing:
    """The tracing of one node; without a tracer, nobody is notified of anything."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer
        self._conductors: list[WorkSpans] = []

    def messages(self) -> Sequence[MessageObserver]:
        """Return the observers of one more conductor's messages: its spans end with its stream."""
        spans = [] if self._tracer is None else [WorkSpans(self._tracer)]
        self._conductors += spans
        return spans

    def transfers(self) -> list[TransferObserver]:
        """Return the observers of transfers."""
        return [] if self._tracer is None else [TransferSpans(self._below, self._tracer)]

    def _below(self, grant: Grant) -> str:
        return next(filter(None, (spans.below(grant) for spans in self._conductors)), "")

    async def close(self) -> None:
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)


class WorkSpans(MessageObserver):
    """The spans of the requests that one node works on for one conductor. Belongs to the event loop."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[RequestId, Span] = {}
        self._parents: dict[RequestId, str] = {}
        """The conductor's span, of requests that are reserved or to stay."""
        self._by_grant: dict[int, str] = {}
        """The prefill's span, by the generation of each grant that it may use."""
        self._grants: dict[RequestId, tuple[int, ...]] = {}

    def received(self, items: Sequence[ToNode]) -> None:
        for item in items:
            match item:
                case Reserve(work) if work.traceparent:
                    self._forget(work.request_id, "begun again")
                    self._parents[work.request_id] = work.traceparent
                    self._begin("receive", work.request_id, work.traceparent)
                case Prefill() if item.work.traceparent:
                    self._begin_prefill(item)
                case Granted(grant=Grant() as grant) if item.request_id in self._spans:
                    self._moves(item.request_id, grant)
                case Start(request_id) if request_id in self._parents:
                    self._end(request_id)
                    self._begin("decode", request_id, self._parents[request_id])
                case Release(request_id):
                    self._forget(request_id, "released")

    def sent(self, item: FromNode) -> None:
        if item.request_id not in self._spans:
            return
        match item:
            case Prefilled():
                self._prefilled(item)
            case Failed():
                self._forget(item.request_id, f"{item.reason}: {item.message}")
            case Tokens(finish_reason=reason) if reason is not None:
                self._forget(item.request_id, "")

    def lost(self) -> None:
        for request_id in list(self._spans):
            self._forget(request_id, "the conductor was lost")

    def below(self, grant: Grant) -> str:
        """Return the span that a transfer under `grant` is part of; empty: none."""
        return self._by_grant.get(grant.generation, "")

    def _begin_prefill(self, item: Prefill) -> None:
        request_id = item.work.request_id
        self._forget(request_id, "begun again")
        self._begin("prefill", request_id, item.work.traceparent)
        if item.stays:
            self._parents[request_id] = item.work.traceparent
        if item.source is not None:
            self._moves(request_id, item.source.grant)

    def _moves(self, request_id: RequestId, grant: Grant) -> None:
        """Note a grant that the prefill of a request may use."""
        self._grants[request_id] = (*self._grants.get(request_id, ()), grant.generation)
        self._by_grant[grant.generation] = self._spans[request_id].traceparent

    def _prefilled(self, item: Prefilled) -> None:
        below, times = self._spans[item.request_id].traceparent, item.times
        computed_ago_s = times.exposed_transfer_s
        started_ago_s = computed_ago_s + times.compute_s
        self._tracer.past("queue", below, started_ago_s + times.queue_s, started_ago_s)
        self._tracer.past("compute", below, started_ago_s, computed_ago_s)
        self._tracer.past("exposed transfer", below, computed_ago_s, 0.0)
        self._spans[item.request_id].event("prefilled", cached_tokens=item.num_cached_tokens)
        parent = self._parents.get(item.request_id)
        self._forget(item.request_id, "")
        if item.stays and parent is not None:
            self._begin("decode", item.request_id, parent)

    def _begin(self, name: str, request_id: RequestId, parent: str) -> None:
        self._spans[request_id] = self._tracer.begin(name, parent, request_id=request_id)

    def _end(self, request_id: RequestId, error: str = "") -> None:
        span = self._spans.pop(request_id, None)
        if span is not None:
            span.end(error)

    def _forget(self, request_id: RequestId, error: str) -> None:
        self._end(request_id, error)
        self._parents.pop(request_id, None)
        for generation in self._grants.pop(request_id, ()):
            self._by_grant.pop(generation, None)


class TransferSpans(TransferObserver):
    """Makes batches spans of the prefill that they are for."""

    def __init__(self, below: Callable[[Grant], str], tracer: Tracer) -> None:
        """`below`: returns the span that a transfer under a grant is part of; empty: none."""
        self._below = below
        self._tracer = tracer
        self._spans: dict[TransferFacts, Span] = {}

    def begun(self, batch: TransferFacts) -> None:
        if below := self._below(batch.grant):
            self._spans[batch] = self._tracer.begin(
                "transfer",
                below,
                transport=batch.transport,
                operation=batch.grant.operation.name.lower(),
                peer=batch.peer,
                bytes=batch.num_bytes,
            )

    def ended(self, batch: TransferFacts, seconds: float, error: BaseException | None) -> None:
        span = self._spans.pop(batch, None)
        if span is not None:
            span.end("" if error is None else f"{type(error).__name__}: {error}")
