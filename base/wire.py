"""Our values to protobuf messages and back: work and results. `wire_membership.py` has the rest.

A message off the wire is not trusted: each `*_from` raises ProtocolError, naming the
field, for what our own values could not hold.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TypeVar

from base.block_hash import HASH_BYTES, BlockHash
from base.errors import ProtocolError
from base.grants import Endpoint, Grant, Operation, PeerDescriptor, RankGrant
from base.kv_layout import KvPart
from base.messages import (
    Failed,
    FromNode,
    Lend,
    Lent,
    Prefill,
    Prefilled,
    PrefillTimes,
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
from base.request import (
    SAMPLING_FIELDS,
    FinishReason,
    RequestId,
    Role,
    SampledToken,
    SamplingParams,
    StopParams,
    TokenLogprobs,
)
from protos import nodes_pb2 as pb
from protos import transfer_pb2 as transfer_pb

T = TypeVar("T")

TOKEN_ID_BYTES = 4

_sampling_numbers = attrgetter(*SAMPLING_FIELDS)

_OPERATIONS = {
    Operation.READ: transfer_pb.OPERATION_READ,
    Operation.WRITE: transfer_pb.OPERATION_WRITE,
}
_OPERATION_OF = {number: operation for operation, number in _OPERATIONS.items()}


def enum_from(kind: Callable[[str], T], value: str, field: str) -> T:
    """Raises ProtocolError, naming the field."""
    try:
        return kind(value)
    except ValueError:
        raise ProtocolError(f"{field}: {value!r} is not known") from None


# --- grants -----------------------------------------------------------------------------


def peer_to(peer: PeerDescriptor) -> transfer_pb.PeerDescriptor:
    return transfer_pb.PeerDescriptor(
        node_id=peer.node_id,
        epoch=peer.epoch,
        endpoints=[
            transfer_pb.Endpoint(transport=end.transport, address=end.address) for end in peer.endpoints
        ],
        secret=peer.secret,
    )


def peer_from(message: transfer_pb.PeerDescriptor) -> PeerDescriptor:
    return PeerDescriptor(
        message.node_id,
        message.epoch,
        tuple(Endpoint(end.transport, end.address) for end in message.endpoints),
        message.secret,
    )


def grant_to(grant: Grant) -> transfer_pb.Grant:
    return transfer_pb.Grant(
        segment_id=grant.segment_id,
        generation=grant.generation,
        operation=_OPERATIONS[grant.operation],
        offsets=grant.offsets,
        length=grant.length,
        expires_in_s=grant.expires_in_s,
    )


def grant_from(message: transfer_pb.Grant) -> Grant:
    operation = _OPERATION_OF.get(message.operation)
    if operation is None:
        raise ProtocolError(f"grant.operation: {message.operation} is not known")
    return Grant(
        segment_id=message.segment_id,
        generation=message.generation,
        operation=operation,
        offsets=tuple(message.offsets),
        length=message.length,
        expires_in_s=message.expires_in_s,
    )


def part_to(part: KvPart) -> transfer_pb.KvPart:
    return transfer_pb.KvPart(
        first_layer=part.first_layer,
        num_layers=part.num_layers,
        first_head=part.first_head,
        num_heads=part.num_heads,
    )


def part_from(message: transfer_pb.KvPart) -> KvPart:
    if not message.num_layers or not message.num_heads:
        raise ProtocolError("part: it has no layer or no head")
    return KvPart(message.first_layer, message.num_layers, message.first_head, message.num_heads)


def rank_grant_to(told: RankGrant) -> transfer_pb.RankGrant:
    return transfer_pb.RankGrant(peer=peer_to(told.peer), part=part_to(told.part), grant=grant_to(told.grant))


def rank_grant_from(message: transfer_pb.RankGrant) -> RankGrant:
    return RankGrant(peer_from(message.peer), part_from(message.part), grant_from(message.grant))


def _grant_or_none_to(grant: Grant | None) -> transfer_pb.Grant | None:
    return grant_to(grant) if grant is not None else None


def _source_to(source: Source | None) -> pb.Source | None:
    if source is None:
        return None
    return pb.Source(
        peer=peer_to(source.peer),
        grant=grant_to(source.grant),
        checksums=source.checksums,
        first_block=source.first_block,
    )


def _source_from(message: pb.Source) -> Source:
    return Source(
        peer_from(message.peer), grant_from(message.grant), tuple(message.checksums), message.first_block
    )


def hashes_from(hashes: Iterable[bytes], field: str) -> tuple[BlockHash, ...]:
    """Raises ProtocolError, naming the field."""
    found = tuple(BlockHash(block_hash) for block_hash in hashes)
    if any(len(block_hash) != HASH_BYTES for block_hash in found):
        raise ProtocolError(f"{field}: a block hash is not {HASH_BYTES} bytes")
    return found


# --- work -------------------------------------------------------------------------------


def _work_to(work: Work) -> pb.Work:
    # The message spells the fields as the value does.
    sampling = work.sampling._asdict()
    sampling["logit_bias"] = [
        pb.LogitBias(token_id=token, bias=bias) for token, bias in work.sampling.logit_bias
    ]
    return pb.Work(
        request_id=work.request_id,
        token_ids=array("I", work.token_ids).tobytes(),
        num_prompt_tokens=work.num_prompt_tokens,
        chain_root=work.chain_root,
        sampling=pb.SamplingParams(**sampling),
        stop=pb.StopParams(
            max_tokens=work.stop.max_tokens,
            min_tokens=work.stop.min_tokens,
            stop_token_ids=work.stop.stop_token_ids,
        ),
        num_logprobs=work.num_logprobs,
        priority=work.priority,
        deadline_s=work.deadline_s,
        traceparent=work.traceparent,
    )


def _work_from(message: pb.Work) -> Work:
    if len(message.token_ids) % TOKEN_ID_BYTES:
        raise ProtocolError(f"work.token_ids: {len(message.token_ids)} bytes")
    token_ids = tuple(array("I", message.token_ids))
    if len(message.chain_root) != HASH_BYTES:
        raise ProtocolError(f"work.chain_root: {len(message.chain_root)} bytes, not {HASH_BYTES}")
    if not 1 <= message.num_prompt_tokens <= len(token_ids):
        raise ProtocolError(f"work.num_prompt_tokens: {message.num_prompt_tokens}")
    if message.stop.max_tokens < 1:
        raise ProtocolError("work.stop.max_tokens: less than 1")
    sampling = message.sampling
    return Work(
        request_id=RequestId(message.request_id),
        token_ids=token_ids,
        num_prompt_tokens=message.num_prompt_tokens,
        chain_root=BlockHash(message.chain_root),
        sampling=SamplingParams._make(
            (*_sampling_numbers(sampling), tuple((item.token_id, item.bias) for item in sampling.logit_bias))
        ),
        stop=StopParams(
            max_tokens=message.stop.max_tokens,
            min_tokens=message.stop.min_tokens,
            stop_token_ids=tuple(message.stop.stop_token_ids),
        ),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        priority=message.priority,
        deadline_s=message.deadline_s,
        traceparent=message.traceparent,
    )


def to_node(items: Iterable[ToNode], heartbeat: bool = False) -> pb.ConductorMessage:
    """Pack everything that waits for a node into one message."""
    message = pb.ConductorMessage(heartbeat=heartbeat)
    for item in items:
        match item:
            case Reserve():
                message.reserve.add(work=_work_to(item.work))
            case Prefill():
                message.prefill.add(
                    work=_work_to(item.work),
                    target=peer_to(item.target),
                    grant=_grant_or_none_to(item.grant),
                    first_block=item.first_block,
                    source=_source_to(item.source),
                    ranks=map(rank_grant_to, item.ranks),
                    stays=item.stays,
                )
            case Lend():
                message.lend.add(
                    request_id=item.request_id,
                    chain=item.chain,
                    lease_s=item.lease_s,
                    first_block=item.first_block,
                )
            case Start():
                message.start.add(
                    request_id=item.request_id,
                    first_token_id=item.first_token_id,
                    checksums=item.checksums,
                    parts=map(part_to, item.parts),
                )
            case Release():
                message.release.add(request_id=item.request_id)
            case Serve():
                roles = sorted(role.value for role in item.roles)
                message.serve.add(roles=roles, draining=item.is_draining, fence=item.fence)
            case TellBlocks():
                message.tell_blocks = True
    return message


def to_node_from(message: pb.ConductorMessage) -> list[ToNode]:
    """Unpack a conductor's message. Releases come last: they end what came before.

    `TellBlocks` is not among the items: whoever has the stream answers it.
    """
    items: list[ToNode] = [Reserve(_work_from(item.work)) for item in message.reserve]
    items += [
        Prefill(
            _work_from(item.work),
            peer_from(item.target),
            grant_from(item.grant) if item.HasField("grant") else None,
            item.first_block,
            _source_from(item.source) if item.HasField("source") else None,
            tuple(map(rank_grant_from, item.ranks)),
            item.stays,
        )
        for item in message.prefill
    ]
    items += [
        Lend(
            RequestId(item.request_id), hashes_from(item.chain, "lend.chain"), item.lease_s, item.first_block
        )
        for item in message.lend
    ]
    items += [
        Start(
            RequestId(item.request_id),
            item.first_token_id,
            tuple(item.checksums),
            tuple(map(part_from, item.parts)),
        )
        for item in message.start
    ]
    items += [
        Serve(
            frozenset(enum_from(Role, role, "serve.roles") for role in item.roles), item.draining, item.fence
        )
        for item in message.serve
    ]
    items += [Release(RequestId(item.request_id)) for item in message.release]
    return items


# --- results ----------------------------------------------------------------------------


def _token_to(token: SampledToken) -> pb.SampledToken:
    if token.logprobs is None:
        return pb.SampledToken(token_id=token.token_id)
    return pb.SampledToken(
        token_id=token.token_id,
        logprob=token.logprobs.logprob,
        top=[pb.TopLogprob(token_id=other, logprob=logprob) for other, logprob in token.logprobs.top],
    )


def _token_from(message: pb.SampledToken) -> SampledToken:
    if not message.HasField("logprob"):
        return SampledToken(message.token_id)
    top = tuple((item.token_id, item.logprob) for item in message.top)
    return SampledToken(message.token_id, TokenLogprobs(message.logprob, top))


def _finish_to(reason: FinishReason | None) -> str:
    return reason.value if reason is not None else ""


def _finish_from(value: str) -> FinishReason | None:
    return enum_from(FinishReason, value, "finish_reason") if value else None


def from_node(items: Iterable[FromNode]) -> pb.NodeMessage:
    """Pack everything that waits for the conductor into one message."""
    message = pb.NodeMessage()
    for item in items:
        match item:
            case Tokens():
                message.tokens.add(
                    request_id=item.request_id,
                    tokens=[_token_to(token) for token in item.tokens],
                    finish_reason=_finish_to(item.finish_reason),
                )
            case Reserved():
                message.reserved.add(
                    request_id=item.request_id,
                    num_matched_blocks=item.num_matched_blocks,
                    grant=_grant_or_none_to(item.grant),
                    ranks=map(rank_grant_to, item.ranks),
                )
            case Lent():
                message.lent.add(
                    request_id=item.request_id, grant=grant_to(item.grant), checksums=item.checksums
                )
            case Prefilled():
                message.prefilled.append(_prefilled_to(item))
            case Failed():
                message.failed.add(request_id=item.request_id, reason=item.reason, message=item.message)
    return message


def from_node_from(message: pb.NodeMessage) -> list[FromNode]:
    """Unpack a node's message. Failures come last: tokens made before them count."""
    # Plain loops: most messages hold one thing, and six lists in lists take twice as long.
    items: list[FromNode] = []
    for reserved in message.reserved:
        grant = grant_from(reserved.grant) if reserved.HasField("grant") else None
        ranks = tuple(map(rank_grant_from, reserved.ranks))
        items.append(Reserved(RequestId(reserved.request_id), reserved.num_matched_blocks, grant, ranks))
    for lent in message.lent:
        items.append(Lent(RequestId(lent.request_id), grant_from(lent.grant), tuple(lent.checksums)))
    for prefilled in message.prefilled:
        items.append(_prefilled_from(prefilled))
    for made in message.tokens:
        tokens = tuple([_token_from(token) for token in made.tokens])
        items.append(Tokens(RequestId(made.request_id), tokens, _finish_from(made.finish_reason)))
    for failed in message.failed:
        items.append(Failed(RequestId(failed.request_id), failed.reason, failed.message))
    return items


def _prefilled_to(item: Prefilled) -> pb.Prefilled:
    return pb.Prefilled(
        request_id=item.request_id,
        first_token=_token_to(item.first_token),
        finish_reason=_finish_to(item.finish_reason),
        num_cached_tokens=item.num_cached_tokens,
        checksums=item.checksums,
        times=pb.PrefillTimes(
            queue_s=item.times.queue_s,
            compute_s=item.times.compute_s,
            exposed_transfer_s=item.times.exposed_transfer_s,
            exposed_load_s=item.times.exposed_load_s,
            bubble_s=item.times.bubble_s,
        ),
        parts=map(part_to, item.parts),
        stays=item.stays,
    )


def _prefilled_from(message: pb.Prefilled) -> Prefilled:
    times = message.times
    return Prefilled(
        RequestId(message.request_id),
        _token_from(message.first_token),
        _finish_from(message.finish_reason),
        message.num_cached_tokens,
        tuple(message.checksums),
        PrefillTimes(
            times.queue_s, times.compute_s, times.exposed_transfer_s, times.exposed_load_s, times.bubble_s
        ),
        tuple(map(part_from, message.parts)),
        message.stays,
    )
