"""`conductor top`: what it draws of a cluster with ten minutes behind it, and what it asks for."""

import asyncio
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import nan

import pytest
from rich.console import Console

from deploy import cli
from deploy.top import Recent, bottleneck, budgets, screen, sparkline
from tests.conductor.api.shown import HOSTILE, ShownCluster

MARKUP = "[bold]no[/nothing]"


@pytest.fixture(scope="module")
def cluster():
    return ShownCluster(seconds=700).keeps_moving()


@pytest.fixture(scope="module")
def server(cluster):
    """Answers as a conductor does, and keeps what it was asked."""

    class Answers(BaseHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

        def do_GET(self):
            server.asked.append(self.path)
            told = asyncio.run(cluster.data.answer(self.path.removeprefix("/v1/page/")))
            body = told if isinstance(told, bytes) else json.dumps(told).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def address(server):
    server.asked.clear()
    return f"127.0.0.1:{server.server_address[1]}"


@pytest.mark.parametrize("period", ["nan", "inf", "1e10", "-1"])
def test_a_period_that_nobody_can_wait_for_is_refused_before_the_first_look(address, server, period):
    with pytest.raises(SystemExit) as caught:
        cli.main(["top", "--times", "2", "--period", period, "--address", address])
    assert (caught.value.code, server.asked) == (2, [])


def test_top_shows_history_budgets_the_slowest_and_kv_on_its_way(address, server, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["top", "--times", "2", "--period", "0", "--address", address])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert said.endswith("\n"), "whatever comes next has a line of its own"
    for words in (
        "ready",
        "in bounds/s",
        "TTFT p99",
        "prefill-1",
        "The bottleneck is decode-",
        "budgets",
        "slowest first tokens",
        "KV on its way",
    ):
        assert words in said
    assert "▁" in said
    hours = [path for path in server.asked if "hour" in path]
    assert hours[0] == "/v1/page/hour"
    assert hours[1].startswith("/v1/page/hour."), "of the history only what is new"


def test_a_second_look_adds_rows(address):
    recent = Recent()
    first = recent.look(address)
    assert len(recent.columns["good"]) == 600
    again = recent.look(address)
    assert (again["first"], again["next"]) == (first["next"], first["next"])
    assert len(recent.columns["good"]) == 600


def test_names_are_text_and_no_markup(address, cluster):
    recent = Recent()
    about = recent.look(address)
    now = json.loads(asyncio.run(cluster.data.answer("now")))
    now["nodes"][0][0] = MARKUP
    row = {"request_id": HOSTILE, "age_s": 100.0, "ttft_s": 3.0, "ttft_slo_s": 2.0, "predicted_ttft_s": 1.0}
    slowest = [{**row, "prefill_node": MARKUP, "decode_node": "d"}]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(screen(about, recent, now, slowest))
    said = console.export_text()
    assert said.count(MARKUP) == 3, "as the bottleneck, in its row, and of a request"
    assert HOSTILE in said
    assert "3 s late" in said


def test_a_sparkline_begins_at_nought_and_leaves_gaps():
    assert sparkline([0.0, 4.0, 8.0, nan], 4) == "▁▅█ "
    assert sparkline([1.0] * 100, 10) == "█" * 10
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline([1.0] * 599, 60)) == 60


def test_the_bottleneck_is_what_requests_lacked_else_the_fullest():
    node = {"id": "d0", "queue_s": None, "step_s": None, "held": 9, "blocks": 10}
    limits = {"queue_s": None, "step_least_s": 0.03, "step_s": None}
    lacked = {"came": 200, "prefill": 1, "decode": 0, "speed": 0}
    assert bottleneck([node], limits, lacked).plain == "The bottleneck is d0, 90% of its KV."
    idle = bottleneck([node | {"held": 1}], limits, lacked | {"speed": 8}).plain
    assert idle == "Nothing is tight: the fullest is d0, 10% of its KV; 4% would have been late on any node."
    short = bottleneck([node], limits, lacked | {"prefill": 30}).plain
    assert short == "The bottleneck is prefill: 15% of the last minute's requests lacked it."
    assert bottleneck([node | {"held": None}], limits, lacked | {"came": 0, "prefill": 0}).plain.startswith(
        "No node"
    )


def test_budgets_are_of_the_bounds_that_there_are():
    node = {"queue_s": 1.0, "step_s": None, "held": 9, "blocks": 10}
    unbounded = {"queue_s": None, "step_least_s": 0.03, "step_s": None}
    assert budgets(node, unbounded | {"queue_s": 2.0}) == [("KV", 0.9), ("queue", 0.5)]
    assert budgets(node | {"held": None}, unbounded | {"step_s": 0.1}) == []
    decoding = {"queue_s": None, "step_s": 0.04, "held": None}
    assert budgets(decoding, unbounded | {"step_s": 0.08}) == [("step", pytest.approx(0.2))]
    assert budgets(decoding | {"step_s": 0.02}, unbounded | {"step_s": 0.08}) == [("step", 0.0)]
