"""`conductor logs`: what the processes of a cluster logged, of its run or of an earlier one.

`tail` prints and follows: it knows files that grow and files that are replaced, and ends with a process.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from base.config import ClusterConfig
from base.errors import ConfigError
from deploy.clusters import chosen, running
from deploy.config_file import read_cluster_config
from deploy.options import Config, Name


def main(
    node: Annotated[str, typer.Argument(help="conductor, prefill-0, ...; without one, all of them")] = "",
    config: Config = None,
    name: Name = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the cluster ends")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Of each log, from its end")] = 100,
    run: Annotated[str, typer.Option(help="A folder of CACHE_DIR/runs/; default: the latest")] = "",
) -> None:
    """Print the logs of processes on this host."""
    folder, pid = _run_folder(read_cluster_config(config), config, name, run)
    files = _files(folder, node)
    following = ["--follow=name", "--retry", f"--pid={pid}"] if follow and pid else []
    command = ["tail", f"--lines={lines}", *following, "--", *(file.name for file in files)]
    try:
        raise typer.Exit(subprocess.run(command, cwd=folder, check=False).returncode)
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error


def _run_folder(config: ClusterConfig, file: Path | None, name: str, run: str) -> tuple[Path, int]:
    """Return the folder that is meant, and `conductor up`'s pid if it runs, else 0; raises ConfigError."""
    runs = Path(config.cache_dir).expanduser() / "runs"
    found = sorted(path.name for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []
    if run:
        if run not in found:
            raise ConfigError(f"--run {run}: there is no such run; there are: {', '.join(found) or 'none'}")
        return runs / run, 0
    try:
        cluster = chosen(config, file, name)
    except ConfigError:
        if running(config.cache_dir) and not (name or config.name):
            raise
        # It has ended: its runs have its name, which without any is anybody's.
        wanted = name or config.name
        ended = [each for each in found if not wanted or f"-{wanted}-" in each]
        if not ended:
            raise
        return runs / ended[-1], 0
    return Path(cluster.log_folder), cluster.pid


def _files(folder: Path, node: str) -> list[Path]:
    logs = sorted(folder.glob("*.log"))
    files = [log for log in logs if node in ("", log.stem)]
    if not files:
        there = ", ".join(log.stem for log in logs) or "none"
        raise ConfigError(f"{node or 'logs'}: not in {folder}; there are: {there}")
    return files
