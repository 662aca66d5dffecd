"""`conductor top`: `conductor status`, again and again, until Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Annotated

import typer
from rich.live import Live

from deploy.api_client import ApiError, read_json
from deploy.chat import ADDRESS
from deploy.status import shown


def main(
    address: Annotated[str, typer.Option(help="host:port of the conductor's HTTP API")] = ADDRESS,
    period_s: Annotated[float, typer.Option("--period", help="Seconds between two looks")] = 1.0,
    times: Annotated[int, typer.Option(help="Looks, then end; 0: until Ctrl-C")] = 0,
) -> None:
    """Watch nodes, blocks and queues."""
    tick = threading.Event()  # never set: its wait is a pause that Ctrl-C ends
    looks = 0
    try:
        with contextlib.suppress(KeyboardInterrupt), Live(auto_refresh=False) as live:
            while True:
                live.update(shown(read_json(address, "/status")), refresh=True)
                looks += 1
                if looks == times:
                    return
                tick.wait(period_s)
    except ApiError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error
