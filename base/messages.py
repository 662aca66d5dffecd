"""The messages between the conductor and its nodes, as values.

`protos/nodes.proto` is the same on the wire and says what follows what;
`base/wire.py` converts. What there is of every request is a named tuple, as `base/request.py` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from base.block_hash import BlockHash
from base.grants import Grant, PeerDescriptor, RankGrant
from base.kv_layout import KvPart
from base.prompt_logprobs import PromptLogprobs
from base.request import (
    FinishReason,
    NodeId,
    Pooling,
    RequestId,
    Role,
    SampledToken,
    SamplingParams,
    StopParams,
)
from base.step_budget import UNBOUNDED_GAPS, GapBounds
from base.step_cost import StepCost

PROTOCOL_VERSION = 10
"""Version of protos/nodes.proto. A node of another version is refused, with both named."""


class Work(NamedTuple):
    """One sequence, as a node needs it.

    `token_ids` after `num_prompt_tokens` were generated before, on a node since lost.
    `stop.max_tokens` counts from `num_prompt_tokens`.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    chain_root: BlockHash
    sampling: SamplingParams
    stop: StopParams
    num_logprobs: int | None
    priority: int
    deadline_s: float
    traceparent: str = ""
    """The request's span; empty: it is not traced."""
    gap_bounds: GapBounds = UNBOUNDED_GAPS
    evict_first: bool = False
    """Another node keeps the prompt's KV: what this one has of it is evicted before all else."""


class Reserve(NamedTuple):
    work: Work


@dataclass(frozen=True, slots=True)
class Lend:
    """Lets another node read blocks, until `Release`."""

    request_id: RequestId
    chain: tuple[BlockHash, ...]
    """Hashes from the first block of the prompt on, because stores keep whole chains."""
    lease_s: float
    first_block: int = 0
    """The blocks before it are not wanted."""


@dataclass(frozen=True, slots=True)
class Source:
    """Blocks to load from another node: lent ones."""

    peer: PeerDescriptor
    grant: Grant
    checksums: tuple[int, ...]
    first_block: int
    """Index in the sequence of the block that the first offset is."""


class Prefill(NamedTuple):
    work: Work
    source: Source | None = None
    stays: bool = False
    """The sequence goes on on this node: nothing is written, and `Tokens` follow `Prefilled`."""
    num_prompt_logprobs: int | None = None
    """Likely tokens wanted beside each of the prompt's, with its log probability; None: not even that."""
    pooling: Pooling | None = None
    """The vector that is wanted in place of a token; nothing is written or stays then."""


class Granted(NamedTuple):
    """Where a prompt that is being computed is to be written."""

    request_id: RequestId
    first_block: int
    """Index in the sequence of the first block to write: the decode node has those before it."""
    target: PeerDescriptor
    grant: Grant | None
    """One offset for each block from `first_block` on; None: there is none to write."""
    ranks: tuple[RankGrant, ...] = ()
    """Grants in place of `target` and `grant`, where several ranks of the decode node have its KV."""


class Start(NamedTuple):
    request_id: RequestId
    first_token_id: int
    checksums: tuple[int, ...]
    parts: tuple[KvPart, ...] = ()
    """Parts that the checksums are of, as in `Prefilled`."""


class Release(NamedTuple):
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Serve:
    """An order which roles to prefer from now on."""

    roles: frozenset[Role]
    fence: int
    """The fence of the node's last heartbeat; an order under another one is void."""


@dataclass(frozen=True, slots=True)
class TellBlocks:
    """Asks a node for all its blocks: events were lost. Answered by a snapshot, in the stream itself."""


ToNode = Reserve | Lend | Prefill | Granted | Start | Release | Serve | TellBlocks


class Reserved(NamedTuple):
    request_id: RequestId
    num_matched_blocks: int
    """Leading blocks whose KV the decode node has."""
    grant: Grant | None
    """One offset for each block after those; None: there is none to write."""
    ranks: tuple[RankGrant, ...] = ()
    """Grants in place of `grant`, where several ranks have the node's KV."""


@dataclass(frozen=True, slots=True)
class Lent:
    """Where the blocks from `first_block` on may be read; one checksum for each offset."""

    request_id: RequestId
    grant: Grant
    checksums: tuple[int, ...]


class PrefillTimes(NamedTuple):
    """Where the seconds between Prefill and Prefilled went."""

    queue_s: float
    compute_s: float
    exposed_transfer_s: float
    exposed_load_s: float = 0.0
    """Part of `queue_s` in which a prefix was loaded and nothing of the request computed."""
    bubble_s: float = 0.0
    """Part of `compute_s` in which the last stage of a pipeline was not at this request."""
    transfer_s: float = 0.0
    """Seconds from the beginning of the first write of its KV to the end of the last one."""
    num_chunks: int = 0
    """Steps that computed a part of the prompt."""


class Prefilled(NamedTuple):
    request_id: RequestId
    first_token: SampledToken | None
    """Token drawn at the end of the prompt; None: a vector was wanted."""
    finish_reason: FinishReason | None
    num_cached_tokens: int
    checksums: tuple[int, ...]
    """One for each block written, for each of `parts` in turn."""
    times: PrefillTimes
    parts: tuple[KvPart, ...] = ()
    """Parts of blocks that were written; None: the checksums are of whole blocks."""
    stays: bool = False
    """`Tokens` follow from the same node."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of the prompt; None: none were wanted."""
    embedding: bytes | None = None
    """float32 of the prompt's vector, little-endian; None: none was wanted."""


class Tokens(NamedTuple):
    """Tokens that one step made of one sequence; the last message has a finish reason."""

    request_id: RequestId
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None


class Failed(NamedTuple):
    """The request is over on this node, and nothing of it is held there.

    `reason` is the name of a class of base/errors.py.
    """

    request_id: RequestId
    reason: str
    message: str


FromNode = Reserved | Lent | Prefilled | Tokens | Failed


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node's description of itself when it attaches. None of it changes in its epoch.

    A node without roles has blocks of any model, and lends them: model and layout are in
    their hashes, so it says nothing of either.
    """

    node_id: NodeId
    epoch: int
    roles: frozenset[Role]
    model_id: str
    layout_id: str
    max_model_len: int
    num_blocks: int
    block_size: int
    peer: PeerDescriptor
    host: str
    protocol_version: int = PROTOCOL_VERSION
    weights: str = "none"
    """Format of the model's weights; none: floats."""
    weights_error: float = 0.0
    """Relative error of logits, against those of the weights that were quantised."""
    kv_token_bytes: int = 0
    """Bytes of a token's KV in all layers and ranks; 0: not said."""
    max_batch: int = 0
    """Sequences of one step, at most; 0: not said."""
    chunk_tokens: int = 0
    """Tokens of prompts in one step, at most; 0: not said."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """How evenly tokens went to a node's experts in the last minutes; 1: each expert had its share."""

    num_choices: int
    """Choices of an expert by a token in a layer."""
    busiest: float
    """Choices of a layer's busiest expert over the mean of its experts; the mean of all layers."""
    busiest_of_a_layer: float
    """Choices of the busiest expert over the mean, in the least even layer."""
    busiest_rank: float
    """Choices of the busiest of the ranks that share the experts over their mean; the mean of all layers."""
    ranks: tuple[float, ...]
    """Choices of each rank's experts over the mean of the ranks."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A node's load at one moment."""

    sequence: int
    num_free_blocks: int
    """Free, or cached and evictable."""
    num_held_blocks: int
    num_waiting: int
    num_running: int
    num_queued_tokens: int
    """Prompt tokens not yet computed."""
    num_context_tokens: int
    """Tokens of sequences whose KV is in the cache."""
    is_draining: bool = False
    roles: frozenset[Role] = frozenset()
    """Roles in which the node serves now; empty: those it registered with."""
    fence: int = 0
    """The node's fence, sent above 0 to the one conductor that is in control."""
    next_kv_event: int = 0
    """Number of the first KV event that is in no message yet; 0: not said."""
    num_step_rows: int = 0
    """Sequences that decode, or will as soon as a step has a place for them."""
    num_step_prompt_tokens: int = 0
    """Tokens of prompts in the last step."""
    step_budget_tokens: int = 0
    """Tokens of prompts that a step may have; 0: not said."""
    experts: ExpertLoad | None = None
    """How evenly experts are chosen; None: the model has none, or nobody chose one yet."""
    num_shared_blocks: int = 0
    """So many more blocks would be held if no sequence held a block that another one holds too."""


@dataclass(frozen=True, slots=True)
class KvEvents:
    """Blocks that became findable on a node, and blocks that it forgot.

    Numbered from 1 in each epoch of the node; `is_snapshot` replaces all before.
    """

    first_number: int
    is_snapshot: bool
    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]

    @property
    def next_number(self) -> int:
        return self.first_number + len(self.stored) + len(self.removed)


@dataclass(frozen=True, slots=True)
class Registered:
    """The lease and the pace that the conductor gives an attached node. Durations, never moments."""

    lease_s: float
    heartbeat_s: float
    conductor_epoch: int
    step_cost: StepCost | None = None
    """Seconds of the node's steps, by the conductor's profile; None: steps have no budgets."""
