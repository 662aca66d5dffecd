import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import pytest

from base.config import ClusterConfig
from deploy import calculator, cli
from deploy.api_client import ApiError, ChatStream, read_json, split_address
from deploy.calculator import result_of
from deploy.chat import CALM_TEMPERATURE
from deploy.clusters import claimed, described

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
    with pytest.raises(ApiError, match=r"nothing listens there.*conductor up.*--address"):
        read_json("127.0.0.1:1", "/status")
    with pytest.raises(ApiError, match=r"nothing listens there.*conductor up.*--address"):
        list(ask("127.0.0.1:1", "x").pieces())


def test_json_is_read(address):
    assert read_json(address, "/status")["running_requests"] == 0


def test_status_shows_each_node_in_a_line(address, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["status", "--address", address])
    assert caught.value.code == 0
    head, first, second, experts, totals = capsys.readouterr().out.splitlines()
    assert " ".join(first.split()) == "decode-0 h decode int8 37 3 40 1 0 shm+tcp draining"
    assert second.split() == ["new", "h", "prefill+decode", "float32", "4"]
    assert len(head.rstrip()) < 80
    assert experts == (
        "experts of decode-0, times their share: busiest 1.50, in the least even layer 2.25, "
        "busiest rank 1.25, ranks 1.12 0.88"
    )
    assert totals == "ready: True, supervised: True, running requests: 0, bytes of KV a token: 23,040"


def test_status_is_shown_while_another_cluster_of_the_host_starts(address, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    starting = described(ClusterConfig(name="other"), None, ())
    with claimed(starting), pytest.raises(SystemExit) as caught:
        cli.main(["status", "--address", address])
    assert (caught.value.code, capsys.readouterr().err) == (0, "")


@pytest.mark.parametrize(
    ("scheme", "said", "mend"),
    [
        ("http", b"", "https://host:port"),  # as a port of TLS answers
        ("http", b"\x00\x00\x18\x04\x00\x00\r\n", "the port of HTTP, not gRPC's"),
        ("https", b"HTTP/1.0 400 Bad Request\r\n\r\n", "no TLS is spoken there"),
    ],
)
def test_a_port_of_another_protocol_is_named_as_such(scheme, said, mend):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=say_once, args=(listener, said))
        thread.start()
        try:
            with pytest.raises(ApiError) as caught:
                read_json(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", "/status")
        finally:
            thread.join(60)
    assert mend in str(caught.value)
    assert str(caught.value).isprintable()


def say_once(listener, said):
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(said)


def test_status_for_machines_is_the_conductors_own(address, capsys):
    with pytest.raises(SystemExit):
        cli.main(["status", "--json", "--address", address])
    assert json.loads(capsys.readouterr().out) == read_json(address, "/status")


@pytest.mark.parametrize("command", ["top", "status", "chat"])
def test_a_cluster_that_is_not_there_ends_the_command_in_one_line(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--address", "127.0.0.1:1"])
    assert caught.value.code == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_chat_of_one_message_prints_the_answer(address, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["chat", "hello", "--address", address])
    assert caught.value.code == 0
    assert capsys.readouterr().out == "HELLO\n"


def test_a_conversation_is_read_line_by_line_and_ends_with_the_input(address, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    with pytest.raises(SystemExit):
        cli.main(["chat", "--address", address])
    assert capsys.readouterr().out == "ONE\nTWO\n"


@pytest.mark.parametrize(("asked", "sent"), [([], str(CALM_TEMPERATURE)), (["--temperature", "0"], "0.0")])
def test_a_chat_asks_for_the_temperature_that_is_said_or_a_calm_one(address, capsys, asked, sent):
    with pytest.raises(SystemExit):
        cli.main(["chat", "temperature", "--address", address, *asked])
    assert capsys.readouterr().out == f"{sent}\n"


def test_a_chat_carries_out_the_calls_of_its_calculator(address, capsys):
    with pytest.raises(SystemExit):
        cli.main(["chat", "compute", "--calculator", "--address", address])
    shown = capsys.readouterr()
    assert shown.out.split() == ["42"]
    assert '[calculator {"expression": "6 * 7"} = 42]' in shown.err


def test_a_question_with_a_number_begins_with_the_calculator_and_no_later_answer_has_to(address, capsys):
    for asked, out, err in ((["--calculator"], "2", " = 2]"), ([], "NONE", "")):
        with pytest.raises(SystemExit):
            cli.main(["chat", "compute 1", *asked, "--address", address])
        shown = capsys.readouterr()
        assert shown.out.split() == [out]
        assert err in shown.err


@pytest.mark.parametrize(
    "expression", ["12.5 * 8", "-3 + (4 - 2) // 7", "2 ** 10 % 3", "3 * -4", "(1 + 2) * (3 + 4) - 5"]
)
def test_the_calculators_schema_lets_arithmetic_by(expression):
    schema = calculator.TOOL["function"]["parameters"]["properties"]["expression"]
    assert re.search(schema["pattern"], expression)
    assert not result_of(json.dumps({"expression": expression})).startswith("error")
    assert not re.search(schema["pattern"], f"f({expression})")


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("3 * (4 + 5) - -2 ** 2", "31"),
        ("7 // 2 + 7 % 4 + 1 / 4", "6.25"),
        ("1 / 0", "error: division by zero"),
        ("9 ** 9 ** 9", "error: a power that is too great"),
        ("__import__('os')", "error: no arithmetic"),
        ("(" * 190 + "1" + ")" * 9, "error: "),
        ("1" * 500, "error: expression"),
    ],
)
def test_the_calculator_computes_arithmetic_and_nothing_else(expression, result):
    assert result_of(json.dumps({"expression": expression})).startswith(result)
    assert result_of("[]").startswith("error: ")


def test_ctrl_c_ends_an_answer_and_not_the_chat(address):
    """The stub never ends the answer to "stay"; the next line of the conversation is answered."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    program = "from deploy import cli; import sys; cli.main(sys.argv[1:])"
    command = [sys.executable, "-c", program, "chat", "--address", address]
    with subprocess.Popen(command, **pipes) as chat:
        chat.stdin.write("first\n")
        assert chat.stdout.readline() == "FIRST\n"
        chat.stdin.write("stay\n")
        assert chat.stdout.read(1) == "S"
        chat.send_signal(signal.SIGINT)
        assert chat.stdout.readline() == "\n"
        chat.stdin.write("last\n")
        assert chat.stdout.readline() == "LAST\n"
        chat.stdin.close()
        assert chat.wait() == 0


def test_the_version_is_said(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"conductor {version('conductor-cluster')}\n"


@pytest.mark.parametrize(
    "address", ["127.0.0.1:8000", "http://127.0.0.1:8000", "127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/"]
)
def test_a_base_address_of_clients_is_taken_as_well(address):
    assert split_address(address) == ("http", "127.0.0.1:8000")


@pytest.mark.parametrize(
    "address", ["50051", "localhost", "127.0.0.1:8000/v2", "127.0.0.1:x", "127.0.0.1:80000", ""]
)
def test_what_is_no_address_is_refused_by_name(address):
    with pytest.raises(ApiError, match=r"--address: host:port .* is wanted, not "):
        split_address(address)
