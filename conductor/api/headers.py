"""HTTP headers, or gRPC metadata alike: the wishes of a client beside the body of a request.

x-slo-ttft-ms, x-slo-tpot-ms    bounds; the names are llm-d's
x-slo-gap-ms                    a bound on the longest gap between two tokens
x-tenant-id                     whose request it is: tenants share the cluster evenly, and
                                see nothing of each other's cached blocks
traceparent                     the span that this request is part of; W3C Trace Context
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from base.errors import ForbiddenError, invalid
from base.request import Slo

TENANT_HEADER = "x-tenant-id"
API_KEY_HEADER = "x-api-key"
"""Where clients of Anthropic's API put their key."""

ONCE = frozenset(("authorization", API_KEY_HEADER, TENANT_HEADER, "x-request-id"))
"""Headers that stand once, as do all whose names begin with `x-slo-`."""

TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Caller(NamedTuple):
    """The client of one call, and what it wants of each request in it."""

    arrived_at_s: float
    """The call's first moment, on the conductor's clock."""
    slo: Slo
    tenant: str = ""
    traceparent: str = ""
    may_be_critical: bool = False
    """Whether requests may be of the critical class."""
    charge: Callable[[int], None] = lambda count: None
    """Counts sequences beside the call's first; raises RejectedError if they are too many."""
    deadline_s: float | None = None
    """Seconds from arrival to the last token at most; None: the server's limit."""


def said_once(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers by their names; raises InvalidRequestError where one of `ONCE` is repeated."""
    said: dict[str, str] = {}
    for name, text in pairs:
        if name in said and (name in ONCE or name.startswith("x-slo-")):
            raise invalid(name, "it stands twice; send it once")
        said[name] = text
    return said


def header_slo(headers: Mapping[str, str], default: Slo) -> Slo:
    """Return the bounds that `headers` name; raises InvalidRequestError for what is no bound."""
    return Slo(
        _bound_s(headers, "x-slo-ttft-ms", default.ttft_slo_s),
        _bound_s(headers, "x-slo-tpot-ms", default.tbt_slo_s),
        _bound_s(headers, "x-slo-gap-ms", default.longest_gap_slo_s),
    )


def header_traceparent(headers: Mapping[str, str]) -> str:
    """Return the caller's span; empty if there is none, or what is no span, as W3C wants it."""
    text = headers.get("traceparent", "")
    return text if TRACEPARENT.fullmatch(text) else ""


def require_own_page(headers: Mapping[str, str]) -> None:
    """Raise ForbiddenError for a body that a page of elsewhere made a browser send without asking us first.

    Browsers ask (CORS) before they send JSON to another origin, and not before they send what a form could.
    """
    origin = headers.get("origin")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if origin is None or media_type == "application/json":
        return
    if urlsplit(origin).netloc != headers.get("host"):
        raise ForbiddenError(f"a page of {origin[:100]} may send Content-Type: application/json alone")


def _bound_s(headers: Mapping[str, str], name: str, default_s: float) -> float:
    text = headers.get(name)
    if text is None:
        return default_s
    try:
        bound_ms = float(text)
    except ValueError:
        bound_ms = math.nan
    bound_s = bound_ms / 1e3
    if not 0 < bound_s < math.inf:
        raise invalid(name, "a number of milliseconds above 0 is wanted")
    return bound_s
