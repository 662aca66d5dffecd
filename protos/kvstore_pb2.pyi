from protos import transfer_pb2 as _transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreMember(_message.Message):
    __slots__ = ("node_id", "epoch", "address", "host", "peer", "block_bytes")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    address: str
    host: str
    peer: _transfer_pb2.PeerDescriptor
    block_bytes: int
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., host: _Optional[str] = ..., peer: _Optional[_Union[_transfer_pb2.PeerDescriptor, _Mapping]] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class Chain(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    def __init__(self, hashes: _Optional[bytes] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("num_blocks", "num_in_memory", "member")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_in_memory: int
    member: StoreMember
    def __init__(self, num_blocks: _Optional[int] = ..., num_in_memory: _Optional[int] = ..., member: _Optional[_Union[StoreMember, _Mapping]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("hashes", "tenant")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    tenant: str
    def __init__(self, hashes: _Optional[bytes] = ..., tenant: _Optional[str] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("ticket", "missing", "grant")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    missing: _containers.RepeatedScalarFieldContainer[int]
    grant: _transfer_pb2.Grant
    def __init__(self, ticket: _Optional[int] = ..., missing: _Optional[_Iterable[int]] = ..., grant: _Optional[_Union[_transfer_pb2.Grant, _Mapping]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("ticket", "checksums")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("num_stored",)
    NUM_STORED_FIELD_NUMBER: _ClassVar[int]
    num_stored: int
    def __init__(self, num_stored: _Optional[int] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    def __init__(self, ticket: _Optional[int] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("hashes", "first")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    first: int
    def __init__(self, hashes: _Optional[bytes] = ..., first: _Optional[int] = ...) -> None: ...

class LeaseResponse(_message.Message):
    __slots__ = ("ticket", "num_blocks", "grant", "checksums")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    num_blocks: int
    grant: _transfer_pb2.Grant
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket: _Optional[int] = ..., num_blocks: _Optional[int] = ..., grant: _Optional[_Union[_transfer_pb2.Grant, _Mapping]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("hash",)
    HASH_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    def __init__(self, hash: _Optional[bytes] = ...) -> None: ...
