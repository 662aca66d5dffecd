"""The conductor's spans: one of each request, ended whatever ends it, and its name goes on to the nodes."""

import sys
from contextlib import aclosing

import pytest

from base.errors import ConfigError, LostError
from base.request import FinishReason, Request, SampledToken, SamplingParams, StopParams
from base.spans import TracingConfig, tracer_or_none
from conductor.api.headers import header_traceparent
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.serving.generated import Generated
from conductor.serving.traced import RequestSpans, TracedDispatcher, TracedObserver
from tests.conductor.dispatching import Watched
from tests.conductor.fakes import ScriptedDispatcher
from tests.conductor.placing.test_decisions import history
from tests.node.recorded_spans import RecordedTracer

TOKEN = Generated((SampledToken(1),), None, 0)
LAST = Generated((SampledToken(2),), FinishReason.LENGTH, 0)


def asked(name="r"):
    return Request(name, (1, 2, 3), SamplingParams(), StopParams(5), traceparent="client")


async def play(*script, take=10):
    tracer = RecordedTracer()
    inner = ScriptedDispatcher(lambda _: script)
    dispatcher = TracedDispatcher(inner, RequestSpans(tracer))
    try:
        async with aclosing(dispatcher.generate(asked())) as pieces:
            async for _ in pieces:
                take -= 1
                if not take:
                    break
    except LostError:
        pass
    [span] = tracer.spans
    [handed_on] = inner.requests
    assert handed_on.traceparent == span.traceparent
    return span


async def test_a_request_is_a_span_below_its_clients():
    span = await play(TOKEN, LAST)
    assert (span.name, span.parent, span.ended) == ("request", "client", "")
    assert span.told == {"request_id": "r", "prompt_tokens": 3, "outcome": "length", "tokens": 2}
    assert [name for name, _ in span.events] == ["first token"]


async def test_a_request_that_fails_says_how():
    span = await play(TOKEN, LostError("the node is gone"))
    assert span.ended == "the node is gone"
    assert span.told["outcome"] == "LostError"


async def test_a_client_that_leaves_ends_the_span():
    span = await play(TOKEN, TOKEN, LAST, take=1)
    assert (span.ended, span.told["outcome"], span.told["tokens"]) == ("", "cancelled", 1)


def test_decisions_are_noted_in_the_span_of_their_request():
    tracer, inner = RecordedTracer(), Watched()
    spans = RequestSpans(tracer)
    observer = TracedObserver(inner, spans)
    made = history(2, SchedulerSettings())
    for each in made:
        name = each.asked.request_id
        spans.begin(asked(name))
        observer.decided(each._replace(asked=each.asked._replace(request_id=f"{name}.1")))
    assert len(inner.made) == len(made), "the inner observer was told too"
    noted = [span.events[0] for span in tracer.spans]
    assert {name for name, _ in noted} == {"placed", "refused"}
    observer.decided(made[0]._replace(asked=made[0].asked._replace(request_id="forgotten.1")))
    assert observer.ended == inner.ended


W3C = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("text", "taken"), [(W3C, W3C), (W3C.upper(), ""), (W3C + "-x", ""), ("", ""), ("x" * 9000, "")]
)
def test_a_header_that_is_no_span_is_none(text, taken):
    assert header_traceparent({"traceparent": text} if text else {}) == taken


def test_without_an_endpoint_there_is_no_tracer():
    assert tracer_or_none(TracingConfig(), "p") is None


def test_without_opentelemetry_an_endpoint_is_a_wrong_configuration(monkeypatch):
    monkeypatch.setitem(sys.modules, "base.tracing", None)
    with pytest.raises(ConfigError, match="tracing"):
        tracer_or_none(TracingConfig("http://127.0.0.1:1"), "p")


@pytest.mark.full
def test_a_collector_that_is_not_there_holds_up_nobody():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="OpenTelemetry is not installed")
    tracer = tracer_or_none(TracingConfig("http://127.0.0.1:1"), "p")
    span = tracer.begin("request", W3C, tokens=1)
    assert span.traceparent.split("-")[1] == W3C.split("-")[1]
    span.end()
    span.end()
    tracer.close()


def test_what_the_client_does_not_trace_is_not_traced():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="OpenTelemetry is not installed")
    tracer = tracer_or_none(TracingConfig("http://127.0.0.1:1"), "p")
    assert tracer.begin("request", W3C.removesuffix("01") + "00").traceparent.endswith("-00")
    never = tracer_or_none(TracingConfig("http://127.0.0.1:1", sample=0.0), "p")
    flags = never.begin("request", "").traceparent.rpartition("-")[2]
    assert not int(flags, 16) & 1, "W3C's bit for a sampled trace"
    tracer.close()
    never.close()
