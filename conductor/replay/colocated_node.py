"""A simulated node that prefills and decodes in the same steps, by the rules of `engine/scheduler.py`.

A step computes one token of each decoding sequence, and of prompts, first come first served, as
many tokens as those leave of a chunk, half of it at least; of several prompts where the first leaves
some. A prompt is let in when its KV fits. What a step takes is `CostModel.chunk_step_s` where it has a
chunk, and the decode step otherwise.

Steps that go alike are taken at once: k of the same batch, or k whole chunks of one prompt, of which each
takes longer than the last by as much, so that they are a segment as in `decode_node.py`. What comes
meanwhile is in the step after the one under way; but where every sequence of a step samples, and nobody
waits, the engine launches one more step before it knows the tokens, and what comes is in the one after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil, sqrt

from conductor.cost_model import CostModel
from conductor.placement import Placement
from conductor.replay.block_cache import BlockCache
from conductor.replay.outcome import Segment
from conductor.replay.trace import TraceRequest

Schedule = Callable[..., None]
"""(moment, what to call, its arguments...)."""


class ColocatedSequence:
    """One request, on one node or, its prompt done, on another."""

    __slots__ = (
        "arrival_s",
        "computed_tokens",
        "context_tokens",
        "first_token_s",
        "gaps",
        "last_token_s",
        "number",
        "output_tokens",
        "placement",
        "prefill_s",
        "prefix_tokens",
        "prompt_tokens",
        "row",
        "started_at_s",
        "steps_left",
    )

    def __init__(self, row: TraceRequest, number: int, placement: Placement) -> None:
        self.row = row
        self.number = number
        self.placement = placement
        self.arrival_s = row.arrival_s
        self.prompt_tokens = self.context_tokens = row.num_tokens
        self.output_tokens = row.output_tokens
        self.steps_left = row.output_tokens - 1
        self.computed_tokens = 0
        """Of the prompt, the prefix included; from when it was let in."""
        self.gaps: list[Segment] = []
        self.started_at_s = 0.0
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.prefill_s = 0.0
        self.prefix_tokens = 0


Told = Callable[["ColocatedNode", ColocatedSequence], None]


class ColocatedNode:
    """One node: prompts that wait, prompts of which chunks are computed, a batch, a cache."""

    def __init__(
        self,
        name: str,
        cost: CostModel,
        block_size: int,
        chunk_tokens: int,
        schedule: Schedule,
        on_prefilled: Told,
        on_finished: Told,
    ) -> None:
        """`on_prefilled` is told of a prompt that is done, and says by `join` where it goes on."""
        self.name = name
        self.cache = BlockCache(cost.profile.host_kv_tokens // block_size)
        self._cost = cost
        self._block_size = block_size
        self._chunk_tokens = chunk_tokens
        self._schedule = schedule
        self._on_prefilled = on_prefilled
        self._on_finished = on_finished
        self._waiting: deque[ColocatedSequence] = deque()
        self._prompts: list[ColocatedSequence] = []
        self._batch: list[ColocatedSequence] = []
        self._joining: list[ColocatedSequence] = []
        self._context_tokens = 0
        self._prompt_tokens = 0
        """Of KV that the prompts let in take or will."""
        # the present segment
        self._chunks: list[tuple[ColocatedSequence, int]] = []
        self._budget = 0
        """Of prompt tokens, in its first step."""
        self._steps = 0
        self._started_at_s = self._first_s = self._growth_s = 0.0
        self._version = 0
        self._ends_prompts = False
        """Whether with it the prompts of all its chunks are done."""
        self._is_cut = False
        """Whether it ends for somebody who came."""
        self._launched_steps = 0
        """Those after it that he is not in either."""
        self._is_between_steps = False

    def add(self, sequence: ColocatedSequence, now_s: float) -> None:
        """Queue a prompt."""
        self._waiting.append(sequence)
        self._came(now_s)

    def join(self, sequence: ColocatedSequence, now_s: float) -> None:
        """Let a sequence decode whose prompt is done, from the next step that is planned on."""
        sequence.last_token_s = now_s
        self._context_tokens += sequence.context_tokens
        if self._is_between_steps:
            self._batch.append(sequence)
        else:
            self._joining.append(sequence)
            self._came(now_s)

    def _came(self, now_s: float) -> None:
        """Let what just came be in the first step that is not launched yet."""
        if self._is_between_steps:
            return
        if not self._steps:
            self._plan(now_s)
            return
        is_first = len(self._waiting) + len(self._joining) == 1
        linear, growth_s = self._first_s - self._growth_s / 2, self._growth_s
        elapsed_s = now_s - self._started_at_s
        begun = 2 * elapsed_s / (linear + sqrt(linear * linear + 2 * growth_s * elapsed_s))
        steps = max(1, ceil(begun - 1e-9))
        if not self._chunks:
            steps += is_first
        elif self._ends_prompts and is_first and steps == self._steps:
            steps += 1
        elif not self._joining:
            return  # whole chunks of the first are what they are, whoever waits
        if self._is_cut:
            return
        self._is_cut = True
        self._launched_steps = max(0, steps - self._steps)
        if steps < self._steps:
            self._begin(steps)

    def _begin(self, steps: int) -> None:
        """Let the segment have so many steps, and be told of its end."""
        self._steps = steps
        self._version += 1
        seconds = steps * (self._first_s + self._growth_s * (steps - 1) / 2)
        self._schedule(self._started_at_s + seconds, self._stepped, self._version)

    def _plan(self, now_s: float) -> None:
        """Begin the steps that go alike from now on."""
        self._is_cut = False
        self._started_at_s = now_s
        launched, self._launched_steps = self._launched_steps, 0
        if launched and self._batch:
            self._chunks = []
            self._is_cut = True
        else:
            launched = 0
            self._batch += self._joining
            self._joining.clear()
            self._chunks = self._take_chunks(now_s)
        steps = min([sequence.steps_left for sequence in self._batch], default=0)
        if self._chunks:
            self._begin(self._plan_chunks(steps))
        elif steps:
            batch = len(self._batch)
            self._first_s = self._cost.decode_step_s(batch, self._context_tokens)
            self._growth_s = self._cost.profile.decode_context_token_s * batch
            self._begin(launched or steps)

    def _plan_chunks(self, longest: int) -> int:
        """Set what the first step takes; return how many go alike: `longest` at most, where not 0."""
        new_tokens, attended, beside_s = 0, 0.0, 0.0
        batch, context_tokens = len(self._batch), self._context_tokens
        for sequence, tokens in self._chunks:
            if tokens == 1:  # attended like a sequence that decodes
                batch += 1
                context_tokens += sequence.computed_tokens
            else:
                new_tokens += tokens
                attended += tokens * (tokens + 2 * sequence.computed_tokens)
            if sequence.computed_tokens == sequence.prefix_tokens:
                left = sequence.prompt_tokens - sequence.prefix_tokens
                beside_s += self._cost.beside_chunks_s(left, sequence.prefix_tokens)
        profile = self._cost.profile
        if new_tokens:
            self._first_s = beside_s + self._cost.chunk_step_s(new_tokens, attended, batch, context_tokens)
        else:
            self._first_s = beside_s + self._cost.decode_step_s(batch, context_tokens)
        self._growth_s = 0.0
        steps = 1
        first, tokens = self._chunks[0]
        if len(self._chunks) == 1 and tokens == self._budget and not beside_s:
            steps = (first.prompt_tokens - first.computed_tokens) // tokens
            steps = min(steps, longest) if longest else steps
            self._growth_s = 2 * profile.prefill_token2_s * tokens**2 + profile.decode_context_token_s * batch
        self._ends_prompts = all(
            sequence.computed_tokens + steps * tokens == sequence.prompt_tokens
            for sequence, tokens in self._chunks
        )
        return steps

    def _take_chunks(self, now_s: float) -> list[tuple[ColocatedSequence, int]]:
        """Return what the next step computes of prompts, letting in those that fit."""
        num_single = len(self._batch)
        for sequence in self._prompts:
            num_single += sequence.prompt_tokens - sequence.computed_tokens == 1
        self._budget = budget = self._chunk_tokens - min(num_single, self._chunk_tokens // 2)
        chunks = []
        for sequence in self._prompts:
            left = sequence.prompt_tokens - sequence.computed_tokens
            tokens = min(budget, left)
            if left == 1:  # as a sequence that decodes: beside any chunk
                chunks.append((sequence, 1))
            elif tokens:
                chunks.append((sequence, tokens))
                budget -= tokens
        capacity = self._cost.profile.device_kv_tokens
        while budget and self._waiting:
            sequence = self._waiting[0]
            held = self._context_tokens + self._prompt_tokens
            if held and held + sequence.prompt_tokens > capacity:
                break
            self._let_in(self._waiting.popleft(), now_s)
            left = sequence.prompt_tokens - sequence.computed_tokens
            chunks.append((sequence, min(budget, left)))
            budget -= min(budget, left) if left > 1 else 0
        return chunks

    def _let_in(self, sequence: ColocatedSequence, now_s: float) -> None:
        matched = self.cache.match(sequence.row.chain) * self._block_size
        sequence.prefix_tokens = sequence.computed_tokens = min(matched, sequence.prompt_tokens - 1)
        sequence.started_at_s = now_s
        self._prompt_tokens += sequence.prompt_tokens
        self._prompts.append(sequence)

    def _stepped(self, version: int) -> None:
        if version != self._version:
            return
        steps, growth_s = self._steps, self._growth_s
        last_s = self._first_s + growth_s * (steps - 1)
        now_s = self._started_at_s + steps * (self._first_s + growth_s * (steps - 1) / 2)
        self._steps = 0
        self._is_between_steps = True
        self._decoded(steps, last_s, growth_s)
        done = []
        for sequence, tokens in self._chunks:
            sequence.computed_tokens += steps * tokens
            if sequence.computed_tokens == sequence.prompt_tokens:
                done.append(sequence)
        self._chunks = []
        for sequence in done:
            self._prompts.remove(sequence)
            self._prompt_tokens -= sequence.prompt_tokens
            sequence.prefill_s = now_s - sequence.started_at_s
            self._on_prefilled(self, sequence)
        self._is_between_steps = False
        self._plan(now_s)

    def _decoded(self, steps: int, last_s: float, growth_s: float) -> None:
        """Count the tokens that the batch has made."""
        self._context_tokens += steps * len(self._batch)
        running = []
        first_s = last_s - growth_s * (steps - 1)
        for sequence in self._batch:
            gaps = sequence.gaps
            waited_s = 0.0 if gaps else self._started_at_s - sequence.last_token_s
            if waited_s > 0.0:
                # its first gap began with its last token, on another node
                gaps.append((waited_s + first_s, 1, 0.0))
                if steps > 1:
                    gaps.append((last_s, steps - 1, growth_s))
            else:
                gaps.append((last_s, steps, growth_s))
            sequence.steps_left -= steps
            sequence.context_tokens += steps
            if sequence.steps_left:
                running.append(sequence)
            else:
                self._context_tokens -= sequence.context_tokens
                self._on_finished(self, sequence)
        self._batch = running
