"""`conductor stop`: end a running cluster as Ctrl-C in its terminal would, and wait for its end.

It sends `conductor up` the signals of a terminal: one drains, a second ends everything at once.
"""

from __future__ import annotations

import signal
from contextlib import closing
from typing import Annotated

import typer

from base.errors import ConfigError
from deploy.clusters import Running, chosen, running
from deploy.config_file import read_cluster_config
from deploy.held import HeldProcess
from deploy.options import Config, Name


def main(
    config: Config = None,
    name: Name = "",
    now: Annotated[bool, typer.Option("--now", help="Do not wait for requests in progress")] = False,
) -> None:
    """Drain a cluster and end it; nothing of it is left running."""
    cluster = chosen(read_cluster_config(config), config, name)
    doing = "ending" if now else "draining; `conductor stop --now` ends it at once"
    print(f"{cluster}: {doing}", flush=True)
    end(cluster, now)
    print(f"{cluster.name}: ended", flush=True)


def end(cluster: Running, now: bool) -> None:
    """Ask a cluster to end, and wait until it has; raises ConfigError if it is another user's."""
    try:
        with closing(HeldProcess(cluster.pid)) as process:
            # The process is held by now; if its name is still locked, it is the cluster and no successor.
            if any(
                (each.name, each.pid) == (cluster.name, cluster.pid) for each in running(cluster.cache_dir)
            ):
                process.signal(signal.SIGTERM)
                if now:
                    # Another signal, because two of one kind may arrive as one.
                    process.signal(signal.SIGINT)
                process.has_ended(None)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise ConfigError(f"cluster {cluster}: {error}: run it as its user") from error
