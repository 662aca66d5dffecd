"""What a node's messages and transfers become as spans: every one is ended, once, under the right one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from base.errors import TransferFailedError
from base.messages import Failed, Granted, Prefill, Prefilled, PrefillTimes, Release, Reserve, Start, Tokens
from base.metrics import NodeMetrics, process_registry, samples_of
from base.metrics import exposition as text_of
from base.request import FinishReason, SampledToken
from node.metrics import TransferMetrics
from node.tracing import NodeTracing, TransferSpans, WorkSpans
from tests.manual_clock import ManualClock
from tests.node.recorded_spans import RecordedTracer
from tests.node_parts import work
from tests.transfer.test_router import GRANT, PEER, PIECES, Stub
from transfer.batch import Priority
from transfer.router import Router

TOKEN = SampledToken(1)


def traced(name="r", parent="client"):
    return work(name=name)._replace(traceparent=parent)


def prefill(name="r", parent="client"):
    return Prefill(traced(name, parent))


def to_write(name="r"):
    return Granted(name, 0, PEER, GRANT)


def prefilled(name="r"):
    return Prefilled(name, TOKEN, None, 16, (), PrefillTimes(0.5, 2.0, 0.25))


def test_a_prefill_is_a_span_with_its_parts_below_it():
    tracer = RecordedTracer()
    spans = WorkSpans(tracer)
    spans.received([prefill()])
    spans.received([to_write()])
    assert spans.below(GRANT) == tracer.one("prefill").traceparent
    spans.sent(prefilled())
    spans.received([Release("r")])
    span = tracer.one("prefill")
    assert (span.parent, span.ended) == ("client", "")
    assert tracer.past_spans == [
        ("queue", span.traceparent, 0.5),
        ("compute", span.traceparent, 2.0),
        ("exposed transfer", span.traceparent, 0.25),
    ]
    assert spans.below(GRANT) == ""


def test_decoding_is_receiving_and_then_generating():
    tracer = RecordedTracer()
    spans = WorkSpans(tracer)
    spans.received([Reserve(traced())])
    assert tracer.open == ["receive"]
    spans.received([Start("r", 1, ())])
    assert tracer.open == ["decode"]
    spans.sent(Tokens("r", (TOKEN,), None))
    assert tracer.open == ["decode"]
    spans.sent(Tokens("r", (TOKEN,), FinishReason.LENGTH))
    spans.received([Release("r")])
    assert [(span.name, span.parent, span.ended) for span in tracer.spans] == [
        ("receive", "client", ""),
        ("decode", "client", ""),
    ]


def test_what_goes_wrong_is_told():
    tracer = RecordedTracer()
    spans = WorkSpans(tracer)
    spans.received([prefill("a"), Reserve(traced("b")), Reserve(traced("c"))])
    spans.sent(Failed("a", "LostError", "gone"))
    spans.received([Release("b")])
    spans.lost()
    assert [span.ended for span in tracer.spans] == ["LostError: gone", "released", "the conductor was lost"]


def test_work_that_nobody_traces_makes_no_span():
    tracer = RecordedTracer()
    spans = WorkSpans(tracer)
    spans.received([prefill(parent=""), Reserve(traced("b", "")), Start("b", 1, ()), Release("b")])
    spans.sent(prefilled())
    assert tracer.spans == []


NAMES = st.sampled_from("ab")
MESSAGES = st.one_of(
    st.builds(prefill, NAMES),
    st.builds(lambda name: Reserve(traced(name)), NAMES),
    st.builds(lambda name: Start(name, 1, ()), NAMES),
    st.builds(Release, NAMES),
    st.builds(prefilled, NAMES),
    st.builds(
        lambda name, end: Tokens(name, (TOKEN,), end), NAMES, st.sampled_from([None, FinishReason.STOP])
    ),
    st.builds(lambda name: Failed(name, "LostError", ""), NAMES),
)


@given(st.lists(MESSAGES, max_size=12))
def test_no_order_of_messages_leaves_a_span_open_or_ends_one_twice(messages):
    tracer = RecordedTracer()
    spans = WorkSpans(tracer)
    for message in messages:
        if isinstance(message, Prefill | Reserve | Start | Release):
            spans.received([message])
        else:
            spans.sent(message)
    spans.lost()
    assert tracer.open == []
    assert spans.below(GRANT) == ""


@pytest.mark.parametrize("error", [None, TransferFailedError("cut")])
async def test_a_transfer_is_counted_and_is_a_span_of_its_prefill(error):
    clock, tracer, registry = ManualClock(), RecordedTracer(), process_registry()
    spans = WorkSpans(tracer)
    stub = Stub("shm", clock, seconds=0.5)
    stub.error = error
    observers = [TransferMetrics(NodeMetrics(registry)), TransferSpans(spans.below, tracer)]
    router = Router([stub], clock, observers=observers)
    spans.received([prefill(), to_write()])
    for _ in range(2):
        if error is None:
            await router.move(PEER, GRANT, PIECES, Priority.FOREGROUND)
        else:
            with pytest.raises(TransferFailedError):
                await router.move(PEER, GRANT, PIECES, Priority.FOREGROUND)
    transfers = [span for span in tracer.spans if span.name == "transfer"]
    assert {span.parent for span in transfers} == {tracer.one("prefill").traceparent}
    assert {span.ended for span in transfers} == {"" if error is None else "TransferFailedError: cut"}
    assert transfers[0].told == {
        "transport": "shm",
        "operation": "write",
        "peer": "peer",
        "bytes": PIECES.num_bytes,
    }
    counted = {
        name: value
        for name, labels, value in samples_of(text_of(registry).decode())
        if labels.get("transport")
    }
    assert counted["transfer_bytes_total"] == (2 * PIECES.num_bytes if error is None else 0)
    assert counted["transfer_failures_total"] == (0 if error is None else 2)
    assert counted["transfer_seconds_count"] == (2 if error is None else 0)
    if error is None:
        assert counted["transfer_link_bytes_per_second"] == PIECES.num_bytes / 0.5


async def test_where_nothing_is_traced_nobody_is_notified():
    tracing = NodeTracing(None)
    assert tracing.transfers() == tracing.messages() == []
    await tracing.close()
