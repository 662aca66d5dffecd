"""Calls as Llama 4 writes them: a list of Python calls, `[get_weather(city='LA'), get_time()]`."""

from __future__ import annotations

import re

from conductor.api.parsing.coerce import pythonic_calls
from conductor.api.parsing.events import Emit, Schemas, called_or_none
from conductor.api.parsing.feed import Feed, Marks, Steps

_BEGUN = re.compile(r"\[\s*[\w.]*\s*")
_BEGINS = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_END = "<|python_end|>"


def pythonic(feed: Feed, schemas: Schemas, emit: Emit) -> Steps[str | None]:
    """Read a list of calls, which is all that follows."""
    space = yield from feed.space()
    while not feed.is_ended and _BEGUN.fullmatch(feed.text):
        yield
    if not _BEGINS.match(feed.text):
        return space
    text, _ = yield from feed.text_until(Marks())
    found = pythonic_calls(text.rstrip().removesuffix(_END))
    calls = [called_or_none(name, arguments) for name, arguments in found]
    if not calls or None in calls or (schemas and not all(call and call.name in schemas for call in calls)):
        return space + text
    for call in calls:
        assert call is not None
        emit(call)
    return None
