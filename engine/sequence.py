"""Sequence: the token state of one request on one node.

Two numbers say everything: how many tokens it has, and for how many of them the KV is in the cache. Whatever
lies between is to be computed, or a step under way computes it. A new prompt, a prompt half done, a sequence
that decodes, one that was preempted and one that came from another node differ in these numbers alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from base.block_hash import BlockHash, hash_chain
from base.errors import InvalidRequestError
from base.grammar import Constraint
from base.messages import Work
from base.prompt_logprobs import PromptLogprobs
from base.request import FinishReason, Pooling, RequestId, SamplingParams, StopParams
from base.step_budget import UNBOUNDED_GAPS, GapBounds
from engine.arrivals import PrefixArrivals

Vector = NDArray[np.float64]


def has_penalty(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


@dataclass(frozen=True, slots=True)
class Swapped:
    """The host memory slots that hold a sequence's leading tokens while it has no blocks."""

    slots: tuple[int, ...]
    num_tokens: int


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable; belongs to the event loop. Two sequences are never equal."""

    request_id: RequestId
    token_ids: list[int]
    """Prompt and generated tokens. Grows at its end only: the device thread reads it."""
    num_prompt_tokens: int
    chain_root: BlockHash
    sampling: SamplingParams
    stop: StopParams
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    """Likely tokens wanted beside each of the prompt's, with its log probability; None: not even that."""
    prompt_logprobs: PromptLogprobs = field(default_factory=PromptLogprobs)
    """The leading tokens, as far as they are known."""
    pooling: Pooling | None = None
    """The vector that is wanted in place of tokens; None: tokens are."""
    pooled: Vector | None = None
    """The weighted sum of hidden states that the vector is made of, so far."""
    num_pooled_tokens: int = 0
    """Leading tokens whose hidden states are in it, if they are wanted."""
    priority: int = 0
    """Higher goes first."""
    arrived_at_s: float = 0.0
    """Moment on this process's clock; orders sequences of equal priority."""
    num_computed_tokens: int = 0
    """Leading tokens whose KV is in the blocks of `block_table`."""
    num_launched_tokens: int = 0
    """Tokens after the computed ones that steps under way compute."""
    block_table: list[int] = field(default_factory=list)
    """Block ids in order; the sequence has one hold on each."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the leading full blocks of `token_ids`; see `extend_hashes`."""
    num_matched_tokens: int = 0
    """Tokens whose KV was found here before its first step."""
    started_at_s: float | None = None
    """When the first step with this sequence began; None before."""
    busy_s: float = 0.0
    """Seconds that the last stage of a pipeline was at steps with this sequence."""
    arrivals: PrefixArrivals | None = None
    """The load that is still filling the blocks; None: what counts as computed is there."""
    is_proven: bool = True
    """Whether the KV that the sequence came with is known to be intact; before, none is published."""
    constraint: Constraint | None = None
    """Where the sequence is in its grammar; None: it has none. Belongs to the threads that compute masks."""
    evict_first: bool = False
    """Whether another node keeps the prompt's KV, so that its blocks here are evicted before others."""
    swapped: Swapped | None = None
    """KV of a preempted sequence in host memory, which comes back when it runs again."""
    num_published_blocks: int = 0
    """Leading blocks that the pool can match."""
    gap_bounds: GapBounds = UNBOUNDED_GAPS
    """Bounds on the gaps between its tokens, as the client has named them."""
    first_token_at_s: float | None = None
    """When it had its first token, here or before it came; None: it has none."""
    last_token_at_s: float = 0.0
    num_gaps: int = 0
    """Tokens that it has had since the first."""
    is_mean_lost: bool = False
    """Whether its bound on the mean gap cannot be met any more."""
    finish_reason: FinishReason | None = None
    needs_history: bool = field(init=False)
    """Whether sampling has to know the tokens so far, or to report more than a token."""

    def __post_init__(self) -> None:
        reports_more = self.num_logprobs is not None
        self.needs_history = has_penalty(self.sampling) or self.stop.min_tokens > 0 or reports_more

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        there = self.num_computed_tokens if self.swapped is None else self.swapped.num_tokens
        return len(self.token_ids) - there

    @property
    def num_plannable_tokens(self) -> int:
        """Known tokens that are neither computed nor in a step under way."""
        return self.num_remaining_tokens - self.num_launched_tokens

    @property
    def rank(self) -> tuple[int, float, str]:
        """Sorts sequences by who goes first; unique."""
        return (-self.priority, self.arrived_at_s, self.request_id)

    @property
    def is_scored(self) -> bool:
        """Whether logits of the prompt's tokens are still wanted."""
        is_wanted = self.num_prompt_logprobs is not None
        return is_wanted and self.prompt_logprobs.num_tokens < self.num_prompt_tokens - 1

    @property
    def num_matchable_tokens(self) -> int:
        """Leading tokens that may be matched in place of computed: not the last, none scored or pooled."""
        longest = len(self.token_ids) - 1
        if self.pooling in (Pooling.MEAN, Pooling.WEIGHTED_MEAN):
            return min(longest, self.num_pooled_tokens)
        return min(longest, self.prompt_logprobs.num_tokens) if self.is_scored else longest

    def begin_after(self, block_ids: TokenIds[int], block_size: int) -> None:
        """Go on after these blocks, of which the sequence has none yet and which hold its leading tokens."""
        self.block_table += block_ids
        self.num_published_blocks = len(block_ids)
        self.num_computed_tokens = len(block_ids) * block_size
        if self.started_at_s is None:  # one that was preempted finds what it has computed itself
            self.num_matched_tokens = self.num_computed_tokens

    def had_token(self, now_s: float) -> None:
        """Count a token that has just come, by which the next one is due."""
        if self.first_token_at_s is None:
            self.first_token_at_s = now_s
        else:
            self.num_gaps += 1
        self.last_token_at_s = now_s

    def vector(self) -> bytes:
        """Return the prompt's vector, as float32; every token that it needs is pooled."""
        assert self.pooled is not None
        count, weight = self.num_tokens, 1.0
        if self.pooling is Pooling.MEAN:
            weight = count
        elif self.pooling is Pooling.WEIGHTED_MEAN:
            weight = count * (count + 1) / 2
        return (self.pooled / weight).astype("<f4").tobytes()

    def extend_hashes(self, block_size: int) -> None:
        """Bring `block_hashes` up to every full block of `token_ids`."""
        done = len(self.block_hashes)
        if (done + 1) * block_size <= len(self.token_ids):
            parent = self.block_hashes[-1] if done else self.chain_root
            self.block_hashes += hash_chain(self.token_ids[done * block_size :], block_size, parent)

    def finish_reason_of(self, token_id: int, max_model_len: int) -> FinishReason | None:
        """Return why the sequence ends with `token_id` as its last token, None if it goes on."""
        if token_id in self.stop.stop_token_ids and (
            self.num_generated_tokens > self.stop.min_tokens or self.constraint is not None
        ):
            return FinishReason.STOP
        if self.num_generated_tokens >= self.stop.max_tokens or self.num_tokens >= max_model_len:
            return FinishReason.LENGTH
        return None


def require_tokens(param: str, token_ids: TokenIds[int], vocab_size: int) -> None:
    """Raise InvalidRequestError, which names `param`, unless all token ids are of the vocabulary."""
    # An array is read in a tenth of the time of a list; prompts have 100,000 tokens.
    numbers = np.array(array("q", token_ids))
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < vocab_size):
        raise InvalidRequestError(f"{param}: token ids are 0 to {vocab_size - 1}", param=param)


def sequence_of(work: Work, arrived_at_s: float) -> Sequence:
    """Return the sequence that a node is asked for, with nothing computed."""
    return Sequence(
        request_id=work.request_id,
        token_ids=list(work.token_ids),
        num_prompt_tokens=work.num_prompt_tokens,
        chain_root=work.chain_root,
        sampling=work.sampling,
        stop=work.stop,
        num_logprobs=work.num_logprobs,
        priority=work.priority,
        arrived_at_s=arrived_at_s,
        gap_bounds=work.gap_bounds,
    )
