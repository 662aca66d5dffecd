"""One trace for each request, across all processes, at a collector that is a server of this test."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Condition

import grpc
import httpx
import pytest

from base.config import TracingConfig
from protos.inference_pb2_grpc import InferenceStub
from tests.cluster.asking import PATIENCE_S, generate_request
from tests.cluster.conftest import running

service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc", reason="OpenTelemetry is not installed"
)
answers = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = list(range(700, 880))


class Collector(service.TraceServiceServicer):
    """Keeps every span that it is sent, with the process that made it."""

    def __init__(self):
        self.spans = []
        self.changed = Condition()

    def Export(self, request, context):  # noqa: N802
        with self.changed:
            for of_process in request.resource_spans:
                told = {item.key: item.value.string_value for item in of_process.resource.attributes}
                for scope in of_process.scope_spans:
                    self.spans += [(told["service.instance.id"], span) for span in scope.spans]
            self.changed.notify_all()
        return answers.ExportTraceServiceResponse()

    def trace(self, trace_id, *names):
        """Return a trace's spans by name, when all of `names` are there."""

        def found():
            return {
                span.name: (process, span) for process, span in self.spans if span.trace_id.hex() == trace_id
            }

        with self.changed:
            assert self.changed.wait_for(lambda: found().keys() >= set(names), PATIENCE_S), found().keys()
            return found()


@contextmanager
def collecting():
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


NAMES = ("request", "prefill", "queue", "compute", "transfer", "receive", "decode")


def check_one_trace(spans, parent):
    """Every process has its part, below the client's span, and each inside the one above it."""
    where = {name: process for name, (process, _) in spans.items()}
    assert where["request"] == "conductor"
    assert {where[name] for name in ("prefill", "queue", "compute", "transfer")} == {"prefill-0"}
    assert {where[name] for name in ("receive", "decode")} == {"decode-0"}
    above = {name: span.parent_span_id.hex() for name, (_, span) in spans.items()}
    name_of = {span.span_id.hex(): name for name, (_, span) in spans.items()}
    assert above["request"] == parent
    for name in ("prefill", "receive", "decode"):
        assert name_of[above[name]] == "request"
    for name in ("queue", "compute", "transfer"):
        assert name_of[above[name]] == "prefill"
    for _, span in spans.values():
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.status.code == 0, span.status.message


def test_a_request_is_one_trace_over_http_and_grpc(smollm2, tmp_path):
    with (
        collecting() as (collector, endpoint),
        running(smollm2, tmp_path, tracing=TracingConfig(endpoint)) as cluster,
    ):
        asked = httpx.post(
            f"{cluster.url}/v1/completions",
            json={"model": "smollm2", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True},
            headers={"traceparent": f"00-{TRACE}-{SPAN}-01"},
            timeout=PATIENCE_S,
        )
        assert asked.status_code == 200, asked.text
        spans = collector.trace(TRACE, *NAMES)
        check_one_trace(spans, SPAN)
        _, request = spans["request"]
        assert [event.name for event in request.events] == ["placed", "first token"]
        told = {item.key: item.value for item in spans["transfer"][1].attributes}
        assert told["transport"].string_value == "shm"
        assert told["bytes"].int_value > 0

        other = TRACE[::-1]
        with grpc.insecure_channel(cluster.grpc_address) as channel:
            request = generate_request(PROMPT[::-1], 4)
            list(
                InferenceStub(channel).Generate(
                    request, timeout=PATIENCE_S, metadata=(("traceparent", f"00-{other}-{SPAN}-01"),)
                )
            )
        check_one_trace(collector.trace(other, *NAMES), SPAN)

        # A client that says it is not traced is not.
        quiet = "1" * 32
        httpx.post(
            f"{cluster.url}/v1/completions",
            json={"model": "smollm2", "prompt": PROMPT, "max_tokens": 2},
            headers={"traceparent": f"00-{quiet}-{SPAN}-00"},
            timeout=PATIENCE_S,
        )
    assert quiet not in {span.trace_id.hex() for _, span in collector.spans}, "sent when the cluster ended"
