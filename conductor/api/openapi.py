"""The HTTP API, described: every path of the listener, and OpenAPI 3.1 made of it and of the bodies' schemas.

Served as /openapi.json, and written into docs/ by `deploy/reference.py`. A test holds the table of routes to
the application's own.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from conductor.api.openai_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

SCHEMAS = "#/components/schemas/"


class Route(NamedTuple):
    """One path of the HTTP listener."""

    method: str
    path: str
    what: str
    body: Any = None


ROUTES = (
    Route("post", "/v1/chat/completions", "The next turn of a chat; with `stream`, as events.", ChatBody),
    Route("post", "/v1/completions", "What follows each prompt; with `stream`, as events.", CompletionBody),
    Route("get", "/v1/models", "The one model that is served."),
    Route("get", "/v1/models/{name}", "The same, by its name."),
    Route("post", "/tokenize", "The token ids of a text or a chat.", TokenizeBody),
    Route("post", "/detokenize", "The text of token ids.", DetokenizeBody),
    Route("get", "/health", "200 if a request that came now would be served, else 503."),
    Route("get", "/metrics", "Prometheus text."),
    Route("get", "/version", "Of the server."),
    Route("get", "/status", "Nodes, blocks, queues."),
    Route("get", "/v1/explain", "The last hundred attempts to place a request, newest first."),
    Route("get", "/v1/explain/{name}", "Why a request went where it went, and how it went."),
    Route(
        "get", "/v1/links/{name}", "Sends KV from PREFILL_NODE to DECODE_NODE, NAME being both with a comma."
    ),
    Route("get", "/v1/panels", "The dashboards' panels and their queries."),
    Route("get", "/v1/panels/{name}", "What a panel shows of the last hour, by `server.prometheus`."),
    Route("get", "/openapi.json", "This description."),
    Route("get", "/ui", "The same for people, as a page."),
    Route("get", "/", "Leads to the page."),
)


@functools.cache
def openapi() -> dict[str, Any]:
    """Return the HTTP API as OpenAPI 3.1."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in ROUTES:
        operation: dict[str, Any] = {
            "summary": route.what,
            "responses": {"200": {"description": "OK"}, "default": {"description": "OpenAI's error object"}},
        }
        if "{name}" in route.path:
            name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [name]
        if route.body is not None:
            schema = route.body.model_json_schema(ref_template=f"{SCHEMAS}{{model}}")
            schemas |= schema.pop("$defs", {})
            schemas[route.body.__name__] = schema
            content = {"application/json": {"schema": {"$ref": f"{SCHEMAS}{route.body.__name__}"}}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(route.path, {})[route.method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Conductor", "version": "1"},
        "paths": paths,
        "components": {"schemas": dict(sorted(schemas.items()))},
    }
