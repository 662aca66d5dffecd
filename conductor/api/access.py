"""Who may call what, over gRPC and HTTP alike.

    health, the page's files   everybody: they tell nothing; metrics, if `server.open_metrics`
    inference, models, texts   clients: where there are keys, who shows one
    everything else            operators: where there are keys, who shows an operator's

This is the one table, and what stands in no line of it needs an operator: a route that is
added is closed. Of an HTTP call nothing but its head was read when it is decided.

Nodes have a listener of their own (`conductor/serving/attach.py`).

With keys, a call's tenant is its key's, whatever its headers say, and its requests may be critical if the key
says so. Without them, configuration names the tenants whose may. A tenant's name is in the
root of its block hashes (`base/block_hash.py`), so tenants share no cached prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from base.errors import ForbiddenError, ServeError, UnauthenticatedError
from base.rpc import Context
from conductor.api.headers import TENANT_HEADER
from conductor.api.keys import ClientRequest, KeyRing
from conductor.api.openai_errors import http_error
from conductor.api.web_page import FILES

OPEN_SERVICE = "/grpc.health.v1.Health/"
CLIENT_SERVICE = "/conductor.v1.Inference/"
CLIENT_PATHS = {
    *("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/version")
}
CLIENT_FOLDER = "/v1/models/"
BEARER = "bearer "
CHARGE = "conductor.charge"
"""Names, in an HTTP call's scope, what counts more sequences in its tenant's quota."""

CRITICAL = "conductor.critical"
"""Names, in an HTTP call's scope, whether its requests may be of the critical class."""


class Client(NamedTuple):
    """Who calls, as far as keys and configuration say."""

    tenant: str
    may_be_critical: bool


class Access:
    """Admits calls. Owned by the event loop."""

    def __init__(
        self, keys: KeyRing | None = None, open_metrics: bool = False, critical_tenants: Iterable[str] = ()
    ) -> None:
        """Begin. `critical_tenants` may ask for the critical class where there are no keys; "*": all may."""
        self._keys = keys
        self._critical_tenants = frozenset(critical_tenants)
        self._open_paths = {"/", "/health", "/openapi.json", *FILES, *(["/metrics"] if open_metrics else [])}

    @contextmanager
    def rpc(self, method: str, context: Context) -> Iterator[None]:
        """Be in the middle of a gRPC call; raises ServeError where it may not be made."""
        if self._keys is None or method.startswith(OPEN_SERVICE):
            yield
        else:
            with self._client(self._keys, metadata(context), method.startswith(CLIENT_SERVICE)):
                yield

    def client(self, said: Mapping[str, str]) -> Client:
        """Return whose call it is, by its headers or metadata; raises UnauthenticatedError."""
        if self._keys is not None:
            key = self._keys.find(_bearer(said))
            return Client(key.tenant, key.critical)
        tenant = said.get(TENANT_HEADER, "")
        return Client(tenant, not self._critical_tenants.isdisjoint((tenant, "*")))

    def http(self, app: ASGIApp) -> ASGIApp:
        """Return `app` behind the gate; where there are no keys, all pass it."""
        keys = self._keys
        if keys is None and not self._critical_tenants:
            return app
        if keys is None:

            async def open_to_all(scope: Scope, receive: Receive, send: Send) -> None:
                scope[CRITICAL] = self.client(MutableHeaders(scope=scope)).may_be_critical
                await app(scope, receive, send)

            return open_to_all

        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                with self._http(scope, keys):
                    await app(scope, receive, send)
            except ServeError as error:
                # The application answers its own errors: this one is the gate's.
                await _refuse(send, error)

        return gated

    @contextmanager
    def _http(self, scope: Scope, keys: KeyRing) -> Iterator[None]:
        path = scope["path"]
        if path in self._open_paths:
            yield
            return
        headers = MutableHeaders(scope=scope)
        with self._client(keys, headers, path in CLIENT_PATHS or path.startswith(CLIENT_FOLDER)) as request:
            # What reads the header behind the gate reads the truth.
            headers[TENANT_HEADER] = request.key.tenant
            scope[CHARGE], scope[CRITICAL] = request.charge, request.key.critical
            yield

    @contextmanager
    def _client(self, keys: KeyRing, said: Mapping[str, str], for_clients: bool) -> Iterator[ClientRequest]:
        key = keys.find(_bearer(said))
        if not for_clients and not key.operator:
            raise ForbiddenError("this is for operators: conductor keys add NAME --operator")
        with keys.request(key) as request:
            yield request


def metadata(context: Context) -> dict[str, str]:
    """Return what a gRPC call says of itself beside its message."""
    found: Any = context.invocation_metadata() or ()
    return {key: value for key, value in found if isinstance(value, str)}


def _bearer(said: Mapping[str, str]) -> str:
    given = said.get("authorization", "")
    if given[: len(BEARER)].lower() != BEARER:
        raise UnauthenticatedError("an API key is wanted: Authorization: Bearer ck-...")
    return given[len(BEARER) :].strip()


async def _refuse(send: Send, error: ServeError) -> None:
    told = http_error(error)
    headers = {**told.headers, "content-length": str(len(told.body)), "connection": "close"}
    if isinstance(error, UnauthenticatedError):
        headers["www-authenticate"] = "Bearer"
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": told.status, "headers": raw})
    await send({"type": "http.response.body", "body": told.body})
