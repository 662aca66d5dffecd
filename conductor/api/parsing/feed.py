"""Text that comes in pieces, read as if it were whole.

A reader is a generator: it takes what it can of the text and yields where it needs more. What it does depends
on the text alone, never on where a piece ended, so an answer is taken apart in one way however it was split.

Nothing is looked at twice: what a reader passes over leaves the feed, but for an end that may begin a mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

from conductor.api.parsing.events import MAX_CALL_DEPTH, Called, called_or_none, value_or_none

Value = TypeVar("Value")
Steps = Generator[None, None, Value]
"""A reader at work; it yields where it needs more text, and returns a value."""

_AFTER_TEXT = re.compile(r"[^\s0-9A-Za-z+\-.,:]")
"""The next character of JSON that is more than a number, a name or a separator."""
_IN_TEXT = re.compile(r'["\\]')
_NOT_SPACE = re.compile(r"\S")


class Marks:
    """Texts that a reader looks for; none begins another."""

    def __init__(self, *marks: str) -> None:
        self.all = marks
        self._found = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        self._first_chars = {mark[0] for mark in marks}
        self._max_chars = max(map(len, marks), default=0)

    def search(self, text: str) -> re.Match[str] | None:
        return self._found.search(text)

    def begun_at(self, text: str) -> int:
        """Return where the longest end of `text` begins that begins a mark; its length where none does."""
        for at in range(max(0, len(text) - self._max_chars + 1), len(text)):
            if text[at] in self._first_chars and any(mark.startswith(text[at:]) for mark in self.all):
                return at
        return len(text)


class JsonText(NamedTuple):
    """The text of a JSON object or list, as far as it was read."""

    text: str
    is_whole: bool
    """Whether the value ended; False: it is malformed here, or the answer ended in it."""


class Feed:
    """The text that is not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.is_ended = False
        self.is_cut = False
        """Whether the end was a limit of tokens."""
        self.is_thinking = False
        """Whether a reader is within reasoning."""

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def space(self) -> Steps[str]:
        """Take the white space that comes next, and return it."""
        taken = []
        while True:
            found = _NOT_SPACE.search(self.text)
            taken.append(self.take(found.start() if found else len(self.text)))
            if found or self.is_ended:
                return "".join(taken)
            yield

    def begins(self, *marks: str) -> Steps[str]:
        """Take the mark that comes next, and return it; empty: none does, and nothing is taken."""
        while True:
            for mark in marks:
                if self.text.startswith(mark):
                    return self.take(len(mark))
            if self.is_ended or not any(mark.startswith(self.text) for mark in marks):
                return ""
            yield

    def until(self, marks: Marks, to: Callable[[str], object]) -> Steps[str]:
        """Hand what comes before the next mark to `to`, take the mark, and return it; empty: none came."""
        while True:
            if found := marks.search(self.text):
                to(self.take(found.start()))
                return self.take(len(found[0]))
            to(self.take(len(self.text) if self.is_ended else marks.begun_at(self.text)))
            if self.is_ended:
                return ""
            yield

    def text_until(self, marks: Marks) -> Steps[tuple[str, str]]:
        """Take what comes before the next mark, and the mark; return both, no mark where none came."""
        parts: list[str] = []
        mark = yield from self.until(marks, parts.append)
        return "".join(parts), mark

    def block(self, close: str, is_whole: Callable[[str], bool]) -> Steps[str | None]:
        """Take text to the first `close` before which it `is_whole`, and return it.

        None: the text ended before; then all of it stays.
        """
        marks, parts = Marks(close), [""]
        while True:
            found = yield from self.until(marks, parts.append)
            text = "".join(parts)
            if not found:
                self.text = text
                return None
            if is_whole(text):
                return text
            parts = [text, close]

    def no_call(self, before: str, close: str) -> Steps[str]:
        """Take text that is no call, to `close`, and return it after `before`.

        Where the answer ended before, `before` alone is returned, and all else stays.
        """
        text = yield from self.block(close, lambda text: True)
        return before if text is None else f"{before}{text}{close}"

    def call(self, name: str) -> Steps[tuple[Called | None, str]]:
        """Take the arguments that come next; return the call with them, None if it is none, and the text."""
        json = yield from self.json()
        return called_or_none(name, value_or_none(json.text)) if json.is_whole else None, json.text

    def json(self, to: Callable[[str], object] = lambda text: None) -> Steps[JsonText]:
        """Take the JSON object or list that comes next: to its end, or to where it is malformed.

        Its parts are handed to `to` as they come.
        """
        scan, parts = _JsonScan(), []
        while True:
            end = scan.end_in(self.text)
            parts.append(self.take(len(self.text) if end is None else end))
            to(parts[-1])
            if end is not None or self.is_ended:
                return JsonText("".join(parts), scan.is_whole)
            yield

    def head(self, pattern: re.Pattern[str], max_chars: int) -> Steps[re.Match[str] | None]:
        """Take what comes next, if it is of a pattern, and return the match.

        None: it is longer than so many characters, or of another form; then nothing is taken.
        """
        while True:
            found = pattern.match(self.text, 0, max_chars)
            if found:
                self.take(found.end())
                return found
            if self.is_ended or len(self.text) >= max_chars:
                return None
            yield


class _JsonScan:
    """Finds where JSON ends, part by part."""

    def __init__(self) -> None:
        self.is_whole = False
        self._open: list[str] = []
        self._is_text = self._is_escaped = False

    def end_in(self, part: str) -> int | None:
        """Return where in `part` the JSON ends or is malformed; None: further on."""
        at = 0
        while at < len(part):
            if self._is_escaped:
                self._is_escaped, at = False, at + 1
                continue
            found = (_IN_TEXT if self._is_text else _AFTER_TEXT).search(part, at)
            if found is None:
                return None
            at = found.end()
            if not self._goes_on(found[0]):
                return at if self.is_whole else at - 1
        return None

    def _goes_on(self, mark: str) -> bool:
        if self._is_text:
            self._is_escaped = mark == "\\"
            self._is_text = self._is_escaped
        elif mark == '"':
            self._is_text = True
            return bool(self._open)
        elif mark in "{[":
            self._open.append("}" if mark == "{" else "]")
            return len(self._open) <= MAX_CALL_DEPTH
        elif not self._open or self._open.pop() != mark:
            return False
        else:
            self.is_whole = not self._open
        return not self.is_whole
