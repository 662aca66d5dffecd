"""The gate before every call, over gRPC and HTTP alike: who calls, and whether the call may be made.

    Who.EVERYBODY    health and the page's files, which hold nothing
    Who.CLIENTS      inference, models, texts: where there are keys, who shows one
    Who.OPERATORS    everything else: where there are keys, who shows an operator's

`routes.py` says which of these an HTTP route is for, `SERVICES` says it of gRPC. What stands in neither needs
an operator. Of an HTTP call nothing but its head was read when it is decided.

Nodes have a listener of their own (`conductor/serving/attach.py`).

With keys, a call's tenant is its key's, whatever its headers say, and its requests may be critical if the key
says so. Without them, configuration names the tenants whose may. A tenant's name is in the
root of its block hashes (`base/block_hash.py`), so tenants share no cached prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto
from typing import Any, NamedTuple

from base.errors import ForbiddenError, UnauthenticatedError
from base.rpc import Context
from conductor.api.headers import API_KEY_HEADER, TENANT_HEADER, said_once
from conductor.api.keys import KeyRing

BEARER = "bearer "


class Who(Enum):
    """The callers that a route or service is for, where there are keys."""

    EVERYBODY = auto()
    CLIENTS = auto()
    OPERATORS = auto()
    SCRAPERS = auto()
    """Operators, and everybody if `server.open_metrics`."""


SERVICES = {
    "grpc.health.v1.Health": Who.EVERYBODY,
    "conductor.v1.Inference": Who.CLIENTS,
    "inference.GRPCInferenceService": Who.CLIENTS,
}


class Client(NamedTuple):
    """A caller, as far as keys and configuration say."""

    tenant: str = ""
    may_be_critical: bool = False
    """Whether its requests may be of the critical class."""
    charge: Callable[[int], None] = lambda count: None
    """Counts sequences beside the call's first in the tenant's quota; raises RejectedError."""


class Authorizer:
    """Admits calls. Owned by the event loop."""

    def __init__(
        self, keys: KeyRing | None = None, open_metrics: bool = False, critical_tenants: Iterable[str] = ()
    ) -> None:
        """Begin. `critical_tenants` may ask for the critical class where there are no keys; "*": all may."""
        self._keys = keys
        self._critical_tenants = frozenset(critical_tenants)
        self._open = {Who.EVERYBODY, *([Who.SCRAPERS] if open_metrics else [])}

    def rpc(self, method: str, context: Context) -> AbstractContextManager[object]:
        """Return a gRPC call to be entered, which raises what `call` does."""
        if self._keys is None:
            return nullcontext()
        return self.call(SERVICES.get(method.split("/")[1], Who.OPERATORS), metadata(context))

    def call(self, who: Who, said: Mapping[str, str]) -> AbstractContextManager[Client]:
        """Return a call of a route or service for `who`, to be entered; `said`: headers or metadata.

        It counts in its tenant's quota. Raises ServeError, here or on entering, for one that may not be made.
        """
        if self._keys is None or who in self._open:
            return nullcontext(self._unknown(said))
        return self._counted(self._keys, who, said)

    @contextmanager
    def _counted(self, keys: KeyRing, who: Who, said: Mapping[str, str]) -> Iterator[Client]:
        key = keys.find(_bearer(said))
        if who is not Who.CLIENTS and not key.operator:
            raise ForbiddenError("this is for operators: conductor keys add NAME --operator")
        with keys.request(key) as charge:
            yield Client(key.tenant, key.critical, charge)

    def client(self, said: Mapping[str, str]) -> AbstractContextManager[Client]:
        """Return the client of a gRPC call that `rpc` let in, to be entered; raises UnauthenticatedError."""
        if self._keys is None:
            return nullcontext(self._unknown(said))
        return self._known(self._keys, said)

    @contextmanager
    def _known(self, keys: KeyRing, said: Mapping[str, str]) -> Iterator[Client]:
        key = keys.find(_bearer(said))
        with keys.more(key) as charge:
            yield Client(key.tenant, key.critical, charge)

    def _unknown(self, said: Mapping[str, str]) -> Client:
        """Return a caller without a key, which may say whose call it is only where there are no keys."""
        tenant = said.get(TENANT_HEADER, "") if self._keys is None else ""
        return Client(tenant, not self._critical_tenants.isdisjoint((tenant, "*")))


def metadata(context: Context) -> dict[str, str]:
    """Return what a gRPC call says of itself beside its message."""
    found: Any = context.invocation_metadata() or ()
    return said_once((key, value) for key, value in found if isinstance(value, str))


def _bearer(said: Mapping[str, str]) -> str:
    given = said.get("authorization", "")
    if not given and (key := said.get(API_KEY_HEADER)):
        return key.strip()
    if given[: len(BEARER)].lower() != BEARER:
        raise UnauthenticatedError("an API key is wanted: Authorization: Bearer ck-..., or x-api-key")
    return given[len(BEARER) :].strip()
