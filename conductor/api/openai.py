"""The HTTP API: OpenAI's, with vLLM's extras, and what operators ask of a server.

    POST /v1/chat/completions   POST /v1/completions     openai_generation.py
    GET  /v1/models             GET  /v1/models/{id}
    POST /tokenize              POST /detokenize
    GET  /health                GET  /metrics            GET  /version
    GET  /ui                    web_page.py

A route that reads a body is answered by `_Call`, from its first byte to its last: it
counts as in progress while its body is read and its answer streams, it is given up when
its client leaves, and everything that goes wrong in it becomes OpenAI's error object
there.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from inspect import isawaitable
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from base.clock import wall_clock_s
from base.errors import InvalidRequestError, ServeError
from base.logs import event
from base.metrics import CONTENT_TYPE, exposition
from base.request import Slo
from conductor.api.access import CHARGE, CRITICAL
from conductor.api.body_bounds import check_structure
from conductor.api.completion import Completions, InProgress
from conductor.api.headers import TENANT_HEADER, Caller, header_slo, header_traceparent, require_own_page
from conductor.api.http_reply import BodyError, ClientGoneError, Reply, read_body, while_connected
from conductor.api.openai_errors import HttpError, http_error, internal_error
from conductor.api.openai_format import to_json
from conductor.api.openai_generation import Generation
from conductor.api.openai_schema import DetokenizeBody, TokenizeBody, chat_messages, read_long_body
from conductor.api.openapi import openapi
from conductor.api.options import check_request_id, require_model
from conductor.api.prompt import chat_token_ids, text_token_ids, token_ids_text
from conductor.api.served_model import named_sampling
from conductor.api.web_page import READ, add_web_page

log = logging.getLogger(__name__)

Work = Callable[[bytes, Caller, Reply], Coroutine[Any, Any, None]]


def openai_app(
    completions: Completions,
    default_slo: Slo,
    max_body_bytes: int,
    rng: random.Random,
    reports: Mapping[str, Callable[..., object]] | None = None,
) -> FastAPI:
    """Return the ASGI application.

    Args:
        completions: Runs what clients ask.
        default_slo: Of requests whose headers name none.
        max_body_bytes: Longer bodies are refused.
        rng: Draws request ids and seeds.
        reports: What answers GET at other paths, with JSON, or an awaitable of it; see `server.listening`.
    """
    # Bodies are read by our own rules, so FastAPI's description of them would be empty.
    app = _Api(openapi_url=None)
    generation = Generation(completions, rng)
    texts = _Texts(completions)
    posts: tuple[tuple[str, Work], ...] = (
        ("/v1/chat/completions", generation.chat),
        ("/v1/completions", generation.completion),
        ("/tokenize", texts.tokenize),
        ("/detokenize", texts.detokenize),
    )
    calls: dict[str, Callable[[], ASGIApp]] = {}
    for path, work in posts:
        make = partial(_Call, work, completions, default_slo, max_body_bytes, rng)
        calls[path] = make
        app.add_api_route(path, _answered_before, methods=["POST"], name=path)
    _add_operator_routes(app, completions)
    add_web_page(app)
    for path, report in (reports or {}).items():
        answer = _report_on(report) if path.endswith("/{name}") else _report(report)
        app.add_api_route(path, answer, methods=READ, name=path)
    app.add_exception_handler(HTTPException, _not_found)
    app.calls = calls
    return app


class _Api(FastAPI):
    """Answers the calls that read a body before FastAPI's middleware and the search for their routes, which
    take longer than all else that the HTTP side does for a request."""

    calls: Mapping[str, Callable[[], ASGIApp]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        make = self.calls.get(scope.get("path", "")) if scope.get("method") == "POST" else None
        await (super().__call__ if make is None else make())(scope, receive, send)


async def _answered_before() -> Response:
    """Stand for one of `_Api.calls` in the table of routes, which knows of other methods."""
    raise AssertionError("no request comes here")


def _report(report: Callable[[], object]) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return _json(200, await _told(report()))

    return answer


def _report_on(report: Callable[[str], object]) -> Callable[[HttpRequest], Awaitable[Response]]:
    # From the request: for a parameter FastAPI imports the old pydantic, half a second at the start.
    async def answer(request: HttpRequest) -> Response:
        name = request.path_params["name"]
        told = await _told(report(name))
        if told is None:
            return _error(HttpError(404, "invalid_request_error", None, f"{name!r} is not known"))
        return _json(200, told)

    return answer


async def _told(report: object) -> object:
    """Return what a report says, at once or after a while."""
    return await report if isawaitable(report) else report


class _Call:
    """One call, as an ASGI application."""

    def __init__(
        self,
        work: Work,
        completions: Completions,
        default_slo: Slo,
        max_body_bytes: int,
        rng: random.Random,
    ) -> None:
        self._work = work
        self._completions = completions
        self._default_slo = default_slo
        self._max_body_bytes = max_body_bytes
        self._request_id = f"{rng.getrandbits(64):016x}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, self._request_id)
        try:
            # Not Starlette's, which looks through all of them for each.
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            tenant = headers.get(TENANT_HEADER, "")
            require_own_page(headers)
            with self._completions.call(tenant) as call:
                if given := headers.get("x-request-id"):
                    check_request_id(given)
                    reply.request_id = given
                slo = header_slo(headers, self._default_slo)
                charge = _charging(call, scope.get(CHARGE))
                is_critical = scope.get(CRITICAL, False)
                caller = Caller(
                    call.arrived_at_s, slo, tenant, header_traceparent(headers), is_critical, charge
                )
                declared = int(headers.get("content-length", "0"))
                body = await read_body(receive, declared, self._max_body_bytes, call.take_bytes)
                await check_structure(body)
                await while_connected(receive, self._work(body, caller, reply))
        except ClientGoneError:
            event(log, "client left", level=logging.DEBUG, request_id=reply.request_id)
        except BodyError as error:
            await reply.fail(HttpError(error.status, "invalid_request_error", None, str(error)))
        except ServeError as error:
            await reply.fail(http_error(error))
        except Exception:
            # The border: nobody above could tell the client.
            log.exception("call failed request_id=%s", reply.request_id)
            await reply.fail(internal_error())


def _charging(call: InProgress, quota: Callable[[int], None] | None) -> Callable[[int], None]:
    """Return what counts more sequences: among all in progress, and in the tenant's quota if there is one."""

    def charge(count: int) -> None:
        call.take_places(count)
        if quota is not None and count:
            quota(count)

    return charge


class _Texts:
    """Answers the calls that only turn text to token ids and back."""

    def __init__(self, completions: Completions) -> None:
        self._model = completions.model

    async def tokenize(self, raw: bytes, caller: Caller, reply: Reply) -> None:
        body = await read_long_body(raw, TokenizeBody)
        require_model(self._model, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("prompt, or messages: one of them is wanted", "prompt")
        if body.messages is not None:
            token_ids = await chat_token_ids(
                self._model,
                chat_messages(body.messages),
                body.add_generation_prompt is not False,
                body.chat_template_kwargs,
                bool(body.parse_special_tokens),
            )
        else:
            token_ids = await text_token_ids(
                self._model, body.prompt or "", body.add_special_tokens is not False
            )
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": self._model.max_model_len,
            "tokens": token_ids,
        }
        await reply.whole(200, to_json(answer).encode())

    async def detokenize(self, raw: bytes, caller: Caller, reply: Reply) -> None:
        body = await read_long_body(raw, DetokenizeBody)
        require_model(self._model, body.model)
        text = await token_ids_text(self._model, body.tokens, "tokens", skip_special_tokens=False)
        await reply.whole(200, to_json({"prompt": text}).encode())


def _add_operator_routes(app: FastAPI, completions: Completions) -> None:
    model = completions.model
    card = {
        "id": model.name,
        "object": "model",
        "created": int(wall_clock_s()),
        "owned_by": "conductor",
        "max_model_len": model.max_model_len,
        "sampling": named_sampling(model.sampling),
    }

    @app.api_route("/v1/models", methods=READ)
    async def models() -> Response:
        return _json(200, {"object": "list", "data": [card]})

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def one_model(request: HttpRequest) -> Response:
        name = request.path_params["name"]
        try:
            require_model(model, name)
        except ServeError as error:
            return _error(http_error(error))
        return _json(200, card)

    @app.api_route("/health", methods=READ)
    async def health() -> Response:
        return _json(200, {"status": "ok"}) if completions.is_ready else _json(503, {"status": "unavailable"})

    @app.api_route("/metrics", methods=READ)
    async def metrics() -> Response:
        return Response(exposition(completions.metrics.registry), media_type=CONTENT_TYPE)

    described = to_json(openapi())

    @app.api_route("/openapi.json", methods=READ)
    async def description() -> Response:
        return Response(described, media_type="application/json")

    @app.api_route("/version", methods=READ)
    async def show_version() -> Response:
        return _json(200, {"version": _version()})


async def _not_found(request: HttpRequest, error: Exception) -> Response:
    """Answer what FastAPI itself refuses: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    told = HttpError(error.status_code, "invalid_request_error", None, message)
    # `Allow`, which goes with 405, is among the error's own.
    return Response(told.body, told.status, {**told.headers, **(error.headers or {})})


def _json(status: int, value: Any) -> Response:
    return Response(to_json(value), status_code=status, media_type="application/json")


def _error(error: HttpError) -> Response:
    return Response(error.body, status_code=error.status, headers=dict(error.headers))


def _version() -> str:
    try:
        return version("conductor-cluster")
    except PackageNotFoundError:
        # Run from a source tree that was not installed.
        return "0+unknown"
