"""`conductor explain` against an HTTP server that answers as a conductor does."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from conductor.placing.decisions import Actual, decision
from conductor.placing.explain import Decisions
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import SchedulerSettings
from deploy.api_client import ApiError
from deploy.explain import main
from tests.conductor.builders import make_cost, make_request, make_view


@pytest.fixture
def address():
    cost = make_cost()
    view = make_view(2, 1, cost)
    view.prefill_order.set(0, 1.5)
    request = make_request("mine-0a.1")
    kept = Decisions(cost, SchedulerSettings())
    vector = make_request("vector-0a.1", max_tokens=0)
    for asked in (request, vector):
        kept.decided(decision(asked, view, place(asked, view, cost, 0.0), 0.0, 0.0))
    kept.ended(request.request_id, Actual(3.0, "finished", 0.5, 0.0, 0.4, 0.01, 0.03, 0, 7))

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            told = kept.explain(self.path.rpartition("/")[2])
            self.send_response(404 if told is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(told or {"error": {"message": "not remembered"}}).encode())

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_explanation_shows_the_choice_its_terms_and_what_came(address, capsys):
    main("mine", address=address, json_=False)
    shown = capsys.readouterr().out
    assert "prefill on p1, decode on d0" in shown
    assert "p1 <-" in shown
    assert "1.5 s" in shown, "the queue of the other node"
    assert "actual: TTFT 500 ms" in shown
    assert "predicted/actual: ttft" in shown


def test_what_ends_with_its_prompt_decodes_nowhere(address, capsys):
    main("vector", address=address, json_=False)
    shown = capsys.readouterr().out
    assert "placed: computed on p1, and nothing decodes" in shown
    assert "beside" not in shown, "there is no table of nodes that could decode"


def test_the_answer_can_be_had_as_it_is(address, capsys):
    main("mine", address=address, json_=True)
    assert json.loads(capsys.readouterr().out)["attempts"][0]["runner_up"] == "p0"


def test_an_unknown_request_is_said_to_be_unknown(address):
    with pytest.raises(ApiError, match="not remembered"):
        main("other", address=address, json_=False)
