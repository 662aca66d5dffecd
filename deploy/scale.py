"""`conductor scale prefill=3 decode=2` and `conductor restart`: change a running cluster.

The change ends with the command: Ctrl-C stops it between two nodes, and what is ready stays. A later command
replaces it.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from deploy.clusters import chosen
from deploy.config_file import read_cluster_config
from deploy.control import ask
from deploy.options import Config, Name


def scale(
    sizes: Annotated[list[str], typer.Argument(help="prefill=N, decode=N")],
    config: Config = None,
    name: Name = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done and what it takes; change nothing")
    ] = False,
) -> None:
    """Start or drain nodes until the pools have these sizes; no request is lost."""
    try:
        wanted = dict(_size(size) for size in sizes)
        if len(wanted) < len(sizes):
            raise ValueError(f"{' '.join(sizes)}: a pool is there twice")
    except ValueError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    _show({"verb": "scale", **wanted, **({"dry_run": True} if dry_run else {})}, config, name)


def restart(config: Config = None, name: Name = "") -> None:
    """Restart every node, one after the other; no request is lost."""
    _show({"verb": "restart"}, config, name)


def _size(text: str) -> tuple[str, int]:
    pool, _, number = text.partition("=")
    if pool not in ("prefill", "decode") or not number.isdecimal():
        raise ValueError(f"{text}: prefill=N or decode=N is wanted")
    return pool, int(number)


def _show(request: dict[str, Any], config: Config, name: str) -> None:
    for line in ask(chosen(read_cluster_config(config), config, name), request):
        print(line, flush=True)
