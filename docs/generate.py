"""Reference pages made from what is in force: `python docs/generate.py` writes them.

reference/configuration.md is deploy/cluster.example.yaml as a table, reference/metrics.md what each kind of
process registers, reference/cli.md what `--help` of each command says. `generate_api.py` writes the
API's page. tests/deploy/test_docs_generated.py makes them again and compares.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from base.lifetime import Lifetime
from base.metrics import ConductorMetrics, NodeMetrics, StoreMetrics, export_supervised, process_registry
from deploy.cli import COMMANDS

DOCS = Path(__file__).resolve().parent
KEY = re.compile(r"^( *)(\w+):(?: (.*))?$")


def configuration() -> str:
    """Return the page of cluster.yaml's keys: path, default, and the comment above each."""
    rows: list[str] = []
    path: list[str] = []
    comment: list[str] = []
    section = ""
    meaning: dict[str, str] = {}
    head = True
    for line in (DOCS.parent / "deploy" / "cluster.example.yaml").read_text().splitlines():
        found = KEY.match(line)
        if line.strip().startswith("#") and not head:
            comment.append(line.strip().removeprefix("#").strip())
        elif found:
            indent, key, default = len(found[1]) // 2, found[2], found[3]
            path[indent:] = [key]
            said = " ".join(comment)
            if indent == 0 and default is None:
                section = key
                rows.append(f"\n## {key}\n\n{_wrapped(said)}| key | default | meaning |\n|---|---|---|\n")
            elif default is not None:
                if indent == 0 and section != "top":
                    section = "top"
                    rows.append("| key | default | meaning |\n|---|---|---|\n")
                meaning.setdefault(key, said)
                name = ".".join(path)
                rows.append(f"| `{name}` | `{default}` | {_cell(said or meaning[key])} |\n")
            comment = []
        elif not line.strip():
            head = False
            comment = []
    return (
        "# Configuration\n\nEvery key of cluster.yaml, made from `deploy/cluster.example.yaml`. "
        "Units are in the names:\n`_s` seconds, `_gib` and `_mib` binary giga- and megabytes.\n\n"
        + "".join(rows)
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _wrapped(text: str) -> str:
    """Return a paragraph of lines of at most 118 columns, or nothing."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + len(word) + 1 > 118:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line]) + "\n\n" if text else ""


def metrics() -> str:
    """Return the page of metrics, of each kind of process."""
    parts = [
        "# Metrics\n\nWhat each kind of process registers, made from `base/metrics.py`. Seconds and bytes. "
        "vLLM's names are exported\nbeside ours, from the same samples.\n"
    ]
    for title, kind in (
        ("Every process", "process"),
        ("Conductor", "conductor"),
        ("Node", "node"),
        ("Store", "store"),
    ):
        parts.append(f"\n## {title}\n\n| metric | type | labels | what |\n|---|---|---|---|\n")
        parts += _rows(kind)
    return "".join(parts)


def _rows(kind: str) -> Iterator[str]:
    registry = process_registry() if kind == "process" else CollectorRegistry()
    made = {
        "process": lambda: export_supervised(registry, Lifetime()),
        "conductor": lambda: ConductorMetrics(registry, "model"),
        "node": lambda: NodeMetrics(registry),
        "store": lambda: StoreMetrics(registry),
    }[kind]()
    own = getattr(made, "__dict__", {}).values()
    labels = {each._name: each._labelnames for each in own if getattr(each, "_labelnames", ())}
    for family in registry.collect():
        if not family.name.startswith("vllm"):
            names = {name for sample in family.samples for name in sample.labels} - {"le"}
            shown = ", ".join(f"`{name}`" for name in labels.get(family.name, sorted(names)))
            suffix = "_total" if family.type == "counter" else ""
            yield f"| `{family.name}{suffix}` | {family.type} | {shown} | {_cell(family.documentation)} |\n"


def commands() -> str:
    """Return the page of commands: what --help says of each."""
    parts = ["# Commands\n\nWhat `conductor COMMAND --help` says, for each.\n"]
    for name, (_, what) in COMMANDS.items():
        parts.append(f"\n## conductor {name}\n\n{what}\n\n```text\n{_help(name)}\n```\n")
    return "".join(parts)


def _help(name: str) -> str:
    """Return the help of a command, 100 columns wide and without colours or boxes."""
    environment = {
        **os.environ,
        "COLUMNS": "100",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "_TYPER_STANDARD_TRACEBACK": "1",
    }
    code = "import typer.core, sys; typer.core.HAS_RICH = False; typer.core.rich = None\n"
    code += f"from deploy.cli import main; sys.argv[0] = 'conductor'; main([{name!r}, '--help'])"
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return "\n".join(line.rstrip() for line in shown.stdout.strip().splitlines())


def files() -> dict[Path, str]:
    """Return what is written where."""
    reference = DOCS / "reference"
    return {
        reference / "configuration.md": configuration(),
        reference / "metrics.md": metrics(),
        reference / "cli.md": commands(),
    }


def main() -> None:
    """Write the pages."""
    for file, text in files().items():
        file.write_text(text)


if __name__ == "__main__":
    main()
