"""`CACHE_DIR/targets/NAME.json`: where the processes of a running cluster have their metrics.

In the form that Prometheus' file_sd reads. `conductor up` writes it whenever a process comes, goes or moves,
and removes it at its end; `conductor doctor` reads it, so it sees what Prometheus sees.
"""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.api_client import split_address
from deploy.clusters import targets_path


def write_targets(
    cache_dir: str, name: str, conductors: Mapping[str, str], nodes: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write where conductors (HTTP addresses) and nodes (their lines of `ready`) are, all by name."""
    targets = []
    for process, http_address in conductors.items():
        scheme, bare = split_address(http_address)
        labels = {"cluster": name, "process": process, "__scheme__": scheme}
        targets.append({"targets": [bare], "labels": labels})
    for process, ready in nodes.items():
        if port := ready.get("metrics_port"):
            where = f"{ready.get('metrics_host', '127.0.0.1')}:{port}"
            targets.append({"targets": [where], "labels": {"cluster": name, "process": process}})
    path = targets_path(cache_dir, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(targets, indent=1))
    os.replace(draft, path)


def processes_beside(cache_dir: str, address: str) -> list[tuple[str, str]] | None:
    """Return name and address of each process of the cluster whose conductor is at `address`.

    None: no file here names that conductor.
    """
    for file in sorted(targets_path(cache_dir, "").parent.glob("*.json")):
        named = _read(file)
        if any(same_address(where, address) for _, where in named):
            return named
    return None


def _read(file: Path) -> list[tuple[str, str]]:
    try:
        return [
            (
                target["labels"]["process"],
                f"{target['labels'].get('__scheme__', 'http')}://{target['targets'][0]}",
            )
            for target in json.loads(file.read_text())
        ]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return []


def same_address(one: str, other: str) -> bool:
    """Return whether two addresses of HTTP, each with a scheme or without, lead to one place."""
    return _normal(split_address(one)[1]) == _normal(split_address(other)[1])


def _normal(address: str) -> str:
    """Return `host:port` with one name for every loopback."""
    host, _, port = address.rpartition(":")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_loopback = False
    return f"localhost:{port}" if is_loopback else address
