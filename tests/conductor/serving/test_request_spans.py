"""The conductor's spans: one of each request, ended whatever ends it, and its name goes on to the nodes."""

import asyncio
import sys
from contextlib import aclosing
from dataclasses import replace

import pytest

from base.config import TracingConfig
from base.errors import ConfigError, LostError, UnavailableError
from base.messages import Prefill
from base.spans import tracer_or_none
from conductor.api.headers import header_traceparent
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.serving.request_spans import RequestSpans
from tests.conductor.dispatching import answer, conductor, request, until
from tests.conductor.placing.test_decisions import history
from tests.conductor.scripted_node import ScriptedWork
from tests.node.recorded_spans import RecordedTracer


async def play(take=10, silent_on=None):
    """Ask a node for three tokens and take so many; return the span, and what the node was asked."""
    tracer, work = RecordedTracer(), ScriptedWork(silent_on=silent_on)
    async with conductor(observers=[RequestSpans(tracer)]) as running:
        await running.attach(work, node_id="a")
        asked = request(traceparent="client")
        if silent_on is not None:
            asking = asyncio.ensure_future(answer(running.dispatcher, asked))
            await until(lambda: any(isinstance(item, silent_on) for item in work.received))
            running.clients["a"].cancel()
            with pytest.raises((LostError, UnavailableError)):
                await asking
        else:
            async with aclosing(running.dispatcher.generate(asked)) as pieces:
                async for _ in pieces:
                    take -= 1
                    if not take:
                        break
    [span] = tracer.spans
    return span, next(item for item in work.received if isinstance(item, Prefill))


async def test_a_request_is_a_span_below_its_clients():
    span, asked = await play()
    assert (span.name, span.parent, span.ended) == ("request", "client", "")
    assert span.told == {"request_id": "r", "prompt_tokens": 20, "outcome": "length", "tokens": 3}
    assert [name for name, _ in span.events] == ["placed", "first token"]
    assert asked.work.traceparent == span.traceparent, "its name goes on to the nodes"


async def test_a_request_that_fails_says_how():
    span, _ = await play(silent_on=Prefill)
    assert "no prefill node" in span.ended
    assert span.told["outcome"] == "UnavailableError"


async def test_a_client_that_leaves_ends_the_span():
    span, _ = await play(take=1)
    assert (span.ended, span.told["outcome"], span.told["tokens"]) == ("", "cancelled", 1)


def test_decisions_are_noted_in_the_span_of_their_request():
    tracer = RecordedTracer()
    spans = RequestSpans(tracer)
    made = history(2, SchedulerSettings())
    for each in made:
        name = each.asked.request_id
        assert spans.begun(request(request_id=name)) == tracer.spans[-1].traceparent
        spans.decided(each._replace(asked=replace(each.asked, request_id=f"{name}.1")))
    noted = [span.events[0] for span in tracer.spans]
    assert {name for name, _ in noted} == {"placed", "refused"}
    spans.decided(made[0]._replace(asked=replace(made[0].asked, request_id="forgotten.1")))


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
