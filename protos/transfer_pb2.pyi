from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Operation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_UNSPECIFIED: _ClassVar[Operation]
    OPERATION_READ: _ClassVar[Operation]
    OPERATION_WRITE: _ClassVar[Operation]
OPERATION_UNSPECIFIED: Operation
OPERATION_READ: Operation
OPERATION_WRITE: Operation

class PeerDescriptor(_message.Message):
    __slots__ = ("node_id", "epoch", "endpoints", "secret")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    secret: bytes
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ..., secret: _Optional[bytes] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("transport", "address")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    address: str
    def __init__(self, transport: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("segment_id", "generation", "operation", "offsets", "length", "expires_in_s")
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    segment_id: int
    generation: int
    operation: Operation
    offsets: _containers.RepeatedScalarFieldContainer[int]
    length: int
    expires_in_s: float
    def __init__(self, segment_id: _Optional[int] = ..., generation: _Optional[int] = ..., operation: _Optional[_Union[Operation, str]] = ..., offsets: _Optional[_Iterable[int]] = ..., length: _Optional[int] = ..., expires_in_s: _Optional[float] = ...) -> None: ...

class KvPart(_message.Message):
    __slots__ = ("first_layer", "num_layers", "first_head", "num_heads", "has_headless")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    HAS_HEADLESS_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    has_headless: bool
    def __init__(self, first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., has_headless: _Optional[bool] = ...) -> None: ...

class RankGrant(_message.Message):
    __slots__ = ("peer", "part", "grant")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    peer: PeerDescriptor
    part: KvPart
    grant: Grant
    def __init__(self, peer: _Optional[_Union[PeerDescriptor, _Mapping]] = ..., part: _Optional[_Union[KvPart, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ...) -> None: ...
