"""A Parquet file holds what was put into it, as its format says."""

import hashlib
import io
import struct

import pytest

from conductor.replay.parquet import Column, Kind, parquet

COLUMNS = [
    Column("number", Kind.INT, [*range(-3, 9), None, 1 << 62]),
    Column("seconds", Kind.FLOAT, [None, 0.5, -1e300, *[0.25] * 11]),
    Column("node", Kind.TEXT, ["p0", None, "ä", *["d1"] * 11]),
    *(Column(f"empty {n}", Kind.TEXT, [None] * 14) for n in range(14)),
]


def test_the_bytes_are_those_that_arrow_was_seen_to_read():
    # Arrow 26 read this very file, column for column; where it is installed the next test does it again.
    assert hashlib.sha256(parquet(COLUMNS)).hexdigest()[:16] == "9701d160ca201152"


def test_arrow_reads_what_was_written():
    arrow = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    table = arrow.read_table(io.BytesIO(parquet(COLUMNS)))
    assert table.to_pydict() == {column.name: list(column.values) for column in COLUMNS}


def test_a_page_has_the_flags_of_its_rows_and_the_values_that_are_there():
    data = parquet([Column("number", Kind.INT, [7, None, 9])])
    page = struct.pack("<IBB", 2, 1 << 1 | 1, 0b101) + struct.pack("<2q", 7, 9)
    assert data.count(page) == 1


def test_a_table_without_rows_is_a_file_too():
    data = parquet([Column("number", Kind.INT, [])])
    assert data[:4] == data[-4:] == b"PAR1"
    (footer_bytes,) = struct.unpack("<I", data[-8:-4])
    assert footer_bytes < len(data) - 12
