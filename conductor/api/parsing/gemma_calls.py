"""Calls as Gemma writes them: `call:NAME{key:value,...}`, with `<|"|>` for the quotes of a text."""

from __future__ import annotations

from typing import Any

from conductor.api.parsing.events import MAX_CALL_DEPTH, Emit, Schemas, called_or_none, handed, value_or_none
from conductor.api.parsing.feed import Feed, Steps

QUOTE = '<|"|>'
_END = "<tool_call|>"


def gemma(feed: Feed, schemas: Schemas, emit: Emit) -> Steps[str | None]:
    """Read a call after `<|tool_call>`."""
    block = yield from feed.block(_END, lambda text: text.count(QUOTE) % 2 == 0)
    if block is None:
        return ""
    name, bracket, rest = block.strip().removeprefix("call:").partition("{")
    try:
        call = called_or_none(name.strip(), _Values(bracket + rest).whole())
    except ValueError:
        call = None
    return handed(call, emit, block + _END)


class _Values:
    """Reads the values of one call."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def whole(self) -> Any:
        """Return the value that the text is; raises ValueError where it is none."""
        value = self._value(0)
        if self._text[self._at :].strip():
            raise ValueError("more follows")
        return value

    def _value(self, depth: int) -> Any:
        if depth > MAX_CALL_DEPTH:
            raise ValueError("too deep")
        self._space()
        if self._took(QUOTE):
            return self._until(QUOTE)
        if self._took("{"):
            return self._members(depth)
        if self._took("["):
            items = []
            self._space()
            while not self._took("]"):
                items.append(self._value(depth + 1))
                self._comma("]")
            return items
        return self._bare()

    def _members(self, depth: int) -> dict[str, Any]:
        members = {}
        self._space()
        while not self._took("}"):
            if self._took(QUOTE):
                key = self._until(QUOTE)
                self._space()
                if not self._took(":"):
                    raise ValueError("no colon")
            else:
                key = self._until(":").strip().strip('"')
            members[key] = self._value(depth + 1)
            self._comma("}")
        return members

    def _until(self, mark: str) -> str:
        """Return the text before a mark, which is passed over too; raises ValueError where there is none."""
        end = self._text.index(mark, self._at)
        text, self._at = self._text[self._at : end], end + len(mark)
        return text

    def _bare(self) -> Any:
        begin = self._at
        while self._at < len(self._text) and self._text[self._at] not in ",]}":
            self._at += 1
        text = self._text[begin : self._at].strip()
        value = value_or_none(text)
        if value is not None or text == "null":
            return value
        if not text:
            raise ValueError("no value")
        return text

    def _comma(self, close: str) -> None:
        self._space()
        if not self._took(",") and not self._text.startswith(close, self._at):
            raise ValueError("no comma")
        self._space()

    def _space(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1

    def _took(self, mark: str) -> bool:
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True
