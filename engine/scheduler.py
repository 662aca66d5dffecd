"""Scheduler of one engine: which tokens of which sequences the next step computes.

There is no prefill phase and no decode phase in here. A sequence has a number of tokens and a number of them
that are computed, and each step lets the second catch up with the first; when it has, the next token is
sampled. Chunked prefill, prefix hits, hand-off from another node and recomputation after preemption follow
from that.

Rules:
* A sequence one token behind always runs; prompts share what those leave of `chunk_tokens` a step, half of it
  at least, as far as the sequences that decode can wait for it (`base/step_budget.py`).
* Sequences go by rank: priority, then arrival. Admission is in that order, and takes the blocks of all known
  tokens at once, so that only growth can run out of blocks.
* A running sequence that needs a block may take it from sequences of lower rank, lowest first (preemption).
  Those are recomputed, or their blocks move to host memory and back, whichever is cheaper; what moves out
  comes free a step later. One that finds nobody below it keeps what it has and waits. The first in rank can
  take from everybody, so there is progress.
* The first of those that wait for blocks has a promise of the pool's: what comes free is not set aside for
  other nodes before it has started.
* A sequence that could not finish in an empty pool is refused when it is added.
* A step may be planned while others are under way: what they compute is not planned again, and what they
  write to is not taken. A sequence whose next token they sample waits for it in a pipeline, and goes one
  token further where the device finds that token.

Pure: no I/O, no clock; moments are handed in. Belongs to the event loop.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from base.errors import CapacityError, InvalidRequestError
from base.request import FinishReason
from base.step_budget import BudgetedStep
from base.step_cost import LAUNCH_S, OBSERVED_STEPS, StepCorrection, StepCost
from engine.block_pool import BlockPool
from engine.chunk_sizes import chunk_limit
from engine.decode_slack import Decoding, decode_load, decodes_after, decodes_now, predicted_step_s
from engine.sequence import Sequence, require_tokens
from engine.step import SequenceOutput, StepEntry, StepPlan, StepResult, may_lose_prefix, shares_chunk
from engine.swap_space import MEASURED_TOKENS, Swap, SwapSpace

SCORED_TOKENS = 512
"""Tokens of prompts whose logits are all wanted, in one step at most: 150 MB of a large vocabulary."""


class Scheduler:
    """Owns the waiting and the running sequences of one engine, and their blocks."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        chunk_tokens: int,
        max_batch: int,
        max_model_len: int,
        vocab_size: int = 1 << 32,
        chunk_attention: float = 0.0,
        swap_space: SwapSpace | None = None,
    ) -> None:
        """Begin without sequences; `chunk_attention` is explained in `chunk_sizes.py`."""
        self._pool = pool
        self.block_size = block_size
        self.chunk_tokens = chunk_tokens
        self._chunk_attention = chunk_attention
        self._room_of_scored = max(1, chunk_tokens // SCORED_TOKENS)
        self.max_batch = max_batch
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        # Both in order of rank.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._swap_space = swap_space or SwapSpace(0, 0.0)
        self.step_cost: StepCost | None = None
        """Predicts steps; None: nobody has said what they cost, and `chunk_tokens` alone bounds them."""
        self.correction = StepCorrection()
        self._num_starved = 0
        """Steps in turn in which prompts waited and none was given anything."""
        self._num_committed = 0
        self.num_preemptions = 0
        self.num_swaps = 0
        """Number of preemptions that moved blocks."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_decoding(self) -> int:
        """Sequences that have had a token, those included that wait for a place in a full batch."""
        everybody = (*self._running, *self._waiting)
        return sum(sequence.first_token_at_s is not None for sequence in everybody)

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens of prompts to compute: the length of the queue. A sequence that decodes has none."""
        tokens = (sequence.num_remaining_tokens for sequence in (*self._waiting, *self._running))
        return sum(count for count in tokens if count > 1)

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the sequences whose KV is in the cache."""
        return sum(sequence.num_computed_tokens for sequence in (*self._running, *self._waiting))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. If its block table is filled, those blocks become the scheduler's.

        Raises:
            InvalidRequestError: the prompt is empty or too long for one more token, or a token id is
                outside the vocabulary.
            CapacityError: it could not finish even if it had the whole pool.
        """
        self._require_possible(sequence.num_prompt_tokens, sequence.stop.max_tokens)
        # In a step, such a token would end every sequence of that step. What is computed was looked at.
        require_tokens("prompt", sequence.token_ids[sequence.num_computed_tokens :], self.vocab_size)
        biased = [token_id for token_id, _ in sequence.sampling.logit_bias]
        require_tokens("logit_bias", biased, self.vocab_size)
        require_tokens("stop_token_ids", sequence.stop.stop_token_ids, self.vocab_size)
        sequence.extend_hashes(self.block_size)
        insort(self._waiting, sequence, key=lambda item: item.rank)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence and give its blocks back. Again, or unknown: no effect."""
        for queue in (self._waiting, self._running):
            if sequence in queue:
                queue.remove(sequence)
        if not self._waiting:
            self._pool.num_promised = 0
        self._give_back(sequence, sequence.evict_first)
        self._swap_space.drop(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence that keeps its blocks until `release`."""
        sequence.finish_reason = reason
        self._running.remove(sequence)

    def give_up(self) -> Sequence | None:
        """End the first sequence that waits and holds no blocks, and return it; None: there is none."""
        for sequence in self._waiting:
            if not sequence.block_table:
                self._waiting.remove(sequence)
                self._swap_space.drop(sequence)
                sequence.finish_reason = FinishReason.ERROR
                return sequence
        return None

    def schedule(self, now_s: float = 0.0) -> StepPlan | None:
        """Return the next step, which begins at `now_s`, or None if no sequence can advance now."""
        step = self._step_beside([], now_s)
        entries = self._entries(step)
        if not entries:
            # Nobody decodes after all: who was to has no blocks.
            step = BudgetedStep(step.tokens_left)
            entries = self._entries(step)
        for sequence in () if entries else self._admit_first():
            entries.append(self._entry(sequence, self._share(sequence, step)))
        self._num_starved = self._num_starved + 1 if step.has_passed else 0
        swaps = self._swap_space.take_planned()
        return _plan(entries, swaps) if entries or swaps else None

    def schedule_ahead(self, plan: StepPlan, began_s: float = 0.0) -> StepPlan | None:
        """Return the step after `plan`, whose result is not known yet; None if the result is needed first.

        Every sequence of `plan` that samples and that its length does not end goes one token further; beside
        them prompts begin and go on as in any step. The result is needed first if a sequence needs its tokens
        known, if a prefix may still be lost, with which all would fail, and if there is no block. A sequence
        that turns out to have ended is computed for nothing. `began_s`: when `plan` began.
        """
        others = [item for item in (*self._running, *self._waiting) if item.num_plannable_tokens]
        if others and (may_lose_prefix(plan) or any(item.arrivals is not None for item in others)):
            return None
        entries = []
        for entry in plan.entries:
            sequence, num_tokens = entry.sequence, entry.context_len + 1
            has_ended = sequence.finish_reason is not None or self._ends_at(sequence, num_tokens)
            if has_ended or not entry.samples:
                continue
            if sequence.needs_history:
                return None
            if num_tokens > len(sequence.block_table) * self.block_size:
                if not self._pool.num_available:
                    return None
                sequence.block_table += self._pool.allocate(1)
            blocks = tuple(sequence.block_table)
            entries.append(StepEntry(sequence, entry.context_len, 1, blocks, samples=True))
        self._num_starved = self._num_starved if others else 0
        if others:
            begins_s = began_s + self.predicted_s(plan)
            step = self._step_beside([decodes_after(entry, begins_s) for entry in entries], begins_s)
            entries += self._entries(step, plan.entries[plan.num_single :])
            self._num_starved = self._num_starved + 1 if step.has_passed else 0
        return _plan(entries, self._swap_space.take_planned()) if entries else None

    def planned_after_s(self, plan: StepPlan, launch_s: float = LAUNCH_S) -> float:
        """Return the seconds of `plan` after which to ask `schedule_ahead`; 0: nobody predicts its moves."""
        if self.step_cost is None or not plan.entries:
            return 0.0
        expected_s = predicted_step_s(plan, self.step_cost)
        return self.correction.planned_after_s(plan.has_chunks, expected_s, launch_s)

    def commit(
        self, plan: StepPlan, result: StepResult, seconds: float = 0.0, now_s: float = 0.0
    ) -> list[SequenceOutput]:
        """Take in a step's result: count, append, publish full blocks, end what is done.

        `seconds` are how long the step took, and `now_s` when it ended; 0: not known."""
        self.landed(plan)
        if seconds:
            self._measured(plan, seconds)
        outputs = []
        nothing = (None,) * len(plan.entries)
        results = result.tokens, result.prompt_logprobs or nothing, result.pooled or nothing
        for entry, sampled, logprobs, pooled in zip(plan.entries, *results, strict=True):
            sequence = entry.sequence
            if sequence.finish_reason is not None:
                continue  # it ended while this step was under way
            sequence.num_computed_tokens = entry.context_len
            sequence.num_launched_tokens -= entry.num_tokens
            if logprobs is not None:
                known = sequence.prompt_logprobs
                # One that was preempted is computed again, from before where it stopped.
                sequence.prompt_logprobs = known.extended(logprobs, known.num_tokens - entry.start)
            reason = None
            if pooled is not None:
                sequence.pooled = pooled if sequence.pooled is None else sequence.pooled + pooled
                sequence.num_pooled_tokens = entry.context_len
                reason = FinishReason.STOP if entry.completes else None
            if sampled is not None and sequence.constraint is not None and sequence.constraint.error:
                sampled, reason = None, FinishReason.ERROR  # it was not drawn from the grammar
            elif sampled is not None:
                sequence.token_ids.append(sampled.token_id)
                sequence.had_token(now_s)
                reason = sequence.finish_reason_of(sampled.token_id, self.max_model_len)
            self.publish(sequence)
            if reason is not None:
                self.finish(sequence, reason)
            outputs.append(SequenceOutput(sequence, (sampled,) if sampled is not None else (), reason))
        return outputs

    def fail(self, plan: StepPlan) -> list[SequenceOutput]:
        """End the sequences of a step that failed; what it moved is lost."""
        self.landed(plan)
        for swap in plan.swaps:
            if swap.is_out:
                self._swap_space.drop(swap.sequence)
        going_on = [entry.sequence for entry in plan.entries if entry.sequence.finish_reason is None]
        for sequence in going_on:
            self.finish(sequence, FinishReason.ERROR)
        return [SequenceOutput(sequence, (), FinishReason.ERROR) for sequence in going_on]

    def landed(self, plan: StepPlan) -> None:
        """Give back the blocks that a step moved out, which has ended, whatever came of it."""
        self._swap_space.landed(plan.swaps)
        for swap in plan.swaps:
            if swap.is_out:
                self._pool.release(swap.blocks)

    def check(self) -> None:
        """Assert what holds between any two calls."""
        for queue in (self._waiting, self._running):
            assert [item.rank for item in queue] == sorted(item.rank for item in queue)
            for sequence in queue:
                assert sequence.finish_reason is None
                assert sequence.num_remaining_tokens >= 1
                covered = len(sequence.block_table) * self.block_size
                assert sequence.num_launched_tokens >= 0
                assert sequence.num_computed_tokens + sequence.num_launched_tokens <= covered
        assert all(item.swapped is None for item in self._running)
        assert not any(item.swapped and item.block_table for item in self._waiting)
        assert not {id(item) for item in self._waiting} & {id(item) for item in self._running}
        assert len(self._running) <= self.max_batch

    def _ends_at(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return whether a sequence ends when it has `num_tokens`, whatever the last one is."""
        generated = num_tokens - sequence.num_prompt_tokens
        return generated >= sequence.stop.max_tokens or num_tokens >= self.max_model_len

    def _require_possible(self, num_prompt_tokens: int, max_tokens: int) -> None:
        if not num_prompt_tokens:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if num_prompt_tokens >= self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens; this model takes "
                f"{self.max_model_len} with the answer",
                param="prompt",
            )
        # The last token is returned and never computed.
        longest = min(num_prompt_tokens + max_tokens, self.max_model_len) - 1
        if self._num_blocks(longest) > self._pool.num_blocks:
            raise CapacityError(
                f"{longest} tokens need {self._num_blocks(longest)} blocks; "
                f"the whole cache has {self._pool.num_blocks}"
            )

    def predicted_s(self, plan: StepPlan) -> float:
        """Return the seconds that a step is predicted to take; 0: nothing predicts."""
        if self.step_cost is None:
            return 0.0
        return predicted_step_s(plan, self.step_cost) * self.correction.ratio(plan.has_chunks)

    def _step_beside(self, going_on: list[Decoding], now_s: float) -> BudgetedStep:
        """Return the step at `now_s` before prompts take of it: who goes on in it, and others that decode."""
        everybody = (*self._running, *self._waiting)
        decoding = going_on + [decodes_now(item) for item in everybody if item.num_plannable_tokens == 1]
        cost, most = self.step_cost, self._most_prompt_tokens(len(decoding))
        num_prompts = sum(sequence.num_plannable_tokens > 1 for sequence in everybody)
        if cost is None or not num_prompts:
            return BudgetedStep(most)
        load = decode_load(decoding, cost, self.correction, now_s)
        ratio = self.correction.ratio(True)
        return BudgetedStep(most, cost, load, self._num_starved, ratio, num_prompts)

    def _most_prompt_tokens(self, num_single: int) -> int:
        """Return how many tokens of prompts a step has memory for beside so many sequences that decode.

        Together with those: `chunk_tokens`, because a GPU pads to few lengths."""
        return self.chunk_tokens - min(num_single, self.chunk_tokens // 2)

    def _measured(self, plan: StepPlan, seconds: float) -> None:
        """Learn from how long a step took."""
        if plan.num_tokens >= min(self.chunk_tokens, MEASURED_TOKENS):
            self._swap_space.computed(plan.num_tokens, seconds)
        self._num_committed += 1
        is_usual = plan.entries and not plan.swaps
        if (
            self.step_cost is not None
            and is_usual
            and (plan.has_chunks or not self._num_committed % OBSERVED_STEPS)
        ):
            self.correction.observe(plan.has_chunks, predicted_step_s(plan, self.step_cost), seconds)

    def _share(self, sequence: Sequence, step: BudgetedStep) -> int:
        """Return how many tokens of `sequence` this step computes; those of prompts are taken from it."""
        remaining = sequence.num_plannable_tokens
        if remaining == 1:
            return 1
        start = sequence.num_computed_tokens + sequence.num_launched_tokens
        limit = chunk_limit(start, self.chunk_tokens, self._chunk_attention, self.block_size)
        weight = self._room_of_scored if sequence.is_scored else 1
        return step.take(min(remaining, limit), start, weight)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _num_missing_blocks(self, sequence: Sequence) -> int:
        return max(0, self._num_blocks(sequence.num_tokens) - len(sequence.block_table))

    def _entry(self, sequence: Sequence, num_tokens: int) -> StepEntry:
        start = sequence.num_computed_tokens + sequence.num_launched_tokens
        samples = start + num_tokens == sequence.num_tokens and sequence.pooling is None
        return StepEntry(sequence, start, num_tokens, tuple(sequence.block_table), samples)

    def _grow(self, sequence: Sequence) -> bool:
        """Give a sequence the blocks of its tokens, preempting lower ranks if need be.

        False: there are none, or none until blocks of others have moved out."""
        missing = self._num_missing_blocks(sequence)
        while missing > self._pool.num_available + self._swap_space.num_leaving_blocks:
            victim = self._lowest_holder()
            if victim is None or victim.rank <= sequence.rank:
                return False
            self._preempt(victim)
        if missing > self._pool.num_available:
            return False
        self._fill_block_table(sequence)
        return True

    def _entries(self, step: BudgetedStep, under_way: tuple[StepEntry, ...] = ()) -> list[StepEntry]:
        """Plan the sequences that run, and those that can start beside them and the chunks under way."""
        entries: list[StepEntry] = []
        index = 0
        # Growing may preempt sequences at the end of the list, never one already planned.
        while index < len(self._running):
            sequence = self._running[index]
            index += 1
            can_go_on = sequence.num_plannable_tokens and self._grow(sequence)
            if can_go_on and (num_tokens := self._share(sequence, step)):
                entries.append(self._entry(sequence, num_tokens))
        entries += self._admit(step, under_way)
        return entries

    def _admit(self, step: BudgetedStep, under_way: tuple[StepEntry, ...]) -> Iterator[StepEntry]:
        """Move the waiting sequences that can start in this step to the running ones, and plan them.

        One that gets nothing of it goes on waiting: it will find what others have computed by then."""
        short_of_blocks = is_held_up = False
        self._pool.num_promised = 0
        for sequence in list(self._waiting):
            if len(self._running) >= self.max_batch:
                if any(item.num_plannable_tokens > 1 for item in self._waiting):
                    step.pass_over()
                break
            # Nobody overtakes a sequence that waits for blocks or for what a chunk computes, but those that
            # brought theirs along: they hold them anyway, and finishing is how blocks come free.
            held = bool(sequence.block_table)
            may_not_overtake = (short_of_blocks or is_held_up) and not held
            if (step.is_full and sequence.num_remaining_tokens > 1) or may_not_overtake:
                continue
            if not held:
                # once a chunk under way has ended, what both share is found
                is_held_up = any(shares_chunk(entry, sequence, self.block_size) for entry in under_way)
                if is_held_up:
                    continue
                self._match_prefix(sequence)
            if self._num_missing_blocks(sequence) > self._pool.num_available:
                if not held:
                    self._give_back(sequence)
                if not short_of_blocks:
                    self._pool.num_promised = self._num_missing_blocks(sequence)
                short_of_blocks = True
                continue
            num_tokens = 1 if sequence.swapped is not None else self._share(sequence, step)
            if not num_tokens:
                if not held:
                    self._give_back(sequence)
                continue
            self._start(sequence)
            yield self._entry(sequence, num_tokens)

    def _admit_first(self) -> list[Sequence]:
        """Start the first in rank by taking a place and blocks from others; for when nothing else can run."""
        if not self._waiting:
            return []
        first, is_full = self._waiting[0], len(self._running) >= self.max_batch
        if is_full and (self._running[-1].num_launched_tokens or self._running[-1].rank < first.rank):
            return []
        if is_full:
            self._preempt(self._running[-1])
        if not self._grow(first):
            return []
        self._start(first)
        return [first]

    def _start(self, sequence: Sequence) -> None:
        self._fill_block_table(sequence)
        if sequence.swapped is not None:
            self._swap_space.move_in(sequence, sequence.num_published_blocks)
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=lambda item: item.rank)

    def _fill_block_table(self, sequence: Sequence) -> None:
        sequence.block_table += self._pool.allocate(self._num_missing_blocks(sequence))

    def _match_prefix(self, sequence: Sequence) -> None:
        # At least one token is computed, or there would be nothing to sample from.
        longest = sequence.num_matchable_tokens // self.block_size
        if sequence.swapped is not None:
            longest = min(longest, len(sequence.swapped.slots))
        sequence.begin_after(self._pool.match(sequence.block_hashes[:longest]), self.block_size)

    def _lowest_holder(self) -> Sequence | None:
        # Steps under way write to the blocks of their sequences.
        holders = [item for item in self._running if not item.num_launched_tokens][-1:]
        holders += [item for item in self._waiting if item.block_table][-1:]
        return max(holders, key=lambda item: item.rank, default=None)

    def _preempt(self, victim: Sequence) -> None:
        self.num_preemptions += 1
        # What is half done is computed again: it may come back in a step without it, which may fail, or be
        # sent from too soon. So is what may turn out to be damaged.
        if victim.num_generated_tokens and victim.is_proven and victim.num_remaining_tokens == 1:
            self.num_swaps += self._swap_space.move_out(victim, self._num_blocks(victim.num_computed_tokens))
        self._give_back(victim)
        if victim in self._running:
            self._running.remove(victim)
            insort(self._waiting, victim, key=lambda item: item.rank)

    def _give_back(self, sequence: Sequence, evict_first: bool = False) -> None:
        self._pool.release(sequence.block_table, evict_first)
        sequence.block_table.clear()
        sequence.num_computed_tokens = sequence.num_launched_tokens = sequence.num_published_blocks = 0

    def publish(self, sequence: Sequence) -> None:
        """Let others match the full blocks of `sequence`, unless what it came with may be damaged."""
        if not sequence.is_proven:
            return
        sequence.extend_hashes(self.block_size)
        full = sequence.num_computed_tokens // self.block_size
        for index in range(sequence.num_published_blocks, full):
            parent = sequence.block_hashes[index - 1] if index else None
            self._pool.publish(sequence.block_table[index], sequence.block_hashes[index], parent)
        sequence.num_published_blocks = max(full, sequence.num_published_blocks)


def _plan(entries: list[StepEntry], swaps: tuple[Swap, ...]) -> StepPlan:
    """Return the step of these entries, which is under way from here on."""
    single = [entry for entry in entries if entry.num_tokens == 1]
    longer = [entry for entry in entries if entry.num_tokens > 1]
    for entry in entries:
        entry.sequence.num_launched_tokens += entry.num_tokens
    # The longest context first: whatever works them off in parallel then ends together.
    single.sort(key=lambda entry: -entry.start)
    return StepPlan((*single, *longer), len(single), swaps)
