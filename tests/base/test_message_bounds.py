"""Fields of a message are counted on its bytes, and the walk ends where there are too many."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from base.message_bounds import MAX_FIELDS, MAX_NUMBERS, count_parts, excess
from protos import inference_pb2 as pb

KIND = pb.GenerateRequest.DESCRIPTOR
MIB = 1 << 20


def within(number: int, inner: bytes) -> bytes:
    """Return a field that holds a message, spelled by hand."""
    length, spelled = len(inner), b""
    while length > 127:
        spelled += bytes([length & 127 | 128])
        length >>= 7
    return bytes([number << 3 | 2]) + spelled + bytes([length]) + inner


HOSTILE = {
    "empty chat messages": within(5, b"\x0a\x00" * (MIB // 4)),
    "token ids that are not packed": within(4, b"\x08\x01" * (MIB // 4)),
    "empty stop strings": within(7, b"\x1a\x00" * (MIB // 4)),
    "empty biases": within(6, b"\x4a\x00" * (MIB // 4)),
    "fields that nobody knows": b"\xf8\x07\x01" * (MIB // 4),
    "one message again and again": within(6, b"") * (MIB // 4),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_walk_ends_at_the_first_field_that_is_too_many(name):
    assert count_parts(HOSTILE[name], KIND).num_fields == MAX_FIELDS + 1


PACKED = {
    "of a byte": (4, 1, b"\x01"),
    "of two bytes": (4, 1, b"\xff\x01"),
    "of ten bytes": (7, 4, b"\xff" * 9 + b"\x01"),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("parts", [1, 7], ids=["one list", "seven"])
def test_packed_numbers_are_counted_and_more_than_any_prompt_has_are_refused(name, parts):
    number, inner, each = PACKED[name]

    def message(count: int) -> bytes:
        return within(number, within(inner, each * (count // parts)) * parts)

    fits = MAX_NUMBERS // parts * parts
    assert count_parts(message(fits), KIND) == (1 + parts, fits)
    assert not excess(message(fits), KIND)
    assert f"more than {MAX_NUMBERS} numbers" in excess(message(fits + parts), KIND)


texts = st.text(max_size=5)


@given(
    st.lists(st.tuples(texts, texts), max_size=8),
    st.lists(texts, max_size=8),
    st.dictionaries(st.integers(0, 99), st.floats(allow_nan=False), max_size=5),
    st.integers(-5, 5),
)
def test_each_field_counts_once_wherever_it_is(turns, stops, biases, priority):
    message = pb.GenerateRequest(priority=priority)
    message.chat.SetInParent()
    for role, content in turns:
        message.chat.messages.add(role=role, content=content)
    message.stop.strings.extend(stops)
    message.stop.SetInParent()
    message.sampling.logit_bias.update(biases)
    message.sampling.SetInParent()
    expected = 3 + bool(priority) + len(stops) + 3 * len(biases)
    expected += sum(1 + bool(role) + bool(content) for role, content in turns)
    assert count_parts(message.SerializeToString(), KIND).num_fields == expected


def test_many_packed_numbers_are_one_field():
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(MIB // 8)))
    assert count_parts(message.SerializeToString(), KIND) == (2, MIB // 8)


@given(st.binary(max_size=40))
def test_any_bytes_are_counted_or_refused(data):
    try:
        assert count_parts(data, KIND).num_fields <= len(data)
    except DecodeError:
        return
