"""The API reference: `python docs/generate_api.py` writes openapi.json and api.md of docs/reference.

Made from what is in force: the bodies that `conductor/api/openai_schema.py` reads, and the protos with their
comments. A test compares. What the fields mean, and how the two listeners behave, is in
docs/reference/client-api.md, which people write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conductor.api.openai_fields import IGNORED, REFUSED
from conductor.api.routes import ROUTES, openapi

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ("inference", "nodes", "transfer", "kvstore")


def reference() -> str:
    """Return docs/reference/api.md."""
    parts = [
        "# API reference\n\nMade by `python docs/generate_api.py`; "
        "[the API guide](client-api.md) says what the fields do.\n\n"
    ]
    parts.append("## HTTP\n\n| | |\n|---|---|\n")
    parts += [f"| `{route.method} {route.path}` | {route.what} |\n" for route in ROUTES if route.what]
    described = openapi()["components"]["schemas"]
    for name, schema in described.items():
        if "properties" in schema:
            parts.append(f"\n### {name}\n\n| field | | |\n|---|---|---|\n")
            required = schema.get("required", ())
            for field, kind in schema["properties"].items():
                parts.append(f"| `{field}` | {_kind(kind)} | {'required' if field in required else ''} |\n")
    parts.append(_other_fields())
    parts.append("\n## gRPC\n")
    for proto in PROTOS:
        parts += _proto((ROOT / "protos" / f"{proto}.proto").read_text(), f"protos/{proto}.proto")
    return "".join(parts)


def _other_fields() -> str:
    """Return the table of OpenAI's and vLLM's fields that the bodies above do not have."""
    rows = ["\n### Fields that are refused or ignored\n\n| field | |\n|---|---|\n"]
    for name in sorted({**REFUSED, **IGNORED}):
        if name in IGNORED:
            rows.append(f"| `{name}` | ignored: it {IGNORED[name]} |\n")
        else:
            taken = [f"`{json.dumps(value)}`" for value in REFUSED[name]]
            rows.append(f"| `{name}` | refused by name, but for {' and '.join(taken)} |\n")
    return "".join(rows)


def _kind(schema: dict[str, Any]) -> str:
    """Return a JSON schema in a few words."""
    if "$ref" in schema:
        return f"[{_last(schema['$ref'])}](#{_last(schema['$ref']).lower()})"
    if "anyOf" in schema or "oneOf" in schema:
        kinds = schema.get("anyOf") or schema["oneOf"]
        return " or ".join(dict.fromkeys(_kind(each) for each in kinds if each.get("type") != "null"))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = [
        f"{word} {schema[key]:g}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema
    ]
    return " ".join([schema.get("type", "any"), *bounds])


def _last(reference_: str) -> str:
    return reference_.rpartition("/")[2]


BLOCK = re.compile(r"((?:^//.*\n)*)^(message|service|enum) (\w+) \{\n((?:^(?!\}).*\n)*)\}", re.MULTILINE)
LINE = re.compile(r"^\s*(?P<what>[^/;{}]+?)(?: = (?P<number>\d+))?(?: \{\})?;(?:\s*//\s?(?P<comment>.*))?$")


def _proto(text: str, title: str) -> Iterator[str]:
    head = re.match(r"((?:^//.*\n)+)", text, re.MULTILINE)
    yield f"\n### {title}\n\n{_prose(head[1] if head else '')}"
    for comment, kind, name, body in BLOCK.findall(text):
        yield f"\n#### {kind} {name}\n\n{_prose(comment)}"
        yield from _fields(body)


def _fields(body: str) -> Iterator[str]:
    """Yield the rows of a block: `what = number;  // comment`, comments above or behind."""
    yield "| | | |\n|---|---|---|\n"
    above: list[str] = []
    for line in body.splitlines():
        found = LINE.match(line)
        if line.strip().startswith("//"):
            above.append(line.strip().removeprefix("//").strip())
        elif found:
            text = " ".join([*above, found["comment"] or ""]).strip().replace("|", "\\|")
            yield f"| `{found['what'].strip()}` | {found['number'] or ''} | {text} |\n"
            above = []


def _prose(comment: str) -> str:
    lines = [line.removeprefix("//").strip() for line in comment.splitlines()]
    return "\n".join(lines) + ("\n\n" if lines else "")


def files() -> dict[Path, str]:
    """Return what is written where."""
    docs = ROOT / "docs" / "reference"
    return {docs / "openapi.json": json.dumps(openapi(), indent=1) + "\n", docs / "api.md": reference()}


def main() -> None:
    """Write both files."""
    for path, text in files().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
