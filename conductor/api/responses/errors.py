"""Errors as the Responses API words them: OpenAI's object, and an event of its own in a stream."""

from __future__ import annotations

from conductor.api.http_reply import to_json
from conductor.api.openai_errors import OPENAI_ERRORS, ErrorForm, HttpError

LAST_SEQUENCE_NUMBER = (1 << 31) - 1
"""The number of an error's event: greater than that of any before it."""


def _event(error: HttpError, request_id: str) -> str:
    shown = {"code": error.code or error.kind, "message": error.message, "param": error.param}
    numbered = {"type": "error", "sequence_number": LAST_SEQUENCE_NUMBER, **shown, "error": shown}
    return f"event: error\ndata: {to_json(numbered)}\n\n"


RESPONSES_ERRORS = ErrorForm(OPENAI_ERRORS.body, _event)
