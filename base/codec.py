"""Values as protobuf messages and back, by tables: a class, and the codecs of the fields that are not plain.

    PART = message_of(KvPart)
    RANK_GRANT = message_of(RankGrant, peer=PEER, part=PART, grant=GRANT)

A field of a dataclass or named tuple is the message's field of the same name. A value is packed as a
dictionary, which protobuf takes wherever it takes a message, so no message is made only to be copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

from base.block_hash import HASH_BYTES, BlockHash
from base.errors import ProtocolError

V = TypeVar("V")
E = TypeVar("E", bound=Enum)


class Codec(NamedTuple, Generic[V]):
    """How one kind of value travels; None does not, and is packed by nobody.

    `unpack` raises ProtocolError for what no value could hold.
    """

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], V]
    is_optional: bool = False
    """Whether the message may lack the field, which is None in the value then."""


def message_of(kind: type[V], /, check: Callable[[V], None] | None = None, **fields: Codec[Any]) -> Codec[V]:
    """Return the codec of a class; `check` raises ProtocolError for a value that cannot be."""
    names: tuple[str, ...] = kind.__match_args__  # type: ignore[attr-defined]
    make: Callable[..., V] = kind
    get = attrgetter(*names) if len(names) > 1 else lambda source: (getattr(source, names[0]),)
    values_of: Callable[[Any], Iterable[Any]] = iter if issubclass(kind, tuple) else get
    packs = [(name, codec.pack) for name, codec in fields.items() if codec.pack is not _same]
    unpacks = [(names.index(name), name, codec.unpack, codec.is_optional) for name, codec in fields.items()]

    def pack(value: V) -> dict[str, Any]:
        packed: dict[str, Any] = dict(zip(names, values_of(value), strict=True))
        for name, pack_field in packs:
            if (field := packed[name]) is not None:
                packed[name] = pack_field(field)
        return packed

    def unpack(message: Any) -> V:
        found = list(get(message))
        for index, name, unpack_field, is_optional in unpacks:
            is_absent = is_optional and not message.HasField(name)
            found[index] = None if is_absent else unpack_field(found[index])
        value = make(*found)
        if check is not None:
            check(value)
        return value

    return Codec(pack, unpack)


def _same(value: Any) -> Any:
    return value


OPTIONAL: Codec[Any] = Codec(_same, _same, is_optional=True)
TUPLE: Codec[Any] = Codec(_same, tuple)
"""Repeated numbers or texts."""


def optional(codec: Codec[V]) -> Codec[V | None]:
    return Codec(codec.pack, codec.unpack, is_optional=True)


def each(codec: Codec[V]) -> Codec[tuple[V, ...]]:
    pack, unpack = codec.pack, codec.unpack
    return Codec(lambda values: list(map(pack, values)), lambda messages: tuple(map(unpack, messages)))


def enum_of(kind: type[E], field: str) -> Codec[E]:
    """Return the codec of an enum by its values; `field` is named in the error for an unknown one."""

    def unpack(value: Any) -> E:
        try:
            return kind(value)
        except ValueError:
            raise ProtocolError(f"{field}: {value!r} is not known") from None

    return Codec(attrgetter("_value_"), unpack)  # `value` is a call


def enum_or_none(kind: type[E], field: str) -> Codec[E | None]:
    """Return the codec of an enum of texts, in which the empty one stands for None."""
    codec = enum_of(kind, field)
    return Codec(codec.pack, lambda text: codec.unpack(text) if text else None)


def enums_of(kind: type[E], field: str) -> Codec[frozenset[E]]:
    unpack = enum_of(kind, field).unpack
    return Codec(
        lambda values: sorted(value.value for value in values), lambda names: frozenset(map(unpack, names))
    )


def hashes(field: str) -> Codec[tuple[BlockHash, ...]]:
    """Return the codec of block hashes; `field` is named in the error for one of another length."""

    def unpack(found: Iterable[bytes]) -> tuple[BlockHash, ...]:
        unpacked = tuple(map(BlockHash, found))
        if any(len(block_hash) != HASH_BYTES for block_hash in unpacked):
            raise ProtocolError(f"{field}: a block hash is not {HASH_BYTES} bytes")
        return unpacked

    return Codec(_same, unpack)
