"""The HTTP listener as an ASGI application: it admits each call and answers it by its line in `routes.py`.

A route that reads a body counts as a call in progress from its first byte to its last: it is given up when
its client leaves, and everything that goes wrong in it becomes OpenAI's error object here. Its handler writes
the answer. Other routes return theirs.

The look-up is ours, and the gate and the answer are of the one route that it finds: a router in the middle of
a call costs more than all else that the HTTP side does for a request.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from functools import partial
from inspect import isawaitable
from typing import Any

from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from base.clock import wall_clock_s
from base.errors import ServeError, UnauthenticatedError
from base.logs import event
from base.off_loop import on_body
from base.request import Slo
from conductor.api.access import Authorizer, Client, Who
from conductor.api.backend import Backend
from conductor.api.body_bounds import check_structure
from conductor.api.completion import Completions
from conductor.api.headers import Caller, require_own_page, said_once
from conductor.api.http_errors import OPENAI_ERRORS, ErrorForm, HttpError, http_error, internal_error
from conductor.api.http_reply import (
    BodyError,
    ClientGoneError,
    Reply,
    json_response,
    read_body,
    to_json,
    while_connected,
)
from conductor.api.openai_schema import read_body as body_of
from conductor.api.options import check_request_id
from conductor.api.responses.held import HeldResponses
from conductor.api.routes import ROUTES, HttpRoute, errors_at, routes_at

log = logging.getLogger(__name__)


class HttpApi:
    """An ASGI application. Owned by the event loop."""

    def __init__(
        self,
        completions: Completions,
        default_slo: Slo,
        max_body_bytes: int,
        rng: random.Random,
        reports: Mapping[str, Callable[..., object]] | None = None,
        authorizer: Authorizer | None = None,
    ) -> None:
        """Begin. `listening` (`server.py`) describes the arguments; without `authorizer` all are admitted.

        Raises KeyError for a report that no route waits for.
        """
        self._backend = Backend(completions, rng, int(wall_clock_s()), HeldResponses(completions.clock))
        self._default_slo = default_slo
        self._max_body_bytes = max_body_bytes
        self._authorizer = authorizer or Authorizer()
        waiting = {route.path: route for route in ROUTES if route.handler is None}
        self._reports: dict[HttpRoute, Callable[..., Any]] = {
            waiting[path]: report for path, report in (reports or {}).items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        at_path, name = routes_at(scope["path"])
        route = at_path.get("GET" if scope["method"] == "HEAD" else scope["method"])
        gated = route or next(iter(at_path.values()), None)
        try:
            # Not Starlette's, which looks through all of them for each.
            pairs = [(key.decode("latin-1"), text.decode("latin-1")) for key, text in scope["headers"]]
            headers = said_once(pairs)
            with self._authorizer.call(gated.who if gated else Who.OPERATORS, headers) as client:
                if route is None:
                    response = _not_served(scope, at_path)
                elif route.body is None or (route.handler is None and route not in self._reports):
                    response = await self._read(route, name, scope)
                else:
                    await self._answer(route, headers, client, receive, send)
                    return
        except ServeError as error:
            # The gate's: what a route raises is answered where it is called.
            response = _refusal(error, errors_at(scope["path"]))
        await response(scope, receive, send)

    async def _read(self, route: HttpRoute, name: str, scope: Scope) -> Response:
        """Return the answer of a route that reads no body."""
        handler = partial(route.handler, self._backend) if route.handler else self._reports.get(route)
        if handler is None:
            return _not_served(scope, {})
        try:
            found = handler(name) if route.has_name else handler()
            found = await found if isawaitable(found) else found
        except ServeError as error:
            return _error(http_error(error))
        if found is None:
            return _error(HttpError(404, "invalid_request_error", None, f"{name!r} is not known"))
        return found if isinstance(found, Response) else json_response(found)

    async def _answer(
        self, route: HttpRoute, headers: Mapping[str, str], client: Client, receive: Receive, send: Send
    ) -> None:
        """Read a call's body and have its handler write the answer."""
        reply = Reply(send, f"{self._backend.rng.getrandbits(64):016x}", route.errors)
        try:
            require_own_page(headers)
            with self._backend.completions.call(client) as call:
                reply.when_started = call.answers
                if given := headers.get("x-request-id"):
                    check_request_id(given)
                    reply.request_id = given
                caller = call.caller(headers, self._default_slo)
                declared = int(headers.get("content-length", "0"))
                raw = await read_body(receive, declared, self._max_body_bytes, call.take_bytes, call.cut_off)
                await check_structure(raw)
                await while_connected(receive, self._handled(route, raw, caller, reply), call.cut_off)
        except ClientGoneError:
            event(log, "client left", level=logging.DEBUG, request_id=reply.request_id)
        except BodyError as error:
            await reply.fail(HttpError(error.status, "invalid_request_error", None, str(error)))
        except ServeError as error:
            await reply.fail(http_error(error))
        except Exception:
            # The border: nobody above could answer the client.
            log.exception("call failed request_id=%s", reply.request_id)
            await reply.fail(internal_error())

    async def _handled(self, route: HttpRoute, raw: bytes, caller: Caller, reply: Reply) -> None:
        body = await on_body(raw, partial(body_of, into=route.body))
        if route.handler is not None:
            await route.handler(self._backend, body, caller, reply)
        else:
            answer = await self._reports[route](body)
            await reply.whole([to_json(answer).encode()])


def _not_served(scope: Scope, at_path: Mapping[str, HttpRoute]) -> Response:
    """Return the answer for an unknown path, or for a method that a path has not."""
    path = scope["path"]
    if at_path:
        allowed = ", ".join("GET, HEAD" if method == "GET" else method for method in at_path)
        return _unknown(scope, 405, "Method Not Allowed", allow=allowed)
    if path.endswith("/") and routes_at(path.rstrip("/"))[0]:
        query = scope["query_string"].decode("latin-1")
        return RedirectResponse(path.rstrip("/") + (f"?{query}" if query else ""))
    return _unknown(scope, 404, "Not Found")


def _unknown(scope: Scope, status: int, reason: str, **headers: str) -> Response:
    said = f"{scope['method']} {scope['path']}: {reason}"
    return _error(HttpError(status, "invalid_request_error", None, said), errors_at(scope["path"]), **headers)


def _error(error: HttpError, errors: ErrorForm = OPENAI_ERRORS, **headers: str) -> Response:
    return Response(errors.body(error, ""), status_code=error.status, headers={**error.headers, **headers})


def _refusal(refused: ServeError, errors: ErrorForm) -> Response:
    # The body was not read, so nothing can follow it on this connection.
    challenge = {"www-authenticate": "Bearer"} if isinstance(refused, UnauthenticatedError) else {}
    return _error(http_error(refused), errors, connection="close", **challenge)
