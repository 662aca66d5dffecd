"""`conductor status`: what a running conductor says of its nodes and queues."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from base.config import ClusterConfig
from base.errors import ConfigError
from deploy.api_client import read_json
from deploy.clusters import running
from deploy.control import STATUS_TIMEOUT_S, ask
from deploy.options import ADDRESS, Address, AsItIs
from deploy.targets import same_address

COLUMNS = ("node", "host", "roles", "quantised", "free", "held", "blocks", "run", "wait", "transports", "")
"""Columns that fit 80 characters with names of ordinary length; the rest is in the JSON."""


def main(address: Address = ADDRESS, json_: AsItIs = False) -> None:
    """Show nodes, blocks and queues."""
    status = read_json(address, "/status")
    if json_:
        print(json.dumps(status))
        return
    console = console_for_tables()
    console.print(_shown(status))
    for line in _under_way(address):
        console.print(line)


def console_for_tables() -> Console:
    """Return standard output; what is piped has no width to keep to."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def _under_way(address: str) -> list[str]:
    """Return what the cluster at `address` is being changed to; nothing if it is not of this host."""
    try:
        here = [
            each
            for each in running(ClusterConfig().cache_dir)
            if each.http_address and same_address(each.http_address, address)
        ]
        return [line for each in here for line in ask(each, {"verb": "status"}, STATUS_TIMEOUT_S)]
    except (ConfigError, OSError):  # it ends, or it is another user's
        return []


def _shown(status: dict[str, Any]) -> Group:
    """Return what `/status` says as a table and a line of totals."""
    nodes = status["nodes"]
    totals = {key.replace("_", " "): value for key, value in status.items() if key != "nodes"}
    sizes = sorted({node["kv_token_bytes"] for node in nodes if node.get("kv_token_bytes")})
    if sizes:
        totals["bytes of KV a token"] = " and ".join(f"{size:,}" for size in sizes)
    lines = [expert_line(node["id"], node["experts"]) for node in nodes if node.get("experts")]
    said = ", ".join(f"{name}: {value}" for name, value in totals.items())
    return Group(_nodes_table(nodes), *lines, said)


def expert_line(node: str, experts: dict[str, Any]) -> str:
    """Return how evenly tokens went to a node's experts, as `/status` says it."""
    line = (
        f"experts of {node}, times their share: busiest {experts['busiest']:.2f}, "
        f"in the least even layer {experts['busiest_of_a_layer']:.2f}"
    )
    if len(experts["ranks"]) == 1:
        return line
    shares = " ".join(f"{share:.2f}" for share in experts["ranks"])
    return f"{line}, busiest rank {experts['busiest_rank']:.2f}, ranks {shares}"


def _nodes_table(nodes: list[dict[str, Any]]) -> Table:
    table = Table(*COLUMNS, box=None, pad_edge=False, collapse_padding=True)
    for node in nodes:
        # A node that has sent no heartbeat yet has none of these.
        numbers = (
            node.get(key, "") for key in ("free_blocks", "held_blocks", "blocks", "running", "waiting")
        )
        table.add_row(
            node["id"],
            node["host"],
            "+".join(node["roles"]),
            node["weights"],
            *map(str, numbers),
            "+".join(node["transports"]),
            "draining" if node.get("draining") else "",
        )
    return table
