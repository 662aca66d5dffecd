"""The panels of /ui: the queries of Grafana's dashboards, answered by the Prometheus that is named."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from conductor.api.panel_values import SHOWN_S, STEP_S, PanelValues
from conductor.api.panels import DASHBOARDS

NOW_S = 10_000.0
KV_BY_TRANSPORT = "conductor-transfer.0"


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


def panels_of(server):
    return PanelValues(f"http://127.0.0.1:{server.server_address[1]}/", lambda: NOW_S)


async def test_a_panel_has_a_line_for_each_series_with_its_labels_in_the_legend(prometheus):
    values = [[9_940, "1.5"], [9_970, "NaN"], [10_000, "2"]]
    prometheus.answer = {"data": {"result": [{"metric": {"transport": "shm"}, "values": values}]}}
    told = await panels_of(prometheus).values(KV_BY_TRANSPORT)
    assert told == {
        "series": [{"legend": "shm", "points": [(9_940.0, 1.5), (10_000.0, 2.0)]}],
        "problem": "",
    }
    [asked] = prometheus.asked
    assert asked["query"] == ["sum by (transport) (rate(transfer_bytes_total[2m]))"]
    assert [float(asked[key][0]) for key in ("start", "end", "step")] == [NOW_S - SHOWN_S, NOW_S, STEP_S]


@pytest.mark.parametrize(
    ("status", "answer", "told"),
    [(503, {}, "status 503"), (200, b"<html>", "Expecting value"), (200, {"data": None}, "NoneType")],
)
async def test_an_answer_that_is_none_is_told_as_a_problem(prometheus, status, answer, told):
    prometheus.status, prometheus.answer = status, answer
    found = await panels_of(prometheus).values(KV_BY_TRANSPORT)
    assert found["series"] == []
    assert told in found["problem"]


async def test_nobody_there_and_none_named_are_problems_too():
    gone = await PanelValues("http://127.0.0.1:1", lambda: NOW_S).values(KV_BY_TRANSPORT)
    assert "refused" in gone["problem"]
    none = await PanelValues("", lambda: NOW_S).values(KV_BY_TRANSPORT)
    assert none == {"series": [], "problem": "server.prometheus: not set"}


async def test_a_caller_names_a_panel_and_cannot_send_a_query(prometheus):
    panels = panels_of(prometheus)
    assert await panels.values("up") is None
    assert await panels.values("conductor-transfer.99") is None
    assert prometheus.asked == []


async def test_every_panel_of_every_dashboard_is_told_and_can_be_asked_for(prometheus):
    panels = panels_of(prometheus)
    told = panels.boards()
    assert told["has_values"]
    assert not PanelValues("", lambda: NOW_S).boards()["has_values"]
    names = [panel["name"] for board in told["boards"] for panel in board["panels"]]
    assert len(set(names)) == len(names) == sum(len(board.panels) for board in DASHBOARDS)
    for name in names:
        assert (await panels.values(name))["problem"] == ""
    asked = [query["query"][0] for query in prometheus.asked]
    shown = [query for board in told["boards"] for panel in board["panels"] for query in panel["queries"]]
    assert asked == [query.replace("$__rate_interval", "2m") for query in shown]
