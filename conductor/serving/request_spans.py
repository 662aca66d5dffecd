"""The conductor's spans: one of each request, in which everything else on it happens.

    request      arrival at the dispatcher to the last token; below the client's span, if it sent one
      events     placed (on which nodes), refused, first token

They are made by an observer of the dispatcher, which is there only where tracing is on. The dispatcher sends
the span's name on to the nodes with the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from base.messages import Prefilled
from base.request import Request, RequestId
from conductor.placing.decisions import Decision
from conductor.placing.placement import Placement, PlacementRequest
from conductor.serving.dispatch import RequestObserver

if TYPE_CHECKING:
    from base.tracing import Span, Tracer


class RequestSpans(RequestObserver):
    """The spans of the requests in progress, by their ids. Belongs to the event loop."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[RequestId, Span] = {}

    def begun(self, request: Request) -> str:
        span = self._spans[request.request_id] = self._tracer.begin(
            "request",
            request.traceparent,
            request_id=request.request_id,
            prompt_tokens=len(request.token_ids),
        )
        return span.traceparent

    def decided(self, made: Decision) -> None:
        span, result = self._of_attempt(made.asked.request_id), made.result
        if span is None:
            return
        if isinstance(result, Placement):
            span.event("placed", prefill=result.prefill_node, decode=result.decode_node)
        else:
            span.event("refused", reason=result.reason.value)

    def first_token(
        self, ttft_s: float | None, prefilled: Prefilled, asked: PlacementRequest, placement: Placement
    ) -> None:
        span = self._of_attempt(asked.request_id)
        if span is not None and ttft_s is not None:
            span.event("first token", cached_tokens=prefilled.num_cached_tokens)

    def finished(self, request_id: RequestId, num_tokens: int, outcome: str, reason: str) -> None:
        self._spans.pop(request_id).end(reason, outcome=outcome, tokens=num_tokens)

    def _of_attempt(self, attempt_id: RequestId) -> Span | None:
        return self._spans.get(RequestId(attempt_id.rpartition(".")[0]))
