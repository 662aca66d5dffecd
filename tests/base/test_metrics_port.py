"""The port of a node's metrics: what it answers, and what anybody may hold of it."""

import socket
import urllib.error
import urllib.request

import pytest

from base import metrics_port
from base.metrics import exposition, process_registry
from base.metrics_port import serve_metrics


def dialled(port):
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def read(port, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return answer.read().decode()


def closed(sock):
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


@pytest.fixture
def port():
    return serve_metrics(lambda: exposition(process_registry()), "127.0.0.1", 0)


def test_metrics_are_there_and_nothing_else(port):
    assert "conductor_build_info" in read(port)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        read(port, "/status")


def test_connections_that_say_nothing_are_bounded_and_the_oldest_make_room(port, monkeypatch):
    monkeypatch.setattr(metrics_port, "MAX_CONNECTIONS", 4)
    silent = [dialled(port) for _ in range(20)]
    assert all(closed(sock) for sock in silent[:16])
    assert "conductor_build_info" in read(port)
    for sock in silent:
        sock.close()


def test_a_connection_that_says_nothing_ends(port, monkeypatch):
    monkeypatch.setattr(metrics_port._Reading, "timeout", 0.01)
    with dialled(port) as silent:
        assert closed(silent)
