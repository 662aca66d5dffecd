"""Spans sent to an OTLP collector, by gRPC. The one door to OpenTelemetry; imported by `base/spans.py`.

Spans are handed to a thread that sends them in batches; when more wait than `MAX_WAITING`, the
newest are dropped: a collector that is slow or gone costs traces, and no request anything. Moments
are the library's wall clock, because processes of several hosts meet in one trace.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from base.clock import wall_clock_s
from base.config import TracingConfig

Attribute = str | int | float | bool
MAX_WAITING = 4096
SEND_TIMEOUT_S = 2.0
_W3C = TraceContextTextMapPropagator()


class Span:
    """Something that is going on, for one request."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, trace.set_span_in_context(span))
        self.traceparent = carrier.get("traceparent", "")
        """The line of text by which spans below this one are begun, here or elsewhere."""

    def event(self, name: str, **attributes: Attribute) -> None:
        """Note a moment in it."""
        self._span.add_event(name, attributes)

    def end(self, error: str = "", **attributes: Attribute) -> None:
        """End the span; again: no effect. `error`: why it failed."""
        if self._span.is_recording():
            self._span.set_attributes(attributes)
            if error:
                self._span.set_status(Status(StatusCode.ERROR, error))
            self._span.end()


class Tracer:
    """Where one process begins its spans."""

    def __init__(self, config: TracingConfig, process: str) -> None:
        resource = Resource.create({"service.name": "conductor", "service.instance.id": process})
        sampler = ParentBased(TraceIdRatioBased(config.sample))
        self._provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(config.endpoint, timeout=SEND_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_WAITING))
        self._tracer = self._provider.get_tracer("conductor")

    def begin(self, name: str, parent: str, **attributes: Attribute) -> Span:
        """Begin a span below `parent`; an empty one begins a trace."""
        context = _W3C.extract({"traceparent": parent}) if parent else None
        return Span(self._tracer.start_span(name, context, attributes=attributes))

    def past(self, name: str, parent: str, began_ago_s: float, ended_ago_s: float) -> None:
        """Note a span that is over, by how long ago it began and ended."""
        now_ns = int(wall_clock_s() * 1e9)
        context = _W3C.extract({"traceparent": parent})
        span = self._tracer.start_span(name, context, start_time=now_ns - int(began_ago_s * 1e9))
        span.end(now_ns - int(ended_ago_s * 1e9))

    def close(self) -> None:
        """Send what is not yet sent. Blocks, two seconds at most where nobody answers."""
        self._provider.shutdown()
