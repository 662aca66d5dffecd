"""A step: what the scheduler asks of the device, and what comes back.

A plan is a value. Once made it does not change, whatever the event loop does to the sequences meanwhile, so
the device thread reads it without a lock, and a later plan can be made before the result of an earlier one is
known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from base.prompt_logprobs import PromptLogprobs
from base.request import FinishReason, Pooling, SampledToken
from engine.arrivals import PrefixArrivals
from engine.sequence import Sequence, Vector
from engine.swap_space import Swap


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One sequence's share of a step: compute tokens [start, start + num_tokens)."""

    sequence: Sequence
    start: int
    num_tokens: int
    """>= 1; exactly 1 in the decode phase."""
    block_table: tuple[int, ...]
    """Covers every token up to start + num_tokens."""
    samples: bool
    """Whether these are the last known tokens, so that the next one is sampled, if tokens are wanted."""

    @property
    def context_len(self) -> int:
        """Tokens visible to the last query, itself included."""
        return self.start + self.num_tokens

    @property
    def num_scored(self) -> int:
        """Leading tokens whose logits say how likely the prompt's next token is, where somebody asks."""
        if not self.sequence.is_scored:
            return 0
        return max(0, min(self.context_len, self.sequence.num_prompt_tokens - 1) - self.start)

    @property
    def pooled(self) -> range:
        """Places of the tokens whose hidden states add to the sequence's vector; none, if none is wanted."""
        sequence = self.sequence
        if sequence.pooling is None:
            return range(0)
        first = sequence.num_pooled_tokens
        if sequence.pooling is Pooling.LAST:
            first = sequence.num_tokens - 1
        return range(max(self.start, first), self.context_len)

    @property
    def completes(self) -> bool:
        """Whether these are the last known tokens."""
        return self.context_len == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The batch of one step: entries of one token first, the longest context before the others.

    Without entries, it moves blocks and computes nothing.
    """

    entries: tuple[StepEntry, ...]
    num_single: int
    """How many entries, at the front, compute one token."""
    swaps: tuple[Swap, ...] = ()
    """Moved before anything is computed."""

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def has_chunks(self) -> bool:
        """Whether more than one token is computed of some sequence."""
        return self.num_single < len(self.entries)

    @property
    def sampling(self) -> list[Sequence]:
        """The sequences of the entries that sample, in their order."""
        return [entry.sequence for entry in self.entries if entry.samples]


def may_lose_prefix(plan: StepPlan) -> bool:
    """Return whether a step waits for the prefix of a prompt: it may fail, and those behind it would too."""
    return any(entry.sequence.arrivals is not None for entry in plan.entries[plan.num_single :])


def shares_chunk(entry: StepEntry, sequence: Sequence, block_size: int) -> bool:
    """Return whether a prompt has blocks of those that a chunk computes, and could match them afterwards."""
    first, last = entry.start // block_size, entry.context_len // block_size
    computed, wanted = entry.sequence.block_hashes, sequence.block_hashes
    return first < min(last, len(computed), len(wanted)) and computed[first] == wanted[first]


def arrivals_of(plan: StepPlan) -> list[PrefixArrivals]:
    """Return the loads that a step has to wait for."""
    return [entry.sequence.arrivals for entry in plan.entries if entry.sequence.arrivals is not None]


def loads_of(plan: StepPlan) -> list[int]:
    """Return the names of the loads that a step has to wait for."""
    return [arrivals.first_block for arrivals in arrivals_of(plan)]


def wait_for_prefixes(plan: StepPlan) -> None:
    """Block until every prefix of a step is there."""
    for arrivals in arrivals_of(plan):
        arrivals.wait_for_all()


@dataclass(frozen=True, slots=True)
class StepResult:
    """One item for each entry of the plan; None where nothing was sampled."""

    tokens: tuple[SampledToken | None, ...]
    busy_s: float = 0.0
    """Seconds that the last stage of a pipeline was at it."""
    prompt_logprobs: tuple[PromptLogprobs | None, ...] = ()
    """One item for each entry: of the tokens that follow its scored ones. Empty: no entry has any."""
    pooled: tuple[Vector | None, ...] = ()
    """One item for each entry: what it adds to its sequence's vector. Empty: no entry has any."""


def result_of(plan: StepPlan, sampled: Iterable[SampledToken], busy_s: float = 0.0) -> StepResult:
    """Return the result of `plan` from what its sampling entries sampled, in their order."""
    tokens = iter(sampled)
    return StepResult(tuple(next(tokens) if entry.samples else None for entry in plan.entries), busy_s)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a launched step whose KV is complete together, while later ones compute."""

    first: int
    count: int
    wait: Callable[[], None]
    """Blocks until they are complete, on any thread. Raises RuntimeError if the device failed."""


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that is queued on the device."""

    resolve: Callable[[], StepResult]
    """Blocks until the step has ended and returns its tokens; may raise anything."""
    layer_groups: tuple[LayerGroup, ...] = ()
    """All layers, in order; empty: their KV is complete when the step has ended."""
    is_over: Callable[[], bool] = _never
    """Returns at once whether the step has ended; False where only who waits for it knows."""


@dataclass(frozen=True, slots=True)
class LaunchedChunk:
    """One sequence's share of a step that is queued on the device."""

    entry: StepEntry
    groups: tuple[LayerGroup, ...]
    """All layers, in order; empty where the step does not report its layers one by one."""


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """The outcome of one step for one sequence. No tokens: a chunk that was not the last."""

    sequence: Sequence
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None
