from protos import transfer_pb2 as _transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankCall(_message.Message):
    __slots__ = ("call_id", "write", "sum", "cancel", "grant", "revoke", "read")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    write: MoveBlocks
    sum: SumBlocks
    cancel: CancelCall
    grant: GrantBlocks
    revoke: _transfer_pb2.Grant
    read: MoveBlocks
    def __init__(self, call_id: _Optional[int] = ..., write: _Optional[_Union[MoveBlocks, _Mapping]] = ..., sum: _Optional[_Union[SumBlocks, _Mapping]] = ..., cancel: _Optional[_Union[CancelCall, _Mapping]] = ..., grant: _Optional[_Union[GrantBlocks, _Mapping]] = ..., revoke: _Optional[_Union[_transfer_pb2.Grant, _Mapping]] = ..., read: _Optional[_Union[MoveBlocks, _Mapping]] = ...) -> None: ...

class MoveBlocks(_message.Message):
    __slots__ = ("peer", "grant", "block_ids", "offsets", "peer_part", "part", "deadline_s", "is_background", "comes_in_parts")
    PEER_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    PEER_PART_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    IS_BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    COMES_IN_PARTS_FIELD_NUMBER: _ClassVar[int]
    peer: _transfer_pb2.PeerDescriptor
    grant: _transfer_pb2.Grant
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    peer_part: _transfer_pb2.KvPart
    part: _transfer_pb2.KvPart
    deadline_s: float
    is_background: bool
    comes_in_parts: bool
    def __init__(self, peer: _Optional[_Union[_transfer_pb2.PeerDescriptor, _Mapping]] = ..., grant: _Optional[_Union[_transfer_pb2.Grant, _Mapping]] = ..., block_ids: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ..., peer_part: _Optional[_Union[_transfer_pb2.KvPart, _Mapping]] = ..., part: _Optional[_Union[_transfer_pb2.KvPart, _Mapping]] = ..., deadline_s: _Optional[float] = ..., is_background: _Optional[bool] = ..., comes_in_parts: _Optional[bool] = ...) -> None: ...

class SumBlocks(_message.Message):
    __slots__ = ("block_ids", "part")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    part: _transfer_pb2.KvPart
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ..., part: _Optional[_Union[_transfer_pb2.KvPart, _Mapping]] = ...) -> None: ...

class GrantBlocks(_message.Message):
    __slots__ = ("block_ids", "lease_s")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    lease_s: float
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class CancelCall(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankAnswer(_message.Message):
    __slots__ = ("call_id", "sums", "reason", "message", "granted")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    sums: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    message: str
    granted: _transfer_pb2.RankGrant
    def __init__(self, call_id: _Optional[int] = ..., sums: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., granted: _Optional[_Union[_transfer_pb2.RankGrant, _Mapping]] = ...) -> None: ...
