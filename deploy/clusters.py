"""The clusters that run on this host, by name, so that `scale -c A.yaml` means A and no other.

    CACHE_DIR/clusters/NAME.lock   locked by `conductor up` for as long as it lives, however it ends
    CACHE_DIR/clusters/NAME.json   a `Running`
    CACHE_DIR/clusters/NAME.sock   where it takes changes: `control.py`
    CACHE_DIR/targets/NAME.json    where its processes have their metrics: `targets.py`

The kernel gives a lock back when its process ends, so nothing that is left of a killed one passes for a
cluster; the next start clears it away. A cluster is called what `name` of its configuration says; without
one by its HTTP port, which no other can have, or by its process where the port is whichever is free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from base.clock import wall_clock_s
from base.config import ClusterConfig
from base.errors import ConfigError
from base.private import private_file
from base.tables import from_table


@dataclass(frozen=True, slots=True)
class Running:
    """A cluster that starts or runs, as other commands find it."""

    name: str
    pid: int
    """The process of `conductor up`, on `host`."""
    host: str
    config: str
    """The file that it was started with; empty: all defaults."""
    cache_dir: str
    log_folder: str
    ports: tuple[int, ...]
    """Ports of HTTP and gRPC that the cluster has, or will take."""
    http_address: str = ""
    """Address of the first conductor; empty: it is not ready yet."""

    @property
    def socket_path(self) -> Path:
        return folder_of(self.cache_dir) / f"{self.name}.sock"

    def __str__(self) -> str:
        where = self.http_address or "not ready yet"
        return f"{self.name} (pid {self.pid}, {self.config or 'no file'}, {where})"


def folder_of(cache_dir: str) -> Path:
    """Return where the clusters of a cache folder have their locks, records and sockets."""
    return Path(cache_dir).expanduser() / "clusters"


def targets_path(cache_dir: str, name: str) -> Path:
    """Return where a cluster says where its processes have their metrics."""
    return Path(cache_dir).expanduser() / "targets" / f"{name}.json"


def described(config: ClusterConfig, file: Path | None, ports: Sequence[int]) -> Running:
    """Return what a cluster that this process is about to start is for other commands."""
    pid = os.getpid()
    name = config.name or (str(config.server.http_port) if config.server.http_port else f"pid-{pid}")
    cache = Path(config.cache_dir).expanduser().absolute()
    started = time.strftime("%Y%m%d-%H%M%S", time.gmtime(wall_clock_s()))
    return Running(
        name=name,
        pid=pid,
        host=socket.gethostname(),
        config=str(file.resolve()) if file else "",
        cache_dir=str(cache),
        log_folder=str(cache / "runs" / f"{started}-{name}-{pid}"),
        ports=tuple(ports),
    )


@contextmanager
def claimed(cluster: Running) -> Iterator[None]:
    """Have the cluster's name for the length of the body; raises ConfigError if another has it."""
    folder = folder_of(cluster.cache_dir)
    with _guarded(folder):
        _forget_dead(folder)
        lock = _lock(folder, cluster.name)
        if lock is None:
            taken = _read(folder / f"{cluster.name}.json") or cluster.name
            mend = "end it with `conductor stop`, or set another `name` and other ports in cluster.yaml"
            raise ConfigError(f"name: there is a cluster {taken} already: {mend}")
        record(cluster)
    try:
        yield
    finally:
        with _guarded(folder):
            _forget(folder, cluster.name)
            lock.close()


def record(cluster: Running) -> None:
    """Write down what is known of a cluster by now, whole or not at all."""
    folder = folder_of(cluster.cache_dir)
    draft = folder / f"{cluster.name}.draft"
    with private_file(draft, "w") as file:
        file.write(json.dumps(dataclasses.asdict(cluster), indent=1))
    draft.replace(folder / f"{cluster.name}.json")


def running(cache_dir: str) -> list[Running]:
    """Return the clusters of a cache folder that start or run, by name."""
    folder = folder_of(cache_dir)
    if not folder.is_dir():
        return []
    with _guarded(folder):
        names = [path.stem for path in sorted(folder.glob("*.lock")) if not _is_free(path)]
        return [found for name in names if (found := _read(folder / f"{name}.json")) is not None]


def chosen(config: ClusterConfig, file: Path | None, name: str) -> Running:
    """Return the running cluster that a command means.

    `file`: what `config` was read from; None: it is all defaults. `name`: what the command's `--name` says;
    empty: the name in `config`, else the file, else the only one.

    Raises ConfigError where there is none or more than one of these, or it runs on another host.
    """
    found = running(config.cache_dir)
    if wanted := name or config.name:
        fitting, none = [each for each in found if each.name == wanted], f"no cluster is called {wanted}"
    elif file is not None:
        path = str(file.resolve())
        fitting, none = [each for each in found if each.config == path], f"no cluster was started with {file}"
    else:
        fitting, none = found, "no cluster runs"
    those = "; ".join(map(str, found))
    if not fitting:
        hint = f"those that run: {those}" if found else "is `conductor up` running"
        raise ConfigError(f"{none}; {hint}{'' if found else f' with the cache_dir {config.cache_dir}?'}")
    if len(fitting) > 1:
        raise ConfigError(f"{len(fitting)} clusters run: name one, by --name or by -c FILE: {those}")
    if fitting[0].host != socket.gethostname():
        raise ConfigError(f"cluster {fitting[0]} runs on host {fitting[0].host}: run the command there")
    return fitting[0]


@contextmanager
def _guarded(folder: Path) -> Iterator[None]:
    """Let one process at a time look at the locks: looking takes them for a moment."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        guard = (folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"cache_dir: {error}") from error
    with guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield


def _lock(folder: Path, name: str) -> TextIO | None:
    """Return the lock of a name, taken; None: it has an owner."""
    file = private_file(folder / f"{name}.lock", "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _is_free(path: Path) -> bool:
    lock = _lock(path.parent, path.stem)
    if lock is not None:
        lock.close()
    return lock is not None


def _forget_dead(folder: Path) -> None:
    """Clear away what clusters left behind that were killed."""
    for path in folder.glob("*.lock"):
        if _is_free(path):
            _forget(folder, path.stem)


def _forget(folder: Path, name: str) -> None:
    left = (folder / f"{name}.{end}" for end in ("sock", "json", "draft", "lock"))
    for path in (*left, targets_path(str(folder.parent), name)):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _read(path: Path) -> Running | None:
    try:
        return from_table(Running, json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
