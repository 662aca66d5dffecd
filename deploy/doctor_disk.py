"""The doctor's look at the folder where nodes of this host keep blocks: whether it is a disk, and how full.

Nodes of a joined Ray are on hosts of their own, of which nothing is known here. A disk that is too small
harms nobody, but keeps fewer blocks than the configuration says; memory as a folder is taken twice.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from base.config import GIB, ClusterConfig
from base.errors import ConfigError
from deploy.doctor_processes import Finding
from deploy.plan import require_disk

MEMORY = ("tmpfs", "ramfs")
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "beegfs", "9p", "virtiofs")
"""File systems of other hosts, by what the kernel calls them; what comes by FUSE is not known."""


@dataclass(frozen=True, slots=True)
class DiskSeen:
    """The file system of `store.disk_path`."""

    problem: str = ""
    """Why nodes cannot write there; empty: they can."""
    kind: str = ""
    """The kernel's name of it."""
    left_bytes: int = 0
    """Free bytes, and those that blocks take there already."""


def look_at_disk(config: ClusterConfig, mounts: Path = Path("/proc/mounts")) -> DiskSeen | None:
    """Look at the disk of nodes on this host, whose file systems are in `mounts`; None: they have none."""
    if not config.store.disk_path or "RAY_ADDRESS" in os.environ:
        return None
    try:
        require_disk(config.store.disk_path)
    except ConfigError as error:
        return DiskSeen(str(error))
    folder = Path(config.store.disk_path).expanduser().resolve()
    left_bytes = shutil.disk_usage(folder).free
    for file in folder.glob("*/blocks.slots"):
        with contextlib.suppress(OSError):  # a store that ends meanwhile
            left_bytes += 512 * file.stat().st_blocks
    return DiskSeen("", _kind(folder, mounts), left_bytes)


def check_disk(disk: DiskSeen | None, config: ClusterConfig) -> Iterator[Finding]:
    """Judge it against what nodes would keep there."""
    if disk is None:
        return
    path, wanted = config.store.disk_path, config.store.disk_gib
    num_nodes = config.prefill.nodes + config.decode.nodes
    if disk.problem:
        yield Finding("wrong", disk.problem, "correct store.disk_path")
    elif disk.kind in (*MEMORY, *REMOTE):
        what = "this host's memory" if disk.kind in MEMORY else "another host's disk"
        yield Finding(
            "warning", f"store.disk_path: {path} is {what} ({disk.kind})", "name a local disk's folder"
        )
    elif disk.left_bytes < num_nodes * wanted * GIB:
        what = f"{disk.left_bytes / GIB:.1f} GiB are left in {path}, for {num_nodes} nodes of {wanted:g} GiB"
        yield Finding("warning", f"store.disk_path: {what}", "lower store.disk_gib, or name another disk")
    else:
        yield Finding("ok", f"{path} has room for {num_nodes} times {wanted:g} GiB of blocks")


def _kind(folder: Path, mounts: Path) -> str:
    """Return what the kernel calls the file system of a folder."""
    rows = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    kinds = {Path(point.replace(r"\040", " ")): kind for point, kind in rows}  # of two on a point the last
    return next((kinds[each] for each in (folder, *folder.parents) if each in kinds), "")
