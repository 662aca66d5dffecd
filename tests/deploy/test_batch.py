import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from base.errors import ConfigError
from deploy import cli
from deploy.batch import answered_ids, lines_of

LINE = {"method": "POST", "url": "/v1/chat/completions"}


class Stub(BaseHTTPRequestHandler):
    """Answers with the body; `busy` is refused twice for now, `bad` for good."""

    def log_message(self, format, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = self.server.asked
        asked.append(body["x"])
        status = 200
        if body["x"] == "busy" and asked.count("busy") < 3:
            status = 429
        if body["x"] == "bad" and not self.server.is_kind:
            status = 400
        answer = (
            {"of": body["x"], "path": self.path}
            if status == 200
            else {"error": {"message": "no", "code": "c"}}
        )
        raw = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Retry-After", "0")
        self.send_header("X-Request-Id", f"r-{body['x']}")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def server():
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    stub.asked, stub.is_kind = [], False
    thread = threading.Thread(target=stub.serve_forever)
    thread.start()
    yield stub
    stub.shutdown()
    thread.join()
    stub.server_close()


def written(path, names, **fields):
    lines = [json.dumps({"custom_id": name, **LINE, "body": {"x": name}, **fields}) for name in names]
    path.write_text("\n".join(lines) + "\n\n")
    return path


def run(server, requests, output):
    address = f"127.0.0.1:{server.server_address[1]}"
    arguments = ["batch", str(requests), "-o", str(output), "--address", address, "--concurrency", "3"]
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code


def answers(path):
    return {line["custom_id"]: line for line in map(json.loads, path.read_text().splitlines())}


def test_every_request_is_asked_and_its_answer_written(server, tmp_path):
    names = [f"n{index}" for index in range(20)]
    requests, output = written(tmp_path / "in.jsonl", ["busy", *names]), tmp_path / "out.jsonl"
    assert run(server, requests, output) == 0
    found = answers(output)
    assert found.keys() == {"busy", *names}
    assert found["n3"]["response"] == {
        "status_code": 200,
        "request_id": "r-n3",
        "body": {"of": "n3", "path": "/v1/chat/completions"},
    }
    assert (found["n3"]["id"], found["n3"]["error"]) == ("batch_req_r-n3", None)
    assert server.asked.count("busy") == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_run_goes_on_where_one_stopped_and_asks_refusals_anew(server, tmp_path):
    requests, output = written(tmp_path / "in.jsonl", ["a", "bad", "b"]), tmp_path / "out.jsonl"
    assert run(server, requests, output) == 1
    refusals = answers(tmp_path / "out.jsonl.errors")
    assert refusals["bad"]["error"] == {"code": "c", "message": "no"}
    assert refusals["bad"]["response"]["status_code"] == 400
    # A line that was not written whole is asked again.
    whole = output.read_bytes()
    output.write_bytes(whole + b'{"custom_id": "b')
    server.is_kind = True
    server.asked.clear()
    assert run(server, requests, output) == 0
    assert server.asked == ["bad"]
    assert answers(output).keys() == {"a", "bad", "b"}
    assert not (tmp_path / "out.jsonl.errors").exists()


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "a JSON object"),
        ({"custom_id": 5}, "custom_id"),
        ({"custom_id": ""}, "custom_id"),
        ({"method": "GET"}, "method"),
        ({"url": "http://elsewhere/v1"}, "url"),
        ({"url": "/v1/a b"}, "url"),
        ({"body": []}, "body"),
        ({"body": {"stream": True}}, "body.stream"),
    ],
)
def test_a_line_at_fault_is_named_before_anything_is_asked(server, tmp_path, line, fault, capsys):
    requests = written(tmp_path / "in.jsonl", ["a"])
    whole = {"custom_id": "x", **LINE, "body": {"x": "x"}}
    text = line if isinstance(line, str) else json.dumps({**whole, **line})
    requests.write_text(requests.read_text() + text + "\n")
    assert run(server, requests, tmp_path / "out.jsonl") == 1
    assert f"{requests}:3: {fault}" in capsys.readouterr().err
    assert server.asked == []


def test_ids_are_there_once(tmp_path):
    with pytest.raises(ConfigError, match="twice"):
        list(lines_of(written(tmp_path / "in.jsonl", ["a", "a"])))


def test_an_output_of_something_else_is_left_alone(tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("hello\n")
    with pytest.raises(ConfigError, match="no answer of a batch"):
        answered_ids(output)
    assert output.read_text() == "hello\n"


@pytest.mark.parametrize("name", [".", "missing/out.jsonl"])
def test_an_output_that_could_not_be_written_is_refused(tmp_path, capsys, name):
    requests = written(tmp_path / "in.jsonl", ["a"])
    with pytest.raises(SystemExit) as ended:
        cli.main(["batch", str(requests), "-o", str(tmp_path / name), "--address", "127.0.0.1:1"])
    assert ended.value.code == 1
    assert f"--output {tmp_path / name}: no file can be written there" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_said_at_once_and_nothing_is_written(tmp_path, capsys):
    requests = written(tmp_path / "in.jsonl", ["a"])
    with pytest.raises(SystemExit) as ended:
        cli.main(["batch", str(requests), "-o", str(tmp_path / "out"), "--address", "127.0.0.1:1"])
    assert ended.value.code == 1
    assert "127.0.0.1:1/health: nothing listens there" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["in.jsonl"]
