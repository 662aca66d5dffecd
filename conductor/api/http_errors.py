"""Every error as the error object of the API at hand and its HTTP status. The one table for HTTP.

`Retry-After` goes with every answer that another try may change; the official clients
wait that long and try again by themselves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from base.errors import (
    CapacityError,
    DeadlineError,
    ForbiddenError,
    InvalidRequestError,
    LostError,
    RejectedError,
    ServeError,
    SloUnreachableError,
    UnauthenticatedError,
    UnavailableError,
    UnknownModelError,
    retry_after_s,
)
from conductor.api.tokenizer import ContextLengthError

LAST_SEQUENCE_NUMBER = (1 << 31) - 1
"""The number of an error's event among those of a response: greater than that of any before it."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as clients get it."""

    status: int
    kind: str
    code: str | None
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a rejection is based on."""

    @property
    def headers(self) -> Mapping[str, str]:
        headers = {"content-type": "application/json"}
        if self.retry_after_s is not None:
            # Whole seconds are all that the header can say.
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers


class ErrorForm(NamedTuple):
    """How an API words an error, by the error and the request's id."""

    answer: Callable[[HttpError, str], Mapping[str, Any]]
    event: Callable[[HttpError, str], Mapping[str, Any]]
    """The error in a stream that has begun."""
    event_name: str = "event: error\n"

    def body(self, error: HttpError, request_id: str) -> bytes:
        """Return the JSON of an answer."""
        return json.dumps(self.answer(error, request_id)).encode()

    def in_stream(self, error: HttpError, request_id: str) -> str:
        """Return the event that ends a stream."""
        return f"{self.event_name}data: {json.dumps(self.event(error, request_id))}\n\n"


def _openai_error(error: HttpError, request_id: str) -> Mapping[str, Any]:
    shown = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return {"error": {**shown, **error.predicted}}


def _responses_event(error: HttpError, request_id: str) -> Mapping[str, Any]:
    shown = {"code": error.code or error.kind, "message": error.message, "param": error.param}
    return {"type": "error", "sequence_number": LAST_SEQUENCE_NUMBER, **shown, "error": shown}


_ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _anthropic_error(error: HttpError, request_id: str) -> Mapping[str, Any]:
    shown = {"type": _ANTHROPIC_TYPES.get(error.status, "api_error"), "message": error.message}
    return {"type": "error", "error": shown, "request_id": request_id or None}


# No [DONE] follows it: whoever looks for that knows that the answer is not whole.
OPENAI_ERRORS = ErrorForm(_openai_error, _openai_error, event_name="")
RESPONSES_ERRORS = ErrorForm(_openai_error, _responses_event)
"""The form of the Responses API, which has an event of its own in a stream."""
ANTHROPIC_ERRORS = ErrorForm(_anthropic_error, _anthropic_error)

# First match wins, so a class stands before its parents.
_STATUS: tuple[tuple[type[ServeError], int, str, str | None], ...] = (
    (UnknownModelError, 404, "invalid_request_error", "model_not_found"),
    (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (InvalidRequestError, 400, "invalid_request_error", None),
    (UnauthenticatedError, 401, "authentication_error", "invalid_api_key"),
    (ForbiddenError, 403, "permission_error", None),
    (SloUnreachableError, 429, "rate_limit_error", "slo_unreachable"),
    (CapacityError, 429, "rate_limit_error", "no_capacity"),
    (RejectedError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (UnavailableError, 503, "server_error", "unavailable"),
    (LostError, 503, "server_error", "lost"),
    (DeadlineError, 504, "server_error", "deadline_exceeded"),
)


def http_error(error: ServeError) -> HttpError:
    """Return `error` as the client gets it."""
    for kind, status, type_name, code in _STATUS:
        if isinstance(error, kind):
            param = error.param if isinstance(error, InvalidRequestError) else None
            predicted = {}
            if isinstance(error, SloUnreachableError):
                predicted["predicted_ttft_s"] = error.predicted_ttft_s
                predicted["predicted_tbt_s"] = error.predicted_tbt_s
            return HttpError(status, type_name, code, str(error), param, retry_after_s(error), predicted)
    return internal_error()


def internal_error() -> HttpError:
    """Return the error that stands for a bug: nothing in it would help an attacker."""
    return HttpError(500, "server_error", "internal_error", "the server failed; its log says how")
