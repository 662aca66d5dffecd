"""Parquet files of flat columns, written by the standard library alone.

A reader of Parquet takes whatever subset of the format a file uses, so a writer may choose the
smallest: one row group, one page of a column, plain values, no compression, so that the same rows are
the same bytes anywhere. Weighed and left: pyarrow, 40 MB for one option of one command.

Layout (github.com/apache/parquet-format): "PAR1", each column's page behind its header, then the
footer with schema and offsets, its length, "PAR1". Headers and footer are Thrift's compact protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

MAGIC = b"PAR1"
PLAIN, RLE = 0, 3
DATA_PAGE = 0
OPTIONAL = 1
UTF8 = 0
UNCOMPRESSED = 0

I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12
"""Thrift's types."""


class Kind(Enum):
    """What a column holds, by Parquet's number of it."""

    INT = 2
    FLOAT = 5
    TEXT = 6


Value = int | float | str | None


@dataclass(frozen=True, slots=True)
class Column:
    """A name and a value for each row; None: there is none."""

    name: str
    kind: Kind
    values: Sequence[Value]


def parquet(columns: Sequence[Column]) -> bytes:
    """Return a file of `columns`, which are equally long. The same columns give the same bytes."""
    num_rows = len(columns[0].values)
    out = bytearray(MAGIC)
    chunks = []
    for column in columns:
        start = len(out)
        data = _levels(column.values) + _plain(column)
        out += _page_header(num_rows, len(data)) + data
        chunks.append(_chunk(column, start, len(out) - start))
    row_group = _struct((1, LIST, (STRUCT, chunks)), (2, I64, len(out) - len(MAGIC)), (3, I64, num_rows))
    footer = _struct(
        (1, I32, 1),
        (2, LIST, (STRUCT, [_root(len(columns)), *map(_element, columns)])),
        (3, I64, num_rows),
        (4, LIST, (STRUCT, [row_group])),
        (6, BINARY, b"conductor"),
    )
    return bytes(out) + footer + struct.pack("<I", len(footer)) + MAGIC


def _levels(values: Sequence[Value]) -> bytes:
    """Return which values are there, as one run of bits behind its length."""
    groups = -(-len(values) // 8)
    there = "".join("01"[value is not None] for value in reversed(values)) or "0"
    packed = int(there, 2).to_bytes(groups, "little")
    run = _varint(groups << 1 | 1) + packed
    return struct.pack("<I", len(run)) + run


def _plain(column: Column) -> bytes:
    values = [value for value in column.values if value is not None]
    if column.kind is Kind.INT:
        return struct.pack(f"<{len(values)}q", *values)
    if column.kind is Kind.FLOAT:
        return struct.pack(f"<{len(values)}d", *values)
    texts = (str(value).encode() for value in values)
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


# --- Thrift's compact protocol -----------------------------------------------------------


def _page_header(num_values: int, num_bytes: int) -> bytes:
    encodings = ((1, I32, num_values), (2, I32, PLAIN), (3, I32, RLE), (4, I32, RLE))
    return _struct(
        (1, I32, DATA_PAGE), (2, I32, num_bytes), (3, I32, num_bytes), (5, STRUCT, _struct(*encodings))
    )


def _chunk(column: Column, start: int, num_bytes: int) -> bytes:
    about = _struct(
        (1, I32, column.kind.value),
        (2, LIST, (I32, [_zigzag(PLAIN), _zigzag(RLE)])),
        (3, LIST, (BINARY, [_text(column.name.encode())])),
        (4, I32, UNCOMPRESSED),
        (5, I64, len(column.values)),
        (6, I64, num_bytes),
        (7, I64, num_bytes),
        (9, I64, start),
    )
    return _struct((2, I64, start), (3, STRUCT, about))


def _root(num_columns: int) -> bytes:
    return _struct((4, BINARY, b"requests"), (5, I32, num_columns))


def _element(column: Column) -> bytes:
    text = ((6, I32, UTF8),) if column.kind is Kind.TEXT else ()
    return _struct((1, I32, column.kind.value), (3, I32, OPTIONAL), (4, BINARY, column.name.encode()), *text)


Field = tuple[int, int, int | bytes | tuple[int, Sequence[bytes]]]
"""(number, Thrift's type, value); a struct is bytes already, a list its items' type and bytes."""


def _struct(*fields: Field) -> bytes:
    """Return fields in the order of their numbers, which grow by less than 16."""
    out, last = bytearray(), 0
    for number, kind, value in fields:
        out.append((number - last) << 4 | kind)
        last = number
        if isinstance(value, int):
            out += _zigzag(value)
        elif isinstance(value, tuple):
            out += _list(*value)
        else:
            out += _text(value) if kind == BINARY else value
    return bytes(out) + b"\0"


def _list(kind: int, items: Iterable[bytes]) -> bytes:
    items = list(items)
    head = bytes([len(items) << 4 | kind]) if len(items) < 15 else bytes([0xF0 | kind]) + _varint(len(items))
    return head + b"".join(items)


def _text(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _zigzag(value: int) -> bytes:
    return _varint(value << 1 if value >= 0 else ~(value << 1))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
