"""Every place that opens a listener, with what keeps outsiders out there: a new one has to be named here."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "base",
    "conductor",
    "kvstore",
    "transfer",
    "engine",
    "deploy",
    "node",
    "prefill_node",
    "decode_node",
)
OPENS = {
    "create_server",
    "create_unix_server",
    "start_server",
    "start_unix_server",
    "MetricsServer",
    "create_datagram_endpoint",
    "add_insecure_port",
    "add_secure_port",
    "tcp_listener",
    "listen",
    "TcpServer",
    "TlsListener",
    "HTTPServer",
    "ThreadingHTTPServer",
    "TCPServer",
    "serve_metrics",
}
"""Calls that make, or lead to, a socket that others connect to."""

TLS, METHODS = "tests/conductor/test_tls.py", "tests/test_outsiders.py"
ACCESS, DATA = "tests/conductor/api/test_access.py", "tests/transfer/tcp/test_server.py"
CONTROL, METRICS = "tests/deploy/test_control.py", "tests/base/test_metrics_port.py"
LIFELINE = "tests/base/test_lifetime.py"
GUARDED = {
    ("base/lifeline.py", "listen"): LIFELINE,
    ("base/lifetime.py", "create_unix_server"): LIFELINE,
    ("base/link.py", "create_server"): TLS,
    ("base/link.py", "TlsListener"): TLS,
    ("base/metrics_port.py", "MetricsServer"): METRICS,
    ("base/rpc.py", "add_insecure_port"): METHODS,
    ("base/rpc.py", "add_secure_port"): METHODS,
    ("conductor/api/server.py", "TlsListener"): TLS,
    ("conductor/api/server.py", "listen"): TLS,
    ("conductor/api/server.py", "start_server"): METHODS,
    ("conductor/api/server.py", "tcp_listener"): ACCESS,
    ("kvstore/hosting.py", "start_server"): METHODS,
    ("kvstore/__main__.py", "serve_metrics"): METRICS,
    ("node/process.py", "serve_metrics"): METRICS,
    ("deploy/control.py", "start_unix_server"): CONTROL,
    ("deploy/ports.py", "create_server"): "closed at once: it asks whether a port is free",
    ("transfer/rdma/transport.py", "listen"): DATA,
    ("transfer/tcp/host.py", "TcpServer"): DATA,
    ("transfer/tcp/transport.py", "listen"): DATA,
    ("transfer/tcp/server.py", "create_server"): DATA,
}
"""By file and call: the test that sweeps it as an outsider, or why there is nothing to sweep."""


def opened() -> set[tuple[str, str]]:
    """Return where the program opens listeners, by what."""
    found = set()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    if name in OPENS:
                        found.add((str(path.relative_to(ROOT)), name))
    return found


def test_every_listener_is_named_with_its_guard() -> None:
    assert opened() == set(GUARDED)


@pytest.mark.parametrize("guard", sorted(set(GUARDED.values())))
def test_every_guard_is_there(guard: str) -> None:
    assert (ROOT / guard).is_file() == guard.startswith("tests/")
