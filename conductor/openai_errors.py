"""Every error as OpenAI's error object and its HTTP status. The one table for HTTP.

`Retry-After` goes with every answer that another try may change; the official clients
wait that long and try again by themselves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from base.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    LostError,
    RejectedError,
    ServeError,
    SloUnreachableError,
    UnavailableError,
    UnknownModelError,
    retry_after_s,
)
from conductor.options import ContextLengthError


@dataclass(frozen=True, slots=True)
class HttpError:
    """What goes to the client."""

    status: int
    kind: str
    code: str | None
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @property
    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    @property
    def headers(self) -> Mapping[str, str]:
        headers = {"content-type": "application/json"}
        if self.retry_after_s is not None:
            # Whole seconds are all that the header can say.
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers


# First match wins, so a class stands before its parents.
_STATUS: tuple[tuple[type[ServeError], int, str, str | None], ...] = (
    (UnknownModelError, 404, "invalid_request_error", "model_not_found"),
    (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (InvalidRequestError, 400, "invalid_request_error", None),
    (SloUnreachableError, 429, "rate_limit_error", "slo_unreachable"),
    (CapacityError, 429, "rate_limit_error", "no_capacity"),
    (RejectedError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (UnavailableError, 503, "server_error", "unavailable"),
    (LostError, 503, "server_error", "lost"),
    (DeadlineError, 504, "server_error", "deadline_exceeded"),
)


def http_error(error: ServeError) -> HttpError:
    """Return what a client is told of `error`."""
    for kind, status, type_name, code in _STATUS:
        if isinstance(error, kind):
            param = error.param if isinstance(error, InvalidRequestError) else None
            return HttpError(status, type_name, code, str(error), param, retry_after_s(error))
    return internal_error()


def internal_error() -> HttpError:
    """Return what a client is told of a bug: nothing that would help an attacker."""
    return HttpError(500, "server_error", "internal_error", "the server failed; its log says how")
