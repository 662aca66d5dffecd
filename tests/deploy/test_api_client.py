import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deploy.api_client import ApiError, ChatStream, read_json

STUB = (sys.executable, str(Path(__file__).parent / "stub_process.py"), "conductor")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    config = tmp_path_factory.mktemp("api") / "conductor.json"
    config.write_text(json.dumps({"server": {"http_port": 0, "grpc_port": 0}}))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*STUB, "--config", str(config)], **pipes) as process:
        yield f"127.0.0.1:{json.loads(process.stdout.readline())['http_port']}"
        process.terminate()


def ask(address, text):
    return ChatStream(address, "m", [{"role": "user", "content": text}])


def test_an_answer_comes_in_pieces(address):
    assert list(ask(address, "abc").pieces()) == ["", "A", "B", "C", ""]


def test_a_refusal_is_told_in_the_servers_words(address):
    with pytest.raises(ApiError, match="answered 400: refused, as asked"):
        list(ask(address, "refuse").pieces())


def test_an_answer_cut_short_is_an_error(address):
    stream = ask(address, "cut")
    with pytest.raises(ApiError, match="cut short"):
        list(stream.pieces())


def test_hanging_up_ends_a_call_that_waits(address):
    stream = ask(address, "wait")
    pieces = stream.pieces()
    assert next(pieces) == ""
    threading.Timer(0.05, stream.close).start()
    with pytest.raises(ApiError):
        list(pieces)


def test_a_server_that_is_not_there_is_told():
    with pytest.raises(ApiError, match="refused"):
        read_json("127.0.0.1:1", "/status")
    with pytest.raises(ApiError, match="refused"):
        list(ask("127.0.0.1:1", "x").pieces())


def test_json_is_read(address):
    assert read_json(address, "/status")["waiting"] == 0
