"""The ports of a cluster, looked at before anything of it starts: which are taken, and by whom."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

import psutil

from base.config import ClusterConfig
from base.errors import ConfigError
from deploy.clusters import Running


def wanted_ports(config: ClusterConfig) -> dict[int, str]:
    """Return the ports that the conductors are to listen on, each with its key."""
    first = {
        "server.http_port": config.server.http_port,
        "server.grpc_port": config.server.grpc_port,
        "nodes.attach_port": config.nodes.attach_port,
    }
    return {
        port + number: key
        for key, port in first.items()
        if port
        for number in range(config.server.conductors)
    }


def require_free(config: ClusterConfig, clusters: list[Running]) -> None:
    """Refuse ports that cannot be listened on here, which is where the conductors will be.

    In a Ray that is joined they are on its head node: if that is another host, nothing is known of its ports.
    Raises ConfigError with a line for each port: its key, and who has it.
    """
    if not _head_is_here():
        return
    problems = []
    for port, key in wanted_ports(config).items():
        if problem := taken(config.server.host, port, clusters):
            problems.append(f"{key}: {problem}")
    if problems:
        mend = "set other ports in cluster.yaml (0: whichever is free), or end what has them"
        raise ConfigError("\n".join([*problems, mend]))


def taken(host: str, port: int, clusters: list[Running]) -> str:
    """Return why nobody can listen on `host:port` now, and who does; empty: it is free."""
    for cluster in clusters:
        if port in cluster.ports:
            return f"port {port} is that of the cluster {cluster}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} is in use by {listener(port)}"
        return f"{host}:{port}: {error.strerror or error}"
    return ""


def listener(port: int) -> str:
    """Return which process listens on a port, in words."""
    for found in psutil.net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid is not None:
            with contextlib.suppress(psutil.Error):
                return f"process {found.pid} ({' '.join(psutil.Process(found.pid).cmdline())[:80]})"
    return "a process that this user may not look at"


def _head_is_here() -> bool:
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        return True
    host = address.rpartition(":")[0]
    try:
        socket.create_server((host, 0)).close()
    except OSError:
        return False
    return bool(host)  # "auto" names none
