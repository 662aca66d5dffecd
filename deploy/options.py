"""Options that several sub-commands have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ADDRESS = "127.0.0.1:8000"
MAX_PAUSE_S = 1e6
"""The longest pause between two looks. What a thread may wait for ends at 9.2e9 s."""
CONFIG_HELP = "The cluster.yaml that `conductor up` was given; without it, the only cluster that runs"

Address = Annotated[str, typer.Option(help="host:port of the conductor's HTTP API")]
AsItIs = Annotated[bool, typer.Option("--json", help="Print the conductor's answer as it is")]
Config = Annotated[Path | None, typer.Option("-c", "--config", help=CONFIG_HELP)]
Name = Annotated[str, typer.Option(help="The cluster's `name`, or its HTTP port where it has none")]
