"""Messages made to harm whoever parses them, generated from the descriptors of what gRPC clients may call.

Every field of every request message, nested ones too, is filled with the smallest of something, spelled by
hand: what no library would send. As long as a message may be, and with as many fields as
`base/message_bounds.py` lets by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from base.message_bounds import MAX_FIELDS, MAX_NUMBERS, count_parts
from bench.hostile_bodies import SERVED_MODEL
from protos import inference_pb2, open_inference_pb2

SERVICES = (inference_pb2, open_inference_pb2, health_pb2, reflection_pb2)
SPARE_FIELDS = 40
SAMPLE_BYTES = 10_000
UNKNOWN = 2_047
"""A number that no message here has for a field."""


class MessageSite(NamedTuple):
    """A field that may be filled."""

    path: str
    """Of the method."""
    is_stream: bool
    """Whether the method reads a stream."""
    name: str
    wrap: Callable[[bytes], bytes]
    """Makes a message of the fields that are to be at the site's level."""
    number: int
    field: FieldDescriptor | None
    """None: a field that nobody knows."""
    root: Descriptor
    """What the method reads."""


def varint(value: int) -> bytes:
    spelled = b""
    while value > 127:
        spelled += bytes([value & 127 | 128])
        value >>= 7
    return spelled + bytes([value])


def within(number: int, inner: bytes) -> bytes:
    """Return a field that holds text, bytes or a message."""
    return varint(number << 3 | 2) + varint(len(inner)) + inner


def grpc_sites() -> Iterator[MessageSite]:
    """Yield every field of every message that gRPC clients may send."""
    for module in SERVICES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                walk = _Walk(path, method.client_streaming, method.input_type)
                yield from walk.within(method.input_type, "", bytes, ())


class _Walk(NamedTuple):
    path: str
    is_stream: bool
    root: Descriptor

    def within(
        self, kind: Descriptor, name: str, wrap: Callable[[bytes], bytes], above: Sequence[Descriptor]
    ) -> Iterator[MessageSite]:
        """Yield the sites of a message's fields; `wrap` makes of such a message one of the method."""
        for field in kind.fields:
            spelled = f"{name}.{field.name}".lstrip(".")
            yield self._site(spelled, wrap, field.number, field)
            inner = field.message_type
            if inner is not None and inner not in above:
                yield from self.within(inner, spelled, _nested(wrap, field.number), (*above, kind))
        yield self._site(f"{name}.?".lstrip("."), wrap, UNKNOWN, None)

    def _site(
        self, name: str, wrap: Callable[[bytes], bytes], number: int, field: FieldDescriptor | None
    ) -> MessageSite:
        return MessageSite(self.path, self.is_stream, name, wrap, number, field, self.root)


def _nested(wrap: Callable[[bytes], bytes], number: int) -> Callable[[bytes], bytes]:
    return lambda inner: wrap(within(number, inner))


def _many(element: Callable[[int], bytes]) -> Callable[[int, int], bytes]:
    def make(number: int, size: int) -> bytes:
        return element(number) * max(1, size // len(element(number)))

    return make


def _one(content: Callable[[int], bytes]) -> Callable[[int, int], bytes]:
    return lambda number, size: within(number, content(size - 9))


def _entries(number: int, size: int) -> bytes:
    """Return entries of a map, with a key of its own each."""
    count = max(1, size // 18)
    return b"".join(
        within(number, b"\x08" + varint(key | 1 << 20) + b"\x11" + bytes(8)) for key in range(count)
    )


def _groups(number: int, size: int) -> bytes:
    depth = size // 2 // len(varint(number << 3))
    return varint(number << 3 | 3) * depth + varint(number << 3 | 4) * depth


FACE = "\N{GRINNING FACE}".encode()
MESSAGE_FILLINGS: dict[str, Callable[[int, int], bytes]] = {
    "empty ones": _many(lambda number: within(number, b"")),
    "ones of a field": _many(lambda number: within(number, b"\x08\x01")),
    "ones of an empty text": _many(lambda number: within(number, b"\x0a\x00")),
    "ones of a letter": _many(lambda number: within(number, b"a")),
    "ones of a face": _many(lambda number: within(number, FACE)),
    "entries": _entries,
    "numbers": _many(lambda number: varint(number << 3) + b"\x01"),
    "long numbers": _many(lambda number: varint(number << 3) + b"\xff" * 9 + b"\x01"),
    "fixed numbers": _many(lambda number: varint(number << 3 | 1) + bytes(8)),
    "numbers, packed": _one(lambda size: b"\x01" * size),
    "different numbers, packed": _one(lambda size: b"\x80\x10" * (size // 2)),
    "long numbers, packed": _one(lambda size: (b"\xff" * 4 + b"\x0f") * (size // 5)),
    "text": _one(lambda size: b"a " * (size // 2)),
    "text of one word": _one(lambda size: b"a" * size),
    "wide text": _one(lambda size: FACE + b"a " * ((size - 4) // 2)),
    "text of faces": _one(lambda size: FACE * (size // 4)),
    "bytes that are no text": _one(lambda size: b"\xff" * size),
    "groups in groups": _groups,
    "cut off": lambda number, size: varint(number << 3 | 2) + varint(1 << 40) + b"a" * (size - 9),
    "itself in itself": lambda number, size: _in_itself(number, min(size, 40_000)),
}


def _in_itself(number: int, size: int) -> bytes:
    """Return a field within itself, again and again: quadratic to make, so it is not long."""
    inner = b""
    while len(inner) < size - 9:
        inner = within(number, inner)
    return inner


BESIDE = {
    "/conductor.v1.Inference/Generate": inference_pb2.GenerateRequest(
        text="a", stop=inference_pb2.Stop(max_tokens=1)
    ).SerializeToString(),
    "/conductor.v1.Inference/Embed": inference_pb2.EmbedRequest(
        inputs=[inference_pb2.EmbedInput(text="a")]
    ).SerializeToString(),
    "/inference.GRPCInferenceService/ModelInfer": open_inference_pb2.ModelInferRequest(
        model_name=SERVED_MODEL,
        inputs=[
            open_inference_pb2.ModelInferRequest.InferInputTensor(
                name="text_input",
                datatype="BYTES",
                shape=[1],
                contents=open_inference_pb2.InferTensorContents(bytes_contents=[b"a"]),
            )
        ],
        parameters={"max_tokens": open_inference_pb2.InferParameter(int64_param=1)},
    ).SerializeToString(),
}


def message(site: MessageSite, filling: str, size: int) -> bytes:
    """Return a message of at most `size` bytes."""
    beside = BESIDE.get(site.path, b"")
    overhead = len(beside) + len(site.wrap(bytes(1 << 14))) - (1 << 14) + 9
    return beside + site.wrap(MESSAGE_FILLINGS[filling](site.number, size - overhead))


def fields_let_by(site: MessageSite, filling: str, limit: int) -> int | None:
    """Return how many bytes of a filling have as many parts as a message may; None: few at any length."""
    try:
        found = count_parts(message(site, filling, SAMPLE_BYTES), site.root)
    except DecodeError:
        return None
    share = max(found.num_fields / (MAX_FIELDS - SPARE_FIELDS), found.num_numbers / MAX_NUMBERS)
    size = int(SAMPLE_BYTES * 0.99 / share)
    return size if found.num_fields + found.num_numbers > SPARE_FIELDS and size < limit else None
