"""Errors as Anthropic's API words them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conductor.api.http_reply import to_json
from conductor.api.openai_errors import ErrorForm, HttpError

_TYPES: Mapping[int, str] = {
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


def _error(error: HttpError, request_id: str) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "api_error")
    found = {"type": "error", "error": {"type": kind, "message": error.message}}
    return {**found, "request_id": request_id or None}


def _body(error: HttpError, request_id: str) -> bytes:
    return to_json(_error(error, request_id)).encode()


def _event(error: HttpError, request_id: str) -> str:
    return f"event: error\ndata: {to_json(_error(error, request_id))}\n\n"


ANTHROPIC_ERRORS = ErrorForm(_body, _event)
