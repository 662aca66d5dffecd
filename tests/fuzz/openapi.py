"""Schemathesis against the HTTP API: no call that a description of it allows, or forbids, makes it fail.

    python -m tests.fuzz.openapi [--examples 200] [--schemathesis PATH]

The server itself publishes no OpenAPI document (bodies are read by our own rules), so one is
made here from the same pydantic classes, for as long as the run takes. The conductor is the
real one, behind it a dispatcher that says hi. Needs the `schemathesis` package, by its command.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from conductor.api.openai_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.conductor.fakes import serving, spoken, tiny_model

BODIES = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
GETS = ("/v1/models", "/v1/models/{name}", "/health", "/version", "/metrics")
CHECKS = "not_a_server_error,unsupported_method"


def document() -> dict[str, Any]:
    """Return an OpenAPI description of what clients may call."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, body in BODIES.items():
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[body.__name__] = schema
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
        paths[path] = {
            "post": {"requestBody": {"content": content}, "responses": {"default": {"description": ""}}}
        }
    for path in GETS:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        call: dict[str, Any] = {"responses": {"default": {"description": ""}}}
        paths[path] = {"get": call | ({"parameters": [name]} if "{name}" in path else {})}
    info = {"title": "conductor", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


async def run(command: str, examples: int) -> int:
    """Return schemathesis's exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "openapi.json").write_text(json.dumps(document()))
        model = tiny_model(folder)
        async with serving(model, lambda request: spoken(model, "hi")) as api:
            arguments = ["run", str(folder / "openapi.json"), "--url", api.url, "--checks", CHECKS]
            process = await asyncio.create_subprocess_exec(
                command, *arguments, "--max-examples", str(examples), "--no-color", cwd=folder
            )
            return await process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.openapi", description=__doc__)
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--schemathesis", default="schemathesis")
    arguments = parser.parse_args()
    return asyncio.run(run(arguments.schemathesis, arguments.examples))


if __name__ == "__main__":
    raise SystemExit(main())
