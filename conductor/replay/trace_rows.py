"""Rows of a trace file: read one at a time, counted where they are bad, and their fields checked.

Whatever a row holds, reading it takes time and memory in proportion to the row: lines have a longest length,
and numbers of tokens a highest value, because blocks are made of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from base.errors import ConfigError
from conductor.replay.trace import BOUND_KEYS, NamedBounds, TraceRequest, open_trace

MAX_REASONS = 10

MAX_LINE_CHARS = 1 << 26
"""Characters of a line; a session of ten thousand turns that is one object has a few million."""

MAX_TOKENS = 1 << 24
"""Tokens of a prompt or of an answer. Sixteen times what any model takes."""

MAX_TENANT_CHARS = 64

Row = dict[str, Any]


class TraceRow(NamedTuple):
    """One good row: its request as it stands in the file, and where it belongs."""

    number: int
    request: TraceRequest
    """`chain` is what the row has of ids; `arrival_s` is a delay where the row follows."""
    session: str | None = None
    follows: bool = False
    """Whether `arrival_s` is a delay after the row before it of its session."""
    has_ids: bool = True
    is_restart: bool = False
    is_marked: bool = False
    """Whether it has a field that AIPerf's generator alone writes."""


class TraceFile:
    """A file's rows, and the count of the bad ones."""

    def __init__(self, path: Path, skip_bad: bool) -> None:
        self.path = path
        self.num_bad = 0
        self.reasons: list[str] = []
        self._skip_bad = skip_bad

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield (number, line) of lines that are not empty."""
        try:
            with open_trace(self.path, "r") as file:
                number = 0
                while line := file.readline(MAX_LINE_CHARS):
                    number += 1
                    if len(line) == MAX_LINE_CHARS and not line.endswith("\n"):
                        raise ConfigError(f"{self.path}:{number}: a line of more than {MAX_LINE_CHARS} bytes")
                    if line.strip():
                        yield number, line
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path}: {error}") from error

    def bad(self, number: int, error: ValueError) -> None:
        """Count a bad row, or raise."""
        reason = f"{self.path}:{number}: {error}"
        if not self._skip_bad:
            raise ConfigError(f"{reason} (--skip-bad passes over such rows)") from error
        self.num_bad += 1
        if len(self.reasons) < MAX_REASONS:
            self.reasons.append(reason)


def json_object(line: str) -> Row:
    """Return what a line holds; ValueError where that is no JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError("a JSON object is wanted")
    return row


def moment(row: Row, key: str) -> float:
    """Return a time that is not negative, in the file's unit."""
    value = row[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e15:
        raise ValueError(f"{key}: a time that is not negative is wanted, not {value!r}")
    return float(value)


def count(row: Row, key: str, least: int) -> int:
    """Return a whole number from `least` to MAX_TOKENS."""
    value = row[key]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_TOKENS:
        raise ValueError(f"{key}: a whole number from {least} to {MAX_TOKENS} is wanted, not {_shown(value)}")
    return value


def text_count(text: str, name: str) -> int:
    """Return a table's number of tokens, from 1 to MAX_TOKENS."""
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name}: a whole number is wanted, not {_shown(text)}") from None
    if value < 1:
        raise ValueError(f"{name}: {value}, a request that failed")
    if value > MAX_TOKENS:
        raise ValueError(f"{name}: at most {MAX_TOKENS} is wanted, not {_shown(text)}")
    return value


def text_seconds(text: str, name: str) -> float:
    """Return a table's time in seconds: `nan` and `inf` are none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) < 1e15:
        raise ValueError(f"{name}: a time in seconds is wanted, not {_shown(text)}")
    return value


def text_date_s(text: str, name: str) -> float:
    """Return a date's seconds; one without a zone is of UTC, so that no summer time moves a row."""
    try:
        date = datetime.fromisoformat(text)
    except (TypeError, ValueError):  # a row of JSON may have a number there
        raise ValueError(f"{name}: a date is wanted, as 2026-05-01T12:00:00Z, not {_shown(text)}") from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def block_ids(ids: object) -> Sequence[int]:
    """Return a row's `hash_ids`, as they stand."""
    if not isinstance(ids, list) or not all(type(block) is int and 0 <= block < 1 << 63 for block in ids):
        raise ValueError("hash_ids: a list of numbers below 2^63 is wanted")
    return ids


def require_length(ids: Sequence[int], num_tokens: int, block_size: int) -> None:
    """Raise ValueError unless there is an id for each block of a prompt."""
    if len(ids) != -(-num_tokens // block_size):
        raise ValueError(
            f"{len(ids)} hash_ids for {num_tokens} tokens; blocks of {block_size} make "
            f"{-(-num_tokens // block_size)} (--block-size says how long a block is)"
        )


def client(row: Row) -> tuple[int, str, NamedBounds | None]:
    """Return the priority, the tenant and the bounds that a row names; 0, "" and None where it names none."""
    priority = row.get("priority", 0)
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > 1 << 31:
        raise ValueError(f"priority: a whole number is wanted, not {_shown(priority)}")
    tenant = row.get("tenant", "")
    if not isinstance(tenant, str) or len(tenant) > MAX_TENANT_CHARS:
        raise ValueError(f"tenant: a name of {MAX_TENANT_CHARS} characters at most is wanted")
    return priority, tenant, _bounds(row)


def _bounds(row: Row) -> NamedBounds | None:
    if not any(key in row for key in BOUND_KEYS):
        return None
    return _interned(*(_bound(row, key) if key in row else None for key in BOUND_KEYS))


def _bound(row: Row, key: str) -> float:
    """Return a bound in seconds; null: there is none at all."""
    bound_s = math.inf if row[key] is None else moment(row, key) / 1000
    if not bound_s:
        raise ValueError(f"{key}: a bound is above 0; null is none at all")
    return bound_s


@lru_cache(maxsize=1024)
def _interned(ttft_s: float | None, tbt_s: float | None, longest_gap_s: float | None) -> NamedBounds:
    return NamedBounds(ttft_s, tbt_s, longest_gap_s)


def _shown(value: object) -> str:
    """Return a value as an error shows it: a part, where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= 40 else f"{text[:40]}..."
