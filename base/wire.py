"""The messages of `protos/nodes.proto`: what becomes of our values in them, and what they are refused for.

A message off the wire is not trusted: each `*_from` raises ProtocolError, naming the field, for what our own
values could not hold.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from math import isfinite
from typing import Any

from base.block_hash import HASH_BYTES
from base.codec import (
    OPTIONAL,
    TUPLE,
    Codec,
    each,
    enum_of,
    enum_or_none,
    enums_of,
    hashes,
    message_of,
    optional,
)
from base.errors import ProtocolError
from base.grants import Endpoint, Grant, Operation, PeerDescriptor, RankGrant
from base.kv_layout import KvPart
from base.messages import (
    ExpertLoad,
    Failed,
    FromNode,
    Granted,
    Heartbeat,
    KvEvents,
    Lend,
    Lent,
    NodeInfo,
    Prefill,
    Prefilled,
    PrefillTimes,
    Registered,
    Release,
    Reserve,
    Reserved,
    Serve,
    Source,
    Start,
    TellBlocks,
    Tokens,
    ToNode,
    Work,
)
from base.prompt_logprobs import NUMBER_BYTES, PromptLogprobs
from base.request import (
    MAX_TOP_LOGPROBS,
    FinishReason,
    Grammar,
    GrammarKind,
    Pooling,
    RequestId,
    Role,
    SampledToken,
    SamplingParams,
    StopParams,
    TokenLogprobs,
)
from base.step_budget import UNBOUNDED_GAPS, GapBounds
from base.step_cost import StepCost
from protos import nodes_pb2 as pb

TOKEN_ID_BYTES = 4
MAX_NODE_ID_CHARS = 128
MAX_RANKS = 1024


def _unpack_token_ids(packed: bytes) -> tuple[int, ...]:
    if len(packed) % TOKEN_ID_BYTES:
        raise ProtocolError(f"work.token_ids: {len(packed)} bytes")
    return tuple(array("I", packed))


def _check_part(part: KvPart) -> None:
    if not part.num_layers or not part.num_heads:
        raise ProtocolError("part: it has no layer or no head")


def _check_work(work: Work) -> None:
    if len(work.chain_root) != HASH_BYTES:
        raise ProtocolError(f"work.chain_root: {len(work.chain_root)} bytes, not {HASH_BYTES}")
    if not 1 <= work.num_prompt_tokens <= len(work.token_ids):
        raise ProtocolError(f"work.num_prompt_tokens: {work.num_prompt_tokens}")
    if work.stop.max_tokens < 1:
        raise ProtocolError("work.stop.max_tokens: less than 1")


def _check_prefill(prefill: Prefill) -> None:
    if not 0 <= (prefill.num_prompt_logprobs or 0) <= MAX_TOP_LOGPROBS:
        raise ProtocolError(f"prefill.num_prompt_logprobs: more than {MAX_TOP_LOGPROBS}")
    if prefill.pooling is not None and prefill.stays:
        raise ProtocolError("prefill.pooling: of a vector nothing stays")


def _check_times(times: PrefillTimes) -> None:
    if not all(map(isfinite, times)):
        raise ProtocolError("prefilled.times: finite numbers are wanted")


def _check_prefilled(prefilled: Prefilled) -> None:
    vector = prefilled.embedding
    if (prefilled.first_token is None) == (vector is None):
        raise ProtocolError("prefilled: either a token or a vector is wanted")
    if vector is not None and (not vector or len(vector) % NUMBER_BYTES):
        raise ProtocolError(f"prefilled.embedding: {len(vector)} bytes")


def _check_experts(load: ExpertLoad) -> None:
    ratios = load.busiest, load.busiest_of_a_layer, load.busiest_rank, *load.ranks
    if not 1 <= len(load.ranks) <= MAX_RANKS or not all(isfinite(ratio) and ratio >= 0 for ratio in ratios):
        raise ProtocolError(f"heartbeat.experts: 1 to {MAX_RANKS} ranks and finite numbers are wanted")


def _check_node(node: NodeInfo) -> None:
    if not 0 < len(node.node_id) <= MAX_NODE_ID_CHARS or not node.node_id.isprintable():
        raise ProtocolError("register.node_id: 1 to 128 printable characters are wanted")
    if len(node.weights) > MAX_NODE_ID_CHARS or not node.weights.isprintable():
        raise ProtocolError("register.weights: 128 printable characters at most are wanted")
    if not 0 <= node.weights_error <= 2:
        raise ProtocolError("register.weights_error: from 0 to 2")


def _check_gaps(bounds: GapBounds) -> None:
    if not all(bound_s > 0 for bound_s in bounds):
        raise ProtocolError("work.gap_bounds: seconds above 0 are wanted")


def _check_lease(lease: Registered) -> None:
    if not 0 < lease.heartbeat_s < lease.lease_s:
        raise ProtocolError(f"registered: heartbeat {lease.heartbeat_s} s, lease {lease.lease_s} s")


def _pack_token(token: SampledToken) -> dict[str, Any]:
    if token.logprobs is None:
        return {"token_id": token.token_id}
    top = [{"token_id": other, "logprob": logprob} for other, logprob in token.logprobs.top]
    return {"token_id": token.token_id, "logprob": token.logprobs.logprob, "top": top}


def _unpack_token(message: pb.SampledToken) -> SampledToken:
    if not message.HasField("logprob"):
        return SampledToken(message.token_id)
    top = tuple((item.token_id, item.logprob) for item in message.top)
    return SampledToken(message.token_id, TokenLogprobs(message.logprob, top))


# By hand: a table takes a sixth longer, and these are as many as there are tokens.
def _pack_tokens(item: Tokens) -> dict[str, Any]:
    reason = item.finish_reason
    packed: dict[str, Any] = {
        "request_id": item.request_id,
        "tokens": [_pack_token(token) for token in item.tokens],
    }
    if reason is not None:
        packed["finish_reason"] = reason.value
    return packed


def _unpack_tokens(message: pb.Tokens) -> Tokens:
    tokens = tuple([_unpack_token(token) for token in message.tokens])
    reason = _FINISH.unpack(message.finish_reason) if message.finish_reason else None
    return Tokens(RequestId(message.request_id), tokens, reason)


PEER = message_of(PeerDescriptor, endpoints=each(message_of(Endpoint)))
PART = message_of(KvPart, _check_part)
GRANT = message_of(Grant, operation=enum_of(Operation, "grant.operation"), offsets=TUPLE)
RANK_GRANT = message_of(RankGrant, peer=PEER, part=PART, grant=GRANT)

_TOKEN = Codec(_pack_token, _unpack_token)
_FINISH = enum_or_none(FinishReason, "finish_reason")
_LOGIT_BIAS: Codec[tuple[tuple[int, float], ...]] = Codec(
    lambda biases: [{"token_id": token_id, "bias": bias} for token_id, bias in biases],
    lambda items: tuple((item.token_id, item.bias) for item in items),
)
_GRAMMAR = message_of(Grammar, kind=enum_of(GrammarKind, "work.sampling.grammar.kind"))
_GAPS = message_of(GapBounds, _check_gaps)
_WORK = message_of(
    Work,
    _check_work,
    token_ids=Codec(lambda token_ids: array("I", token_ids).tobytes(), _unpack_token_ids),
    sampling=message_of(SamplingParams, logit_bias=_LOGIT_BIAS, grammar=optional(_GRAMMAR)),
    stop=message_of(StopParams, stop_token_ids=TUPLE),
    num_logprobs=OPTIONAL,
    gap_bounds=Codec(
        lambda bounds: None if bounds == UNBOUNDED_GAPS else _GAPS.pack(bounds),
        lambda message: _GAPS.unpack(message) if message.ByteSize() else UNBOUNDED_GAPS,
    ),
)
_SOURCE = message_of(Source, peer=PEER, grant=GRANT, checksums=TUPLE)

_TO_NODE: dict[type, tuple[str, Codec[Any]]] = {
    Reserve: ("reserve", message_of(Reserve, work=_WORK)),
    Prefill: (
        "prefill",
        message_of(
            Prefill,
            _check_prefill,
            work=_WORK,
            source=optional(_SOURCE),
            num_prompt_logprobs=OPTIONAL,
            pooling=enum_or_none(Pooling, "prefill.pooling"),
        ),
    ),
    Granted: (
        "granted",
        message_of(Granted, target=PEER, grant=optional(GRANT), ranks=each(RANK_GRANT)),
    ),
    Lend: ("lend", message_of(Lend, chain=hashes("lend.chain"))),
    Start: ("start", message_of(Start, checksums=TUPLE, parts=each(PART))),
    Serve: ("serve", message_of(Serve, roles=enums_of(Role, "serve.roles"))),
    Release: ("release", message_of(Release)),
}
"""The field of ConductorMessage that holds each class's messages, in the order in which they are unpacked.

Releases come last, because they end what came before."""

_FROM_NODE: dict[type, tuple[str, Codec[Any]]] = {
    Reserved: ("reserved", message_of(Reserved, grant=optional(GRANT), ranks=each(RANK_GRANT))),
    Lent: ("lent", message_of(Lent, grant=GRANT, checksums=TUPLE)),
    Prefilled: (
        "prefilled",
        message_of(
            Prefilled,
            _check_prefilled,
            first_token=optional(_TOKEN),
            finish_reason=_FINISH,
            checksums=TUPLE,
            times=message_of(PrefillTimes, _check_times),
            parts=each(PART),
            prompt_logprobs=optional(message_of(PromptLogprobs, PromptLogprobs.check)),
            embedding=OPTIONAL,
        ),
    ),
    Tokens: ("tokens", Codec(_pack_tokens, _unpack_tokens)),
    Failed: ("failed", message_of(Failed)),
}
"""Codecs of a NodeMessage by type: failures come last, because tokens made before them count."""

_REGISTER = message_of(NodeInfo, _check_node, roles=enums_of(Role, "register.roles"), peer=PEER)
_STEP_COST = message_of(StepCost, StepCost.check, step_tokens=TUPLE)
_REGISTERED = message_of(Registered, _check_lease, step_cost=optional(_STEP_COST))
_EXPERTS = message_of(ExpertLoad, _check_experts, ranks=TUPLE)
_HEARTBEAT = message_of(Heartbeat, roles=enums_of(Role, "heartbeat.roles"), experts=optional(_EXPERTS))
_KV_EVENTS = message_of(KvEvents, stored=hashes("kv_events.stored"), removed=hashes("kv_events.removed"))


def to_node(items: Iterable[ToNode], heartbeat: bool = False) -> pb.ConductorMessage:
    """Pack everything that waits for a node into one message."""
    message = pb.ConductorMessage(heartbeat=heartbeat)
    for item in items:
        if isinstance(item, TellBlocks):
            message.wants_snapshot = True
        else:
            field, codec = _TO_NODE[type(item)]
            getattr(message, field).add(**codec.pack(item))
    return message


def to_node_from(message: pb.ConductorMessage) -> list[ToNode]:
    """Unpack a conductor's message, without its `TellBlocks`: whoever has the stream answers that."""
    return _unpacked(message, _TO_NODE)


def from_node(items: Iterable[FromNode]) -> pb.NodeMessage:
    """Pack everything that waits for the conductor into one message."""
    message = pb.NodeMessage()
    for item in items:
        field, codec = _FROM_NODE[type(item)]
        getattr(message, field).add(**codec.pack(item))
    return message


def from_node_from(message: pb.NodeMessage) -> list[FromNode]:
    """Unpack a node's message."""
    return _unpacked(message, _FROM_NODE)


def _unpacked(message: Any, table: dict[type, tuple[str, Codec[Any]]]) -> list[Any]:
    # Plain loops: most messages hold one thing, and lists in lists take twice as long.
    items = []
    for field, codec in table.values():
        for item in getattr(message, field):
            items.append(codec.unpack(item))
    return items


def register(node: NodeInfo) -> pb.NodeMessage:
    """Return the first message of a stream."""
    return pb.NodeMessage(register=_REGISTER.pack(node))


def register_from(message: pb.NodeMessage) -> NodeInfo:
    """Raises ProtocolError if the message is no registration."""
    if not message.HasField("register"):
        raise ProtocolError("the first message of a node is not Register")
    return _REGISTER.unpack(message.register)


def lease_to(lease: Registered) -> pb.ConductorMessage:
    return pb.ConductorMessage(registered=_REGISTERED.pack(lease))


def refused(reason: str) -> pb.ConductorMessage:
    """Return what answers a registration in place of a lease."""
    return pb.ConductorMessage(refused=reason)


def lease_from(message: pb.ConductorMessage) -> Registered:
    """Raises ProtocolError if the message does not answer a registration, or refuses it."""
    if message.refused:
        raise ProtocolError(f"refused: {message.refused}")
    if not message.HasField("registered"):
        raise ProtocolError("the first message of the conductor is not Registered")
    return _REGISTERED.unpack(message.registered)


def add_state(message: pb.NodeMessage, heartbeat: Heartbeat | None, kv_events: KvEvents | None) -> None:
    """Put a node's state beside its results."""
    if heartbeat is not None:
        message.heartbeat.CopyFrom(pb.Heartbeat(**_HEARTBEAT.pack(heartbeat)))
    if kv_events is not None:
        message.kv_events.CopyFrom(pb.KvEvents(**_KV_EVENTS.pack(kv_events)))


def heartbeat_from(message: pb.NodeMessage) -> Heartbeat | None:
    """Return the heartbeat in a node's message, if one is."""
    return _HEARTBEAT.unpack(message.heartbeat) if message.HasField("heartbeat") else None


def kv_events_from(message: pb.NodeMessage) -> KvEvents | None:
    """Return the KV events in a node's message, if any are."""
    return _KV_EVENTS.unpack(message.kv_events) if message.HasField("kv_events") else None
