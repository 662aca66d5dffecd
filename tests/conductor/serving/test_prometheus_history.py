"""The history that a Prometheus has: one query a span, rows as the conductor's own, problems in words."""

import base64
import json
import math
import threading
from array import array
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from base.errors import UnavailableError
from conductor.serving.history import CLUSTER_SERIES
from conductor.serving.prometheus_history import KEPT_S, QUERIES, SPANS, PrometheusHistory
from tests.manual_clock import ManualClock

NOW_S = 1_790_000_000.0


@pytest.fixture
def prometheus():
    """Answers each query with `answer`, and keeps what it was asked."""

    class Answers(BaseHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

        def do_GET(self):
            server.asked.append(parse_qs(urlsplit(self.path).query))
            body = server.answer if isinstance(server.answer, bytes) else json.dumps(server.answer).encode()
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.asked, server.answer, server.status = [], {"data": {"result": []}}, 200
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def history_of(server, clock=None):
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    return PrometheusHistory(address, clock or ManualClock(), lambda: NOW_S)


async def test_an_hour_is_one_query_and_its_rows_are_numbered_as_our_own(prometheus):
    end = int(NOW_S) // 15 * 15
    values = [[end - 30, "0.5"], [end, "0.25"], [end + 900, "9"]]
    prometheus.answer = {"data": {"result": [{"metric": {"series": "kv_held"}, "values": values}]}}
    told = await history_of(prometheus).rows("hour")
    assert (told["step_s"], told["first"], told["next"]) == (15, end // 15 - 239, end // 15 + 1)
    assert told["source"] == "prometheus"
    numbers = array("f", base64.b64decode(told["rows"]))
    column = numbers[told["names"].index("kv_held") :: len(told["names"])].tolist()
    assert (column[-3], column[-1], len(column)) == (0.5, 0.25, 240)
    assert math.isnan(column[-2])
    [asked] = prometheus.asked
    assert float(asked["start"][0]) == 15 * told["first"]
    assert all(f'"series", "{name}"' in asked["query"][0] for name in QUERIES)
    assert "$rate" not in asked["query"][0]


async def test_pages_that_ask_within_seconds_are_given_one_answer(prometheus):
    clock = ManualClock()
    history = history_of(prometheus, clock)
    first = await history.rows("hour")
    assert await history.rows("hour") is first
    assert len(prometheus.asked) == 1
    await history.rows("day")
    clock.advance(KEPT_S)
    await history.rows("hour")
    assert len(prometheus.asked) == 3


@pytest.mark.parametrize(
    ("status", "answer", "told"),
    [
        (503, {}, "status 503"),
        (200, b"<html>", "Expecting value"),
        (200, {"data": None}, "NoneType"),
        (200, {"data": {"result": [{"metric": {"series": "x"}, "values": []}]}}, "not in list"),
    ],
)
async def test_an_answer_that_is_none_is_told_as_a_problem(prometheus, status, answer, told):
    prometheus.status, prometheus.answer = status, answer
    with pytest.raises(UnavailableError, match=told):
        await history_of(prometheus).rows("hour")


def test_every_series_is_asked_for():
    assert set(CLUSTER_SERIES) == set(QUERIES)
    assert "request_tbt" in QUERIES["tbt_p99"], "of requests' means, as the conductor's own memory has it"
    assert set(SPANS) == {"hour", "day", "week"}
