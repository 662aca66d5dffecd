"""The table of the HTTP listener: each path, its method, who may call it, its handler, body and description.

All that depends on a path is read from here: who is admitted (`access.py`), what answers (`http_api.py`),
/openapi.json, and the reference in docs/ (`docs/generate_api.py`). A new client API is a file with its
handlers, and a line for each here.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from starlette.responses import RedirectResponse, Response

from conductor.api import about
from conductor.api.access import Who
from conductor.api.backend import Backend
from conductor.api.embeddings.generation import EmbeddingsBody, embeddings
from conductor.api.http_errors import ANTHROPIC_ERRORS, OPENAI_ERRORS, RESPONSES_ERRORS, ErrorForm
from conductor.api.http_reply import to_json
from conductor.api.messages.generation import count_tokens, create_message
from conductor.api.messages.schema import CountTokensBody, MessagesBody
from conductor.api.openai_generation import chat, completion
from conductor.api.openai_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from conductor.api.replay_body import ReplayBody
from conductor.api.responses.generation import create_response
from conductor.api.responses.schema import ResponsesBody
from conductor.api.texts import detokenize, tokenize
from conductor.api.web_page import MODULES, page

SCHEMAS = "#/components/schemas/"
NAME = "{name}"


class HttpRoute(NamedTuple):
    """One path of the HTTP listener, and what it answers to one method."""

    path: str
    """A path may end with `{name}`, which stands for any text and is handed to the handler."""
    who: Who
    handler: Callable[..., Any] | None
    """Where there is a body: an async function of the backend, the body, the caller and the reply, which it
    writes. Elsewhere: a function of the backend (and the name) that returns JSON, a Response, an awaitable of
    either, or None for an unknown name. None: `__main__` hands one in, which takes no backend, and returns
    what is answered, of the body where there is one."""
    what: str
    """One line for the API reference; empty: the path is not described."""
    body: Any = None
    """The schema that a body is read by; None: no body is read."""
    errors: ErrorForm = OPENAI_ERRORS
    """How errors are worded."""

    @property
    def method(self) -> str:
        """POST where there is a body, else GET, which answers HEAD too."""
        return "GET" if self.body is None else "POST"

    @property
    def has_name(self) -> bool:
        return self.path.endswith(NAME)


async def _described(backend: Backend) -> Response:
    # Made once, in 80 ms, for anybody who asks.
    return Response(await asyncio.to_thread(openapi_json), media_type="application/json")


EVERYBODY, CLIENTS, OPERATORS, SCRAPERS = Who

ROUTES = (
    HttpRoute(
        "/v1/chat/completions", CLIENTS, chat, "The next turn of a chat; with `stream`, as events.", ChatBody
    ),
    HttpRoute(
        "/v1/completions",
        CLIENTS,
        completion,
        "What follows each prompt; with `stream`, as events.",
        CompletionBody,
    ),
    HttpRoute(
        "/v1/responses",
        CLIENTS,
        create_response,
        "The next response, as OpenAI's newer API has it; with `stream`, as events.",
        ResponsesBody,
        RESPONSES_ERRORS,
    ),
    HttpRoute(
        "/v1/messages",
        CLIENTS,
        create_message,
        "The next message, as Anthropic's API has it; with `stream`, as events.",
        MessagesBody,
        ANTHROPIC_ERRORS,
    ),
    HttpRoute(
        "/v1/messages/count_tokens",
        CLIENTS,
        count_tokens,
        "How many tokens such a conversation has.",
        CountTokensBody,
        ANTHROPIC_ERRORS,
    ),
    HttpRoute("/v1/embeddings", CLIENTS, embeddings, "A vector of each text.", EmbeddingsBody),
    HttpRoute("/v1/models", CLIENTS, about.models, "The one model that is served."),
    HttpRoute("/v1/models/{name}", CLIENTS, about.one_model, "The same, by its name."),
    HttpRoute("/tokenize", CLIENTS, tokenize, "The token ids of a text or a chat.", TokenizeBody),
    HttpRoute("/detokenize", CLIENTS, detokenize, "The text of token ids.", DetokenizeBody),
    HttpRoute(
        "/health", EVERYBODY, about.health, "200 if a request that came now would be served, else 503."
    ),
    HttpRoute("/metrics", SCRAPERS, about.metrics, "Prometheus text."),
    HttpRoute("/version", CLIENTS, about.show_version, "Of the server."),
    HttpRoute("/status", OPERATORS, None, "Nodes, blocks, queues."),
    HttpRoute("/v1/explain", OPERATORS, None, "The last hundred attempts to place a request, newest first."),
    HttpRoute("/v1/explain/{name}", OPERATORS, None, "Why a request went where it went, and how it went."),
    HttpRoute(
        "/v1/links/{name}",
        OPERATORS,
        None,
        "Sends KV from PREFILL_NODE to DECODE_NODE, NAME being both with a comma.",
    ),
    HttpRoute("/v1/page/{name}", OPERATORS, None, "The data of /ui: history, nodes, requests."),
    HttpRoute(
        "/v1/replay",
        OPERATORS,
        None,
        "A trace, or the last hour's traffic, on other nodes: what `conductor replay` reports.",
        ReplayBody,
    ),
    HttpRoute("/openapi.json", EVERYBODY, _described, "This description."),
    HttpRoute("/ui", EVERYBODY, page("index.html", "text/html"), "The same for people, as a page."),
    *(HttpRoute(f"/ui/{name}.js", EVERYBODY, page(f"{name}.js", "text/javascript"), "") for name in MODULES),
    HttpRoute("/ui/style.css", EVERYBODY, page("style.css", "text/css"), ""),
    HttpRoute("/", EVERYBODY, lambda backend: RedirectResponse("/ui"), "Leads to the page."),
)


def _by_path(routes: Iterable[HttpRoute]) -> dict[str, dict[str, HttpRoute]]:
    table: dict[str, dict[str, HttpRoute]] = {}
    for route in routes:
        table.setdefault(route.path.removesuffix(NAME), {})[route.method] = route
    return table


_PLAIN = _by_path(route for route in ROUTES if not route.has_name)
_NAMED = _by_path(route for route in ROUTES if route.has_name)


def routes_at(path: str) -> tuple[Mapping[str, HttpRoute], str]:
    """Return the routes at `path` by method, none for an unknown one, and the name that ends it."""
    if found := _PLAIN.get(path):
        return found, ""
    for folder, found in _NAMED.items():
        if path.startswith(folder) and path != folder:
            return found, path[len(folder) :]
    return {}, ""


def errors_at(path: str) -> ErrorForm:
    """Return how errors are worded at `path`: below a path of an API as there."""
    return next((route.errors for route in ROUTES if f"{path}/".startswith(f"{route.path}/")), OPENAI_ERRORS)


def openapi() -> dict[str, Any]:
    """Return the HTTP API as OpenAPI 3.1."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in ROUTES:
        if not route.what:
            continue
        operation: dict[str, Any] = {
            "summary": route.what,
            "responses": {"200": {"description": "OK"}, "default": {"description": "OpenAI's error object"}},
        }
        if route.has_name:
            name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [name]
        if route.body is not None:
            schema = route.body.model_json_schema(ref_template=f"{SCHEMAS}{{model}}")
            schemas |= schema.pop("$defs", {})
            schemas[route.body.__name__] = schema
            content = {"application/json": {"schema": {"$ref": f"{SCHEMAS}{route.body.__name__}"}}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Conductor", "version": "1"},
        "paths": paths,
        "components": {"schemas": dict(sorted(schemas.items()))},
    }


@functools.cache
def openapi_json() -> str:
    """Return `openapi()` as JSON, made once."""
    return to_json(openapi())
