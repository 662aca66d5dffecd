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
from base.spans import Attribute, TracingConfig

MAX_WAITING = 4096
SEND_TIMEOUT_S = 2.0
_W3C = TraceContextTextMapPropagator()


class OtlpSpan:
    """One span; see `base.spans.Span`."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, trace.set_span_in_context(span))
        self.traceparent = carrier.get("traceparent", "")

    def event(self, name: str, **attributes: Attribute) -> None:
        self._span.add_event(name, attributes)

    def end(self, error: str = "", **attributes: Attribute) -> None:
        if self._span.is_recording():
            self._span.set_attributes(attributes)
            if error:
                self._span.set_status(Status(StatusCode.ERROR, error))
            self._span.end()


class OtlpTracer:
    """Belongs to one process; see `base.spans.Tracer`."""

    def __init__(self, config: TracingConfig, process: str) -> None:
        resource = Resource.create({"service.name": "conductor", "service.instance.id": process})
        sampler = ParentBased(TraceIdRatioBased(config.sample))
        self._provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(config.endpoint, timeout=SEND_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_WAITING))
        self._tracer = self._provider.get_tracer("conductor")

    def begin(self, name: str, parent: str, **attributes: Attribute) -> OtlpSpan:
        context = _W3C.extract({"traceparent": parent}) if parent else None
        return OtlpSpan(self._tracer.start_span(name, context, attributes=attributes))

    def past(self, name: str, parent: str, began_ago_s: float, ended_ago_s: float) -> None:
        now_ns = int(wall_clock_s() * 1e9)
        context = _W3C.extract({"traceparent": parent})
        span = self._tracer.start_span(name, context, start_time=now_ns - int(began_ago_s * 1e9))
        span.end(now_ns - int(ended_ago_s * 1e9))

    def close(self) -> None:
        self._provider.shutdown()
