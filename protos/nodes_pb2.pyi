from protos import transfer_pb2 as _transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeMessage(_message.Message):
    __slots__ = ("register", "heartbeat", "reserved", "prefilled", "tokens", "failed", "kv_events", "lent")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    LENT_FIELD_NUMBER: _ClassVar[int]
    register: Register
    heartbeat: Heartbeat
    reserved: _containers.RepeatedCompositeFieldContainer[Reserved]
    prefilled: _containers.RepeatedCompositeFieldContainer[Prefilled]
    tokens: _containers.RepeatedCompositeFieldContainer[Tokens]
    failed: _containers.RepeatedCompositeFieldContainer[Failed]
    kv_events: KvEvents
    lent: _containers.RepeatedCompositeFieldContainer[Lent]
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., reserved: _Optional[_Iterable[_Union[Reserved, _Mapping]]] = ..., prefilled: _Optional[_Iterable[_Union[Prefilled, _Mapping]]] = ..., tokens: _Optional[_Iterable[_Union[Tokens, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[Failed, _Mapping]]] = ..., kv_events: _Optional[_Union[KvEvents, _Mapping]] = ..., lent: _Optional[_Iterable[_Union[Lent, _Mapping]]] = ...) -> None: ...

class ConductorMessage(_message.Message):
    __slots__ = ("registered", "reserve", "prefill", "start", "release", "heartbeat", "lend", "granted", "serve", "wants_snapshot", "refused")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEND_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    SERVE_FIELD_NUMBER: _ClassVar[int]
    WANTS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    registered: Registered
    reserve: _containers.RepeatedCompositeFieldContainer[Reserve]
    prefill: _containers.RepeatedCompositeFieldContainer[Prefill]
    start: _containers.RepeatedCompositeFieldContainer[Start]
    release: _containers.RepeatedCompositeFieldContainer[Release]
    heartbeat: bool
    lend: _containers.RepeatedCompositeFieldContainer[Lend]
    granted: _containers.RepeatedCompositeFieldContainer[Granted]
    serve: _containers.RepeatedCompositeFieldContainer[Serve]
    wants_snapshot: bool
    refused: str
    def __init__(self, registered: _Optional[_Union[Registered, _Mapping]] = ..., reserve: _Optional[_Iterable[_Union[Reserve, _Mapping]]] = ..., prefill: _Optional[_Iterable[_Union[Prefill, _Mapping]]] = ..., start: _Optional[_Iterable[_Union[Start, _Mapping]]] = ..., release: _Optional[_Iterable[_Union[Release, _Mapping]]] = ..., heartbeat: _Optional[bool] = ..., lend: _Optional[_Iterable[_Union[Lend, _Mapping]]] = ..., granted: _Optional[_Iterable[_Union[Granted, _Mapping]]] = ..., serve: _Optional[_Iterable[_Union[Serve, _Mapping]]] = ..., wants_snapshot: _Optional[bool] = ..., refused: _Optional[str] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("node_id", "epoch", "roles", "model_id", "layout_id", "max_model_len", "num_blocks", "block_size", "peer", "protocol_version", "host", "weights", "weights_error", "kv_token_bytes", "max_batch", "chunk_tokens")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ERROR_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    roles: _containers.RepeatedScalarFieldContainer[str]
    model_id: str
    layout_id: str
    max_model_len: int
    num_blocks: int
    block_size: int
    peer: _transfer_pb2.PeerDescriptor
    protocol_version: int
    host: str
    weights: str
    weights_error: float
    kv_token_bytes: int
    max_batch: int
    chunk_tokens: int
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., roles: _Optional[_Iterable[str]] = ..., model_id: _Optional[str] = ..., layout_id: _Optional[str] = ..., max_model_len: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., peer: _Optional[_Union[_transfer_pb2.PeerDescriptor, _Mapping]] = ..., protocol_version: _Optional[int] = ..., host: _Optional[str] = ..., weights: _Optional[str] = ..., weights_error: _Optional[float] = ..., kv_token_bytes: _Optional[int] = ..., max_batch: _Optional[int] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("lease_s", "heartbeat_s", "conductor_epoch", "step_cost")
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    CONDUCTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    heartbeat_s: float
    conductor_epoch: int
    step_cost: StepCost
    def __init__(self, lease_s: _Optional[float] = ..., heartbeat_s: _Optional[float] = ..., conductor_epoch: _Optional[int] = ..., step_cost: _Optional[_Union[StepCost, _Mapping]] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("prefill_token_s", "prefill_token2_s", "decode_fixed_s", "decode_sequence_s", "decode_context_token_s", "chunk_step_s", "mixed_step_s", "chunk_sequence_s", "chunk_token2_s", "attention_rows", "long_chunk_tokens", "step_tokens", "decode_experts_s", "expert_share")
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN2_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIXED_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_SEQUENCE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    CHUNK_STEP_S_FIELD_NUMBER: _ClassVar[int]
    MIXED_STEP_S_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SEQUENCE_S_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKEN2_S_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_ROWS_FIELD_NUMBER: _ClassVar[int]
    LONG_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_EXPERTS_S_FIELD_NUMBER: _ClassVar[int]
    EXPERT_SHARE_FIELD_NUMBER: _ClassVar[int]
    prefill_token_s: float
    prefill_token2_s: float
    decode_fixed_s: float
    decode_sequence_s: float
    decode_context_token_s: float
    chunk_step_s: float
    mixed_step_s: float
    chunk_sequence_s: float
    chunk_token2_s: float
    attention_rows: int
    long_chunk_tokens: int
    step_tokens: _containers.RepeatedScalarFieldContainer[int]
    decode_experts_s: float
    expert_share: float
    def __init__(self, prefill_token_s: _Optional[float] = ..., prefill_token2_s: _Optional[float] = ..., decode_fixed_s: _Optional[float] = ..., decode_sequence_s: _Optional[float] = ..., decode_context_token_s: _Optional[float] = ..., chunk_step_s: _Optional[float] = ..., mixed_step_s: _Optional[float] = ..., chunk_sequence_s: _Optional[float] = ..., chunk_token2_s: _Optional[float] = ..., attention_rows: _Optional[int] = ..., long_chunk_tokens: _Optional[int] = ..., step_tokens: _Optional[_Iterable[int]] = ..., decode_experts_s: _Optional[float] = ..., expert_share: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence", "num_free_blocks", "num_held_blocks", "num_waiting", "num_running", "num_queued_tokens", "num_context_tokens", "is_draining", "roles", "fence", "next_kv_event", "num_step_rows", "num_step_prompt_tokens", "step_budget_tokens", "experts", "num_shared_blocks")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_KV_EVENT_FIELD_NUMBER: _ClassVar[int]
    NUM_STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEP_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    num_free_blocks: int
    num_held_blocks: int
    num_waiting: int
    num_running: int
    num_queued_tokens: int
    num_context_tokens: int
    is_draining: bool
    roles: _containers.RepeatedScalarFieldContainer[str]
    fence: int
    next_kv_event: int
    num_step_rows: int
    num_step_prompt_tokens: int
    step_budget_tokens: int
    experts: ExpertLoad
    num_shared_blocks: int
    def __init__(self, sequence: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_held_blocks: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., num_context_tokens: _Optional[int] = ..., is_draining: _Optional[bool] = ..., roles: _Optional[_Iterable[str]] = ..., fence: _Optional[int] = ..., next_kv_event: _Optional[int] = ..., num_step_rows: _Optional[int] = ..., num_step_prompt_tokens: _Optional[int] = ..., step_budget_tokens: _Optional[int] = ..., experts: _Optional[_Union[ExpertLoad, _Mapping]] = ..., num_shared_blocks: _Optional[int] = ...) -> None: ...

class ExpertLoad(_message.Message):
    __slots__ = ("num_choices", "busiest", "busiest_of_a_layer", "busiest_rank", "ranks")
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    BUSIEST_FIELD_NUMBER: _ClassVar[int]
    BUSIEST_OF_A_LAYER_FIELD_NUMBER: _ClassVar[int]
    BUSIEST_RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    num_choices: int
    busiest: float
    busiest_of_a_layer: float
    busiest_rank: float
    ranks: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, num_choices: _Optional[int] = ..., busiest: _Optional[float] = ..., busiest_of_a_layer: _Optional[float] = ..., busiest_rank: _Optional[float] = ..., ranks: _Optional[_Iterable[float]] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("first_number", "is_snapshot", "stored", "removed")
    FIRST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    first_number: int
    is_snapshot: bool
    stored: _containers.RepeatedScalarFieldContainer[bytes]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, first_number: _Optional[int] = ..., is_snapshot: _Optional[bool] = ..., stored: _Optional[_Iterable[bytes]] = ..., removed: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "grammar")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    grammar: GrammarSource
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., grammar: _Optional[_Union[GrammarSource, _Mapping]] = ...) -> None: ...

class GrammarSource(_message.Message):
    __slots__ = ("kind", "source")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    source: str
    def __init__(self, kind: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class StopParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop_token_ids")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("request_id", "token_ids", "num_prompt_tokens", "chain_root", "sampling", "stop", "num_logprobs", "priority", "deadline_s", "traceparent", "gap_bounds", "evict_first")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_ROOT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    GAP_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIRST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: bytes
    num_prompt_tokens: int
    chain_root: bytes
    sampling: SamplingParams
    stop: StopParams
    num_logprobs: int
    priority: int
    deadline_s: float
    traceparent: str
    gap_bounds: GapBounds
    evict_first: bool
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., chain_root: _Optional[bytes] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[StopParams, _Mapping]] = ..., num_logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., deadline_s: _Optional[float] = ..., traceparent: _Optional[str] = ..., gap_bounds: _Optional[_Union[GapBounds, _Mapping]] = ..., evict_first: _Optional[bool] = ...) -> None: ...

class GapBounds(_message.Message):
    __slots__ = ("mean_s", "longest_s")
    MEAN_S_FIELD_NUMBER: _ClassVar[int]
    LONGEST_S_FIELD_NUMBER: _ClassVar[int]
    mean_s: float
    longest_s: float
    def __init__(self, mean_s: _Optional[float] = ..., longest_s: _Optional[float] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("work",)
    WORK_FIELD_NUMBER: _ClassVar[int]
    work: Work
    def __init__(self, work: _Optional[_Union[Work, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("request_id", "num_matched_blocks", "grant", "ranks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_MATCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_matched_blocks: int
    grant: _transfer_pb2.Grant
    ranks: _containers.RepeatedCompositeFieldContainer[_transfer_pb2.RankGrant]
    def __init__(self, request_id: _Optional[str] = ..., num_matched_blocks: _Optional[int] = ..., grant: _Optional[_Union[_transfer_pb2.Grant, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[_transfer_pb2.RankGrant, _Mapping]]] = ...) -> None: ...

class Lend(_message.Message):
    __slots__ = ("request_id", "chain", "lease_s", "first_block")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    chain: _containers.RepeatedScalarFieldContainer[bytes]
    lease_s: float
    first_block: int
    def __init__(self, request_id: _Optional[str] = ..., chain: _Optional[_Iterable[bytes]] = ..., lease_s: _Optional[float] = ..., first_block: _Optional[int] = ...) -> None: ...

class Lent(_message.Message):
    __slots__ = ("request_id", "grant", "checksums")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    grant: _transfer_pb2.Grant
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., grant: _Optional[_Union[_transfer_pb2.Grant, _Mapping]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("peer", "grant", "checksums", "first_block")
    PEER_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    peer: _transfer_pb2.PeerDescriptor
    grant: _transfer_pb2.Grant
    checksums: _containers.RepeatedScalarFieldContainer[int]
    first_block: int
    def __init__(self, peer: _Optional[_Union[_transfer_pb2.PeerDescriptor, _Mapping]] = ..., grant: _Optional[_Union[_transfer_pb2.Grant, _Mapping]] = ..., checksums: _Optional[_Iterable[int]] = ..., first_block: _Optional[int] = ...) -> None: ...

class Serve(_message.Message):
    __slots__ = ("roles", "fence")
    ROLES_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    roles: _containers.RepeatedScalarFieldContainer[str]
    fence: int
    def __init__(self, roles: _Optional[_Iterable[str]] = ..., fence: _Optional[int] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("work", "source", "stays", "num_prompt_logprobs", "pooling")
    WORK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    work: Work
    source: Source
    stays: bool
    num_prompt_logprobs: int
    pooling: str
    def __init__(self, work: _Optional[_Union[Work, _Mapping]] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., stays: _Optional[bool] = ..., num_prompt_logprobs: _Optional[int] = ..., pooling: _Optional[str] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("request_id", "first_block", "target", "grant", "ranks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    first_block: int
    target: _transfer_pb2.PeerDescriptor
    grant: _transfer_pb2.Grant
    ranks: _containers.RepeatedCompositeFieldContainer[_transfer_pb2.RankGrant]
    def __init__(self, request_id: _Optional[str] = ..., first_block: _Optional[int] = ..., target: _Optional[_Union[_transfer_pb2.PeerDescriptor, _Mapping]] = ..., grant: _Optional[_Union[_transfer_pb2.Grant, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[_transfer_pb2.RankGrant, _Mapping]]] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("request_id", "first_token", "finish_reason", "num_cached_tokens", "checksums", "times", "parts", "stays", "prompt_logprobs", "embedding")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    first_token: SampledToken
    finish_reason: str
    num_cached_tokens: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    times: PrefillTimes
    parts: _containers.RepeatedCompositeFieldContainer[_transfer_pb2.KvPart]
    stays: bool
    prompt_logprobs: PromptLogprobs
    embedding: bytes
    def __init__(self, request_id: _Optional[str] = ..., first_token: _Optional[_Union[SampledToken, _Mapping]] = ..., finish_reason: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ..., times: _Optional[_Union[PrefillTimes, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[_transfer_pb2.KvPart, _Mapping]]] = ..., stays: _Optional[bool] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., embedding: _Optional[bytes] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("logprobs", "top_ids", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, logprobs: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class PrefillTimes(_message.Message):
    __slots__ = ("queue_s", "compute_s", "exposed_transfer_s", "exposed_load_s", "bubble_s", "transfer_s", "num_chunks")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_LOAD_S_FIELD_NUMBER: _ClassVar[int]
    BUBBLE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    compute_s: float
    exposed_transfer_s: float
    exposed_load_s: float
    bubble_s: float
    transfer_s: float
    num_chunks: int
    def __init__(self, queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., exposed_transfer_s: _Optional[float] = ..., exposed_load_s: _Optional[float] = ..., bubble_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., num_chunks: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("request_id", "first_token_id", "checksums", "parts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    first_token_id: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    parts: _containers.RepeatedCompositeFieldContainer[_transfer_pb2.KvPart]
    def __init__(self, request_id: _Optional[str] = ..., first_token_id: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ..., parts: _Optional[_Iterable[_Union[_transfer_pb2.KvPart, _Mapping]]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("token_id", "logprob", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("request_id", "tokens", "finish_reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: _containers.RepeatedCompositeFieldContainer[SampledToken]
    finish_reason: str
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ..., finish_reason: _Optional[str] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("request_id", "reason", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    message: str
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
