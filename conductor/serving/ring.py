"""A ring of rows of numbers, of fixed size: the memory of `history.py`."""

from __future__ import annotations

import base64
import struct
from array import array
from collections.abc import Iterable, Sequence
from math import isnan, nan
from typing import Any

LARGEST_HALF = 65_504.0


class Ring:
    """The last rows of some series, by their numbers. Rows that were never put are NaN."""

    def __init__(self, names: Sequence[str], step_s: int, span_s: int, is_half: bool = False) -> None:
        """Begin with nothing. `is_half`: numbers of 16 bits, else of 32."""
        self.names = tuple(names)
        self.step_s = step_s
        self.next_row = 0
        """The number of the row after the last one."""
        self._num_rows = span_s // step_s
        self._first_row = 0
        self._format = struct.Struct(f"<{len(names)}{'e' if is_half else 'f'}")
        self._nothing = self._format.pack(*([nan] * len(names)))
        self._most = LARGEST_HALF if is_half else 3e38
        self._rows = bytearray()

    def put(self, row: int, values: Sequence[float]) -> None:
        """Keep a row; one that is not after the last is passed over."""
        if not self._rows:
            self._rows = bytearray(self._nothing * self._num_rows)
            self._first_row = self.next_row = row
        if row < self.next_row:
            return
        for missing in range(max(self.next_row, row - self._num_rows + 1), row):
            self._write(missing, self._nothing)
        self._write(row, self._format.pack(*(min(value, self._most) for value in values)))
        self.next_row = row + 1
        self._first_row = max(self._first_row, self.next_row - self._num_rows)

    def rows(self, first: int = 0) -> tuple[int, list[tuple[float, ...]]]:
        """Return the rows from number `first` on, and the number of the first of these."""
        first = max(first, self._first_row)
        return first, [self._unpacked(row) for row in range(first, self.next_row)]

    def row(self, number: int) -> tuple[float, ...]:
        """Return one row: NaN where it was never put, or is kept no more."""
        if not self._first_row <= number < self.next_row:
            return (nan,) * len(self.names)
        return self._unpacked(number)

    def mean(self, num_rows: int) -> list[float]:
        """Return the mean of each series over its last rows, of those that say something."""
        _, rows = self.rows(self.next_row - num_rows)
        return [_mean(column) for column in zip(*rows, strict=True)]

    def to_json(self, first: int = 0) -> dict[str, Any]:
        """Return the rows from `first` on for JSON: numbers of 32 bits, little-endian, in base64."""
        first, rows = self.rows(first)
        numbers = array("f", [value for row in rows for value in row])
        return {
            "names": self.names,
            "step_s": self.step_s,
            "first": first,
            "next": self.next_row,
            "rows": base64.b64encode(numbers.tobytes()).decode("ascii"),
        }

    def _unpacked(self, row: int) -> tuple[float, ...]:
        return self._format.unpack_from(self._rows, row % self._num_rows * self._format.size)

    def _write(self, row: int, packed: bytes) -> None:
        at = row % self._num_rows * len(packed)
        self._rows[at : at + len(packed)] = packed


def _mean(column: Iterable[float]) -> float:
    said = [value for value in column if not isnan(value)]
    return sum(said) / len(said) if said else nan
