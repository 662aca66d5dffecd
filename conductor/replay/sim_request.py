"""A request on its way through a simulated cluster: its attempts, its prompt, its decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from base.request import NodeId, RequestId, Slo
from base.step_budget import UNBOUNDED_GAPS, GapBounds
from base.step_cost import attended_by
from conductor.placing.placement import UNBOUNDED, Placement, PlacementRequest
from conductor.placing.retries import Retries
from conductor.replay.chains import JoinedChain
from conductor.replay.links import Flow
from conductor.replay.segments import Segment
from conductor.replay.shared_kv import KvRun
from conductor.replay.trace import TraceRequest


@dataclass(slots=True, init=False, eq=False)
class SimRequest:
    """One request, through one attempt or several. Its engine counts what is computed of it."""

    arrival_s: float
    prompt_tokens: int
    chain: Sequence[int]
    next_turn: TraceRequest | None
    forks: tuple[TraceRequest, ...]
    priority: int
    tenant: str
    is_session: bool
    """Whether a session that waits may begin when it and its turns are over: a subagent's may not."""
    number: int
    conductor: int
    """The number of the conductor that owns it."""
    output_tokens: int
    request_id: RequestId
    """The present attempt's name."""
    retries: Retries | None
    """None until an attempt was lost."""
    is_promised: bool
    """Whether it was let wait: see `PlacementRequest`."""
    num_tokens: int
    """Tokens to have in the cache before the next: the prompt, and after a fault what came of it."""
    tokens_left: int
    """Tokens to make by the present attempt, the one of its prefill included."""
    asked: PlacementRequest
    placement: Placement
    evict_first_on: NodeId | None
    """The node that evicts the prompt before all else, of two that will have it; None: one will."""
    flow: Flow | None
    fetching: bool
    waits_for: int
    tail_s: float
    """Seconds of its hand-off that come after the last of its prompt, whatever left before."""
    order: tuple[float, int]
    """Place among all who wait for a step, by arrival at the node: of the prompt, and again when handed over.

    Those of one moment go by number, as live by name. A prompt that waited for its prefix goes before later
    ones.
    """
    started_at_s: float
    computed_at_s: float
    prefilled_at_s: float
    """When the present attempt's first token came."""
    beside_s: float
    """Seconds of its prefill that are in none of its chunks."""
    prefill_s: float
    prefix_tokens: int
    computed_tokens: int
    """Tokens of its prompt, the prefix included."""
    first_token_s: float | None
    token_at_s: float
    """When it had its last token before it joined a batch, or left one."""
    gaps: list[Segment]
    num_gaps_before: int
    """Segments of attempts before the present one."""
    # of its decoding, which its engine keeps
    join_s: float
    """Seconds of the first step, beside what any sequence takes."""
    steps_left: int
    """Brought up to date when it leaves a batch, as is its context."""
    context_tokens: int
    joined_at_s: float
    first_segment: int
    finish_step: int
    join_number: int
    """Number of its last join; 0: it is in no batch."""
    missed_step: int
    """Number of the engine's last step that was planned before it came; 0: it is in the next one."""
    found_blocks: int | None
    """Leading blocks that its node had when the step was planned in which it may begin; None: has now."""
    run: KvRun | None
    """The blocks of its prompt that it holds where it is computed, or decodes."""
    found_tokens: int
    """Tokens that were in blocks of its decode node when it was placed: it shares no others there."""
    is_held_up: bool
    """Whether it waits for a chunk under way then, whose blocks it will find."""
    slo: Slo
    """Bounds that it names, or else those of the run."""
    gap_bounds: GapBounds
    is_mean_lost: bool
    """Whether its bound on the mean gap cannot be met any more."""

    def __init__(
        self, row: TraceRequest, number: int, output_limit: int | None = None, is_session: bool = True
    ) -> None:
        (
            self.arrival_s,
            self.prompt_tokens,
            output_tokens,
            chain,
            self.next_turn,
            self.forks,
            self.priority,
            self.tenant,
            _,
        ) = row
        # in one piece while it is served, in which the caches cut it
        self.chain = tuple(chain) if type(chain) is JoinedChain else chain
        if output_limit is not None and output_limit < output_tokens:
            output_tokens = output_limit
        self.number = number
        self.conductor = 0
        self.is_session = is_session
        self.request_id = RequestId(str(number))
        self.num_tokens = self.prompt_tokens
        self.output_tokens = self.tokens_left = output_tokens
        self.retries = self.flow = self.first_token_s = None
        self.is_promised = self.fetching = False
        self.waits_for = self.prefix_tokens = 0
        self.order = (0.0, 0)
        self.token_at_s = self.join_s = self.prefilled_at_s = 0.0
        self.gaps = []
        self.num_gaps_before = 0
        self.join_number = self.missed_step = 0
        self.found_blocks = self.run = None
        self.found_tokens = self.num_tokens
        self.is_held_up = False
        self.slo = UNBOUNDED
        self.gap_bounds = UNBOUNDED_GAPS
        self.is_mean_lost = False

    @property
    def has_begun(self) -> bool:
        """Whether a token is out."""
        return self.first_token_s is not None

    def begin_again(self, lost_by: NodeId, max_attempts: int) -> bool:
        """Become another attempt, which has yet to be placed; False: there were enough."""
        if self.retries is None:
            self.retries = Retries(num_attempts=1, max_attempts=max_attempts)
        self.retries.failed_at(lost_by)
        if not self.retries.may_try_again:
            return False
        self.request_id = RequestId(f"{self.number}.{self.retries.num_attempts}")
        self.retries.num_attempts += 1
        self.fetching = self.is_promised = self.is_mean_lost = False
        return True


class ChunkWork(NamedTuple):
    """The prompts' share of a step."""

    new_tokens: int
    attended: float
    """See `StepCost.with_chunks_s`."""
    num_single: int
    """Prompts of which one token is computed, attended to like a sequence that decodes."""
    single_context: int
    """Tokens of KV of those."""
    beside_s: float
    """Seconds of prompts that begin which are in none of their chunks."""


def work_of(chunks: list[tuple[SimRequest, int]]) -> ChunkWork:
    """Return what a step computes of prompts, of each so many tokens."""
    new_tokens, attended, num_single, single_context, beside_s = 0, 0.0, 0, 0, 0.0
    for request, tokens in chunks:
        if request.computed_tokens == request.prefix_tokens:
            beside_s += request.beside_s
        if tokens == 1:
            num_single += 1
            single_context += request.computed_tokens
        else:
            new_tokens += tokens
            attended += attended_by(tokens, request.computed_tokens)
    return ChunkWork(new_tokens, attended, num_single, single_context, beside_s)


def decoding_with(
    batch: int, context_tokens: int, prompts: Iterable[SimRequest], waiting: Iterable[SimRequest]
) -> tuple[int, int]:
    """Return the sequences of a step that have one token to compute, and their tokens of KV.

    Args:
        prompts: Those that were let in, of which the last token of one counts like a sequence that decodes.
        waiting: Sequences that would decode beside the batch.
    """
    for request in prompts:
        if request.num_tokens - request.computed_tokens == 1:
            batch += 1
            context_tokens += request.computed_tokens
    for request in waiting:
        batch += 1
        context_tokens += request.context_tokens
    return batch, context_tokens
