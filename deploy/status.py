"""`conductor status`: what a running conductor says of its nodes and queues."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table

from base.config import ClusterConfig
from base.errors import ConfigError
from deploy.api_client import ApiError, read_json
from deploy.chat import ADDRESS
from deploy.clusters import running
from deploy.control import STATUS_TIMEOUT_S, ask
from deploy.targets import same_address

COLUMNS = ("node", "host", "roles", "free", "held", "blocks", "run", "wait", "transports", "")
"""Fits 80 characters with names of ordinary length; the rest is in the JSON."""


def main(
    address: Annotated[str, typer.Option(help="host:port of the conductor's HTTP API")] = ADDRESS,
    json_: Annotated[bool, typer.Option("--json", help="Print the conductor's answer as it is")] = False,
) -> None:
    """Show nodes, blocks and queues."""
    try:
        status = read_json(address, "/status")
    except ApiError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error
    if json_:
        print(json.dumps(status))
        return
    # What is piped has no width to keep to.
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=160)
    console.print(shown(status))
    for line in _under_way(address):
        console.print(line)


def _under_way(address: str) -> list[str]:
    """Return what the cluster at `address` is being changed to; nothing if it is not of this host."""
    try:
        here = [
            each for each in running(ClusterConfig().cache_dir) if same_address(each.http_address, address)
        ]
        return [line for each in here for line in ask(each, {"verb": "status"}, STATUS_TIMEOUT_S)]
    except (ConfigError, OSError):  # it ends, or it is another user's
        return []


def shown(status: dict[str, Any]) -> Group:
    """Return what `/status` says as a table and a line of totals."""
    totals = (f"{key.replace('_', ' ')}: {value}" for key, value in status.items() if key != "nodes")
    return Group(_nodes_table(status["nodes"]), ", ".join(totals))


def _nodes_table(nodes: list[dict[str, Any]]) -> Table:
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for node in nodes:
        told = (
            *(node["id"], node["host"], "+".join(node["roles"])),
            # A node that has sent no heartbeat yet tells nothing of these.
            *(
                str(node.get(key, ""))
                for key in ("free_blocks", "held_blocks", "blocks", "running", "waiting")
            ),
            *("+".join(node["transports"]), "draining" if node.get("draining") else ""),
        )
        table.add_row(*told)
    return table
