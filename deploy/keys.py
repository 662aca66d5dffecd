"""`conductor keys`: the API keys of a cluster, in the file that `server.keys_file` names."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from base.errors import ConfigError
from conductor.api.keys import Key, KeyFile, Quota, change_keys, made_key, read_keys

MAX_TENANT_CHARS = 128
FILE = Path("~/.config/conductor-cluster/keys.json")


def main(
    words: Annotated[
        list[str], typer.Argument(help="add NAME, list, or remove NAME", metavar="ACTION [NAME]")
    ],
    file: Annotated[Path, typer.Option(help="As in server.keys_file")] = FILE,
    tenant: Annotated[str, typer.Option(help="Whose key; default: NAME. Keys of a tenant share all")] = "",
    rate: Annotated[float | None, typer.Option(help="Requests a second of the tenant; 0: any")] = None,
    burst: Annotated[int | None, typer.Option(help="Requests at once after a rest")] = None,
    concurrent: Annotated[int | None, typer.Option(help="Requests in progress; 0: any")] = None,
    operator: Annotated[bool, typer.Option(help="Also for what is about the cluster")] = False,
    critical: Annotated[bool, typer.Option(help="Its requests may go before all others")] = False,
) -> None:
    """Make, list and remove API keys; a running conductor sees it within a second."""
    action, name = (*words, "")[:2]
    path = file.expanduser()
    asked = {"requests_per_s": rate, "burst": burst, "concurrent": concurrent}
    limits = {key: value for key, value in asked.items() if value is not None}
    try:
        if len(words) > 2:
            raise ConfigError(f"add NAME, list or remove NAME is wanted, not also {' '.join(words[2:])}")
        if action == "add" and name:
            key, secret = made_key(name, tenant or name, operator, critical)
            path.parent.mkdir(parents=True, exist_ok=True)
            change_keys(path, lambda: _with(path, key, limits))
            print("This key is shown once and kept nowhere:", file=sys.stderr)
            print(secret)
        elif action == "remove" and name:
            change_keys(path, lambda: _without(path, name))
        elif action == "list":
            for key in read_keys(path).keys:
                rights = f"{'  operator' if key.operator else ''}{'  critical' if key.critical else ''}"
                print(f"{key.name}\t{key.tenant}\tck-{key.id}-...{rights}")
        else:
            raise ConfigError("add NAME, list or remove NAME is wanted")
    except (ConfigError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error


def _read(path: Path) -> KeyFile:
    return read_keys(path) if path.exists() else KeyFile({}, ())


def _with(path: Path, added: Key, limits: dict[str, Any]) -> KeyFile:
    file = _read(path)
    if any(key.name == added.name for key in file.keys):
        raise ConfigError(f"{path}: a key named {added.name} is there already")
    if not (added.tenant.isascii() and added.tenant.isprintable() and len(added.tenant) <= MAX_TENANT_CHARS):
        raise ConfigError(f"the tenant's name: at most {MAX_TENANT_CHARS} printable ASCII characters")
    quota = dataclasses.replace(file.tenants.get(added.tenant, Quota()), **limits)
    return KeyFile({**file.tenants, added.tenant: quota}, (*file.keys, added))


def _without(path: Path, name: str) -> KeyFile:
    file = _read(path)
    left = tuple(key for key in file.keys if key.name != name)
    if len(left) == len(file.keys):
        raise ConfigError(f"{path}: there is no key named {name}")
    tenants = {key.tenant: file.tenants[key.tenant] for key in left}
    return KeyFile(tenants, left)
