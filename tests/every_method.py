"""Every gRPC method of the program, from its descriptors, and messages to call each with."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

PROTOS = Path(__file__).parent.parent / "protos"
MAX_DEPTH = 4


def every_method() -> Iterator[tuple[str, MethodDescriptor]]:
    """Yield the name of each, as gRPC has it on the wire, with its descriptor."""
    ours = [import_module(f"protos.{path.stem}") for path in sorted(PROTOS.glob("*_pb2.py"))]
    for module in [*ours, health_pb2, reflection_pb2]:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}", method


def filled(kind: Descriptor, text: str, data: bytes, depth: int = 0) -> Message:
    """Return a message whose fields are all set: numbers to 1, the others to `text` and `data`."""
    message: Message = GetMessageClass(kind)()
    for field in kind.fields:
        if field.message_type is None:
            value = _scalar(field, text, data)
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
        elif depth < MAX_DEPTH and not field.message_type.GetOptions().map_entry:
            part = getattr(message, field.name)
            (part.add() if field.is_repeated else part).CopyFrom(
                filled(field.message_type, text, data, depth + 1)
            )
    return message


def _scalar(field: FieldDescriptor, text: str, data: bytes) -> str | bytes | int:
    return {FieldDescriptor.CPPTYPE_STRING: data if field.type == field.TYPE_BYTES else text}.get(
        field.cpp_type, 1
    )
