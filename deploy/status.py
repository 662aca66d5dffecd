"""`conductor status`: what a running conductor says of its nodes and queues."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.api_client import ApiError, read_json
from deploy.chat import ADDRESS

COLUMNS = (
    *("id", "host", "roles", "epoch", "blocks", "free_blocks", "held_blocks"),
    *("running", "waiting", "requests", "transports", "draining"),
)
"""Of a node in `/status`; one that a conductor does not tell is left empty."""


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
    console = Console(highlight=False)
    console.print(_nodes_table(status.get("nodes", [])))
    totals = (f"{key}: {value}" for key, value in status.items() if isinstance(value, int | float | str))
    console.print(", ".join(totals), style="dim")


def _nodes_table(nodes: list[dict[str, Any]]) -> Table:
    table = Table(*(column.replace("_", " ") for column in COLUMNS), box=None, pad_edge=False)
    for node in nodes:
        table.add_row(*(_cell(node.get(column, "")) for column in COLUMNS))
    return table


def _cell(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)
