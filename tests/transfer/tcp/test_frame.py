"""Frames survive the wire, and what is no frame is a ProtocolError and nothing else."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from base.errors import LeaseExpiredError, ProtocolError, StaleError, TransferFailedError
from transfer.tcp.frame import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_RANGES,
    FrameKind,
    Header,
    pack,
    pack_refusal,
    refusal_error,
    table_of,
    unpack_header,
    unpack_ranges,
)

words = st.integers(0, (1 << 64) - 1)


def framed(header: Header, ranges: list[tuple[int, int]]) -> bytes:
    """Return a frame's header and table."""
    offsets, lengths = np.array(ranges, np.int64).T
    return pack(header._replace(offset=ranges[0][0]), table_of(offsets, lengths))


@given(
    ranges=st.lists(st.tuples(st.integers(0, (1 << 63) - 1), st.integers(1, 4096)), min_size=1, max_size=20),
    frame_id=words,
    segment_id=words,
    generation=words,
)
@settings(max_examples=100, deadline=None)
def test_what_is_packed_is_unpacked(
    ranges: list[tuple[int, int]], frame_id: int, segment_id: int, generation: int
) -> None:
    num_bytes = sum(length for _, length in ranges)
    data = framed(Header(FrameKind.WRITE, frame_id, num_bytes, segment_id, generation), ranges)
    header = unpack_header(data[:HEADER_BYTES])
    assert (header.kind, header.frame_id, header.segment_id) == (FrameKind.WRITE, frame_id, segment_id)
    assert header.generation == generation
    assert len(data) == HEADER_BYTES + header.table_bytes
    offsets, lengths = unpack_ranges(header, data[HEADER_BYTES:])
    assert list(zip(offsets, lengths, strict=True)) == ranges


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
@settings(max_examples=200, deadline=None)
def test_noise_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_header(data)


@pytest.mark.parametrize("seed", range(40))
def test_a_header_with_bytes_changed_is_refused_or_within_bounds(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(framed(Header(FrameKind.WRITE, 1, 8192, 5, 6), [(0, 4096), (4096, 4096)]))
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        header = unpack_header(data[:HEADER_BYTES])
        _, lengths = unpack_ranges(header, bytes(data[HEADER_BYTES:])[: header.table_bytes])
    except ProtocolError:
        return
    assert header.payload_bytes <= MAX_FRAME_BYTES
    assert header.num_ranges <= MAX_RANGES
    assert sum(lengths) == header.num_bytes


@pytest.mark.parametrize("num_bytes", [MAX_FRAME_BYTES + 1, (1 << 64) - 1])
def test_a_payload_too_long_is_refused_before_memory_is_set_aside(num_bytes: int) -> None:
    with pytest.raises(ProtocolError):
        unpack_header(pack(Header(FrameKind.WRITE, 1, num_bytes)))


@pytest.mark.parametrize(
    "error", [StaleError("a"), LeaseExpiredError("b"), ProtocolError("c"), TransferFailedError("d" * 2000)]
)
def test_a_refusal_keeps_its_kind_and_reason(error: Exception) -> None:
    data = pack_refusal(9, error)
    header = unpack_header(data[:HEADER_BYTES])
    received = refusal_error(header, data[HEADER_BYTES:])
    assert (header.frame_id, type(received)) == (9, type(error))
    assert str(error).startswith(str(received))


def test_an_unknown_refusal_is_a_protocol_error() -> None:
    header = unpack_header(pack(Header(FrameKind.REFUSED, 1, 0, refusal=200)))
    assert isinstance(refusal_error(header, b"\xff"), ProtocolError)
