"""The conductor's spans: one of each request, in which everything else on it happens.

    request      arrival at the dispatcher to the last token; below the client's span, if it told one
      events     placed (on which nodes), refused, first token

Put around the dispatcher and the observer where tracing is on, and not there where it is off.
The dispatcher hands the span's name on to the nodes with the request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from base.errors import ServeError
from base.request import Request, RequestId
from base.spans import Span, Tracer
from conductor.placing.decisions import Decision
from conductor.placing.placement import Placement
from conductor.serving.dispatch import RequestObserver
from conductor.serving.generated import Dispatcher, Generated


class RequestSpans:
    """The spans of the requests in progress, by their ids."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[RequestId, Span] = {}

    def begin(self, request: Request) -> Span:
        span = self._spans[request.request_id] = self._tracer.begin(
            "request",
            request.traceparent,
            request_id=request.request_id,
            prompt_tokens=len(request.token_ids),
        )
        return span

    def of_attempt(self, attempt_id: RequestId) -> Span | None:
        return self._spans.get(RequestId(attempt_id.rpartition(".")[0]))

    def forget(self, request_id: RequestId) -> None:
        del self._spans[request_id]


class TracedDispatcher:
    """A dispatcher whose requests are traced. Belongs to the event loop."""

    def __init__(self, inner: Dispatcher, spans: RequestSpans) -> None:
        self._inner = inner
        self._spans = spans

    @property
    def is_ready(self) -> bool:
        return self._inner.is_ready

    async def generate(self, request: Request) -> AsyncGenerator[Generated, None]:
        """Yield the request's tokens, as the dispatcher does."""
        span = self._spans.begin(request)
        outcome, error, num_tokens = "cancelled", "", 0
        try:
            asked = request._replace(traceparent=span.traceparent)
            async with aclosing(self._inner.generate(asked)) as pieces:
                async for piece in pieces:
                    if not num_tokens:
                        span.event("first token", cached_tokens=piece.num_cached_tokens)
                    num_tokens += len(piece.tokens)
                    if piece.finish_reason is not None:
                        outcome = piece.finish_reason.value
                    yield piece
        except ServeError as failed:
            outcome, error = type(failed).__name__, str(failed)
            raise
        finally:
            self._spans.forget(request.request_id)
            span.end(error, outcome=outcome, tokens=num_tokens)


class TracedObserver:
    """An observer that notes decisions in the spans of their requests too."""

    def __init__(self, inner: RequestObserver, spans: RequestSpans) -> None:
        self._inner = inner
        self._spans = spans
        self.first_token = inner.first_token
        self.next_tokens = inner.next_tokens
        self.ended = inner.ended

    def decided(self, made: Decision) -> None:
        self._inner.decided(made)
        span, result = self._spans.of_attempt(made.asked.request_id), made.result
        if span is None:
            return
        if isinstance(result, Placement):
            span.event("placed", prefill=result.prefill_node, decode=result.decode_node)
        else:
            span.event("refused", reason=result.reason.value)
