"""A bound on the fields of a protobuf message, checked on its bytes before anything parses it.

A field can take two bytes on the wire. A message of 8 MB can so have a million messages within it, each of
which costs microseconds and hundreds of bytes once it is an object; a packed number takes one byte, and is
four or eight to the parser, which doubles a list as it grows. Texts and bytes are cheap at any length. So
fields are counted, those of messages within messages too, and packed numbers; the walk ends at the first too
many.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from base.errors import InvalidRequestError

Parsed = TypeVar("Parsed", bound=Message)

MAX_FIELDS = 12_288
MAX_NUMBERS = 262_144
"""Numbers in all packed lists together: a prompt's token ids, above the context windows that are served."""
FREE_BYTES = 4_096
"""A message that is so short is not walked: it cannot have more than half as many fields."""

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_UNFINISHED = bytes(range(128, 256))
"""The bytes of a varint that others follow."""
_TEXTS = {FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE}
_FIXED_BYTES = {
    **dict.fromkeys(
        (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), 8
    ),
    **dict.fromkeys(
        (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), 4
    ),
}


class Parts(NamedTuple):
    """The numbers of a message's parts, each counted until there are too many."""

    num_fields: int
    """Fields, with those of messages within the message."""
    num_numbers: int
    """Numbers in packed lists."""


def parsed(data: bytes, kind: type[Parsed]) -> Parsed:
    """Return the message that `data` is.

    Raises:
        InvalidRequestError: it has too many parts.
        DecodeError: it is none of this kind.
    """
    descriptor: Any = kind.DESCRIPTOR  # its type is a union of two that are one at run time
    if found := excess(data, descriptor):
        raise InvalidRequestError(f"the message has {found}")
    return kind.FromString(data)


def excess(data: bytes, kind: Descriptor) -> str:
    """Return what a message has too much of, in words; empty: of nothing."""
    if len(data) <= FREE_BYTES:
        return ""
    found = count_parts(data, kind)
    if found.num_fields > MAX_FIELDS:
        return f"more than {MAX_FIELDS} fields; send less, and numbers packed"
    return f"more than {MAX_NUMBERS} numbers; send less" if found.num_numbers > MAX_NUMBERS else ""


def count_parts(data: bytes, kind: Descriptor) -> Parts:
    """Return how much a message is made of.

    Args:
        data: The message as it came.
        kind: What it says it is: which of its fields are messages, and which numbers.

    Raises:
        DecodeError: it is cut off, or has groups, which no message here has.
    """
    pending: list[tuple[int, int, Descriptor]] = [(0, len(data), kind)]
    count = num_numbers = 0
    while pending:
        at, end, descriptor = pending.pop()
        fields = _looked_into(descriptor)
        while at < end:
            count += 1
            if count > MAX_FIELDS:
                return Parts(count, num_numbers)
            tag, at = _varint(data, at, end)
            begin, at = _value(data, at, end, tag & 7)
            if at > end:
                raise DecodeError("the message is cut off")
            field = fields.get(tag >> 3)
            if field is None or tag & 7 != _DELIMITED:
                continue
            if field.message_type is not None:
                if begin < at:
                    pending.append((begin, at, field.message_type))
                continue
            num_numbers += _num_packed(data, begin, at, field)
            if num_numbers > MAX_NUMBERS:
                return Parts(count, num_numbers)
    return Parts(count, num_numbers)


@functools.cache
def _looked_into(kind: Descriptor) -> dict[int, FieldDescriptor]:
    """Return the fields of a message that may hold messages or packed numbers, by number."""
    return {
        field.number: field
        for field in kind.fields
        if field.message_type or (field.is_repeated and field.cpp_type not in _TEXTS)
    }


def _num_packed(data: bytes, begin: int, end: int, field: FieldDescriptor) -> int:
    fixed_bytes = _FIXED_BYTES.get(field.type)
    if fixed_bytes is not None:
        return (end - begin) // fixed_bytes
    if end - begin > _MAX_VARINT_BYTES * MAX_NUMBERS:
        return MAX_NUMBERS + 1
    return len(data[begin:end].translate(None, _UNFINISHED))


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
