"""A bound on the fields of a protobuf message, checked on its bytes before anything parses it.

A field can take two bytes on the wire. A message of 8 MB can so have a million messages within it, each of
which costs microseconds and hundreds of bytes once it is an object. Packed numbers, texts and bytes are one
field however long they are. So fields are counted, those of messages within messages too, and the walk ends
at the first that is too many.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

MAX_FIELDS = 16_384
FREE_BYTES = 4_096
"""A message that is so short is not walked: it cannot have more than half as many fields."""

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


def count_fields(data: bytes, kind: Descriptor, limit: int = MAX_FIELDS) -> int:
    """Return how many fields a message has, with those of messages in it; at most `limit` + 1.

    Args:
        data: The message as it came.
        kind: What it says it is: which of its fields are messages.
        limit: The walk ends after one more.

    Raises:
        DecodeError: it is cut off, or has groups, which no message here has.
    """
    pending: list[tuple[int, int, Descriptor]] = [(0, len(data), kind)]
    count = 0
    while pending:
        at, end, descriptor = pending.pop()
        kinds = {number: field.message_type for number, field in descriptor.fields_by_number.items()}
        while at < end:
            count += 1
            if count > limit:
                return count
            tag, at = _varint(data, at, end)
            begin, at = _value(data, at, end, tag & 7)
            if at > end:
                raise DecodeError("the message is cut off")
            within = kinds.get(tag >> 3)
            if within is not None and tag & 7 == _DELIMITED:
                pending.append((begin, at, within))
    return count


def _value(data: bytes, at: int, end: int, wire_type: int) -> tuple[int, int]:
    """Return where a field's value begins and ends."""
    if wire_type == _DELIMITED:
        length, begin = _varint(data, at, end)
        return begin, begin + length
    if wire_type == _VARINT:
        return at, _varint(data, at, end)[1]
    if wire_type in (_FIXED64, _FIXED32):
        return at, at + (8 if wire_type == _FIXED64 else 4)
    raise DecodeError(f"a field of wire type {wire_type}")


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    for place in range(at, min(end, at + _MAX_VARINT_BYTES)):
        byte = data[place]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place + 1
        shift += 7
    raise DecodeError("the message is cut off")
