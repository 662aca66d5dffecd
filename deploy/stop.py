"""`conductor stop`: end a running cluster as Ctrl-C in its terminal would, and wait for its end.

It sends `conductor up` the signals of a terminal: one drains, a second ends everything at once.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import Annotated

import typer

from base.config import ClusterConfig
from base.errors import ConfigError
from deploy.clusters import Running, chosen, running
from deploy.config_file import read_cluster_config
from deploy.scale import Config, Name


def main(
    config: Config = None,
    name: Name = "",
    now: Annotated[bool, typer.Option("--now", help="Do not wait for requests in progress")] = False,
) -> None:
    """Drain a cluster and end it; nothing of it is left running."""
    try:
        cluster = chosen(read_cluster_config(config) if config else ClusterConfig(), config, name)
        print(
            f"{cluster}: {'ending' if now else 'draining; `conductor stop --now` ends it at once'}",
            flush=True,
        )
        end(cluster, now)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error
    print(f"{cluster.name}: ended", flush=True)


def end(cluster: Running, now: bool) -> None:
    """Tell a cluster to end, and wait until it has.

    Raises:
        ConfigError: its process is another user's.
    """
    try:
        process = os.pidfd_open(cluster.pid)
    except ProcessLookupError:
        return
    try:
        # The process is held by now; if its name is still locked, it is the cluster and no successor.
        if cluster.name not in (each.name for each in running(cluster.cache_dir) if each.pid == cluster.pid):
            return
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if now:
            # Another signal, because two of one kind may arrive as one.
            signal.pidfd_send_signal(process, signal.SIGINT)
        select.select([process], [], [])
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise ConfigError(f"cluster {cluster}: {error}: run it as its user") from error
    finally:
        os.close(process)
