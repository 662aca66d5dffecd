"""The budget of a step: how many tokens of prompts it may take, by what those who decode in it can bear.

Each sequence that decodes has a moment at which its next token is due:

    due = the first token's moment + KEPT_MEAN x bound x (gaps it has had + 1)     a bound on the mean gap
    due = the last token's moment + KEPT_LONGEST x bound                           a bound on the longest gap

A sequence that was served faster than its bound has saved the difference, and a chunk may spend it. The step
may take until the first of these moments, as `StepCost` predicts it, and as many tokens of prompts as fit
into that. Where nobody decodes nothing is due, and a step takes what memory allows: `chunk_tokens`.

Prompts of one step end together. Where nobody decodes, one more joins it if that serves them all sooner:

    those in the step x (its seconds with the prompt - its seconds without)
        <= BUSY x those left x (the seconds of two steps - those of one)

Of short prompts, several take little longer than one; of long ones, each would wait for the last. What a step
is padded with saves nothing, but where more are left than this one they fill it.

* Who names no bound has a target instead: no gap longer than TARGET_GAP_S, or than twice a step without
  prompts where that is more. 50 ms are 20 tokens a second, three times as fast as people read; and where a
  machine is slower than that, prompts get half of its time.
* A bound on the mean gap that cannot be met any more, even if no step took another prompt until the
  sequence's last token, is lost: nobody gains by starving prompts for it. The sequence counts as one that
  names none. So does one whose bound is tighter than an empty step.
* A step with a chunk costs `StepCost.chunk_part_s` whatever its length. A chunk whose tokens take less than
  WORTHWHILE times that is not begun, nor one up to five times as long that PATIENCE_STEPS steps would save
  for: the bounds on mean gaps save until it is longer.
* Prompts that had nothing for STARVED_STEPS steps, passed over or without a place, get such a chunk
  whatever is due: bounds that never leave any hold a prompt up, but not for ever, and lose 1/STARVED_STEPS
  of a chunk's seconds in the mean.

The engine's scheduler and replay's engine ask here, each with its own account of who decodes. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple

from base.step_cost import StepCost, attended_by

TARGET_GAP_S = 0.05
"""Longest gap of a sequence that names no bound."""

TARGET_STEPS = 2.0
"""Longest gap of a sequence that names no bound, in steps without prompts, where those are long."""

KEPT_MEAN = 0.95
"""Share of a bound on the mean gap that is used: the client's clock has the network's delays too."""

KEPT_LONGEST = 0.85
"""Share of a bound on the longest gap that a step is planned for: nothing evens out one that took longer."""

WORTHWHILE = 3.0
WELL_WORTHWHILE = 15.0
PATIENCE_STEPS = 4
STARVED_STEPS = 32

BUSY = 8.0
"""Prompts that gain what a step saves, for each that waits: later ones come while those are computed.

1 / (1 - load) in the mean, of a load of seven eighths: of a lower one less is saved, and less is waited."""


class GapBounds(NamedTuple):
    """Bounds on the gaps between the tokens of one sequence, seconds; infinity where there is none."""

    mean_s: float = inf
    longest_s: float = inf


UNBOUNDED_GAPS = GapBounds()


class DecodeLoad(NamedTuple):
    """The sequences that decode in a step, and how long they can wait for it. Seconds from its beginning."""

    batch: int = 0
    context_tokens: float = 0.0
    mean_left_s: float = inf
    """Seconds until the first of their tokens is due by a bound on the mean gap; negative: it was."""
    longest_left_s: float = inf
    """Seconds until the first is due by a bound on the longest gap, or by the target where none is named."""
    saving_s: float = 0.0
    """Seconds that each step without prompts adds to the first; not more than 0: waiting is of no use."""


NOBODY_DECODES = DecodeLoad()


def target_gap_s(empty_step_s: float) -> float:
    """Return the longest gap that a sequence without bounds is given, beside steps that take so long
    empty."""
    return max(TARGET_GAP_S, TARGET_STEPS * empty_step_s)


def longest_left_s(
    bounds: GapBounds, is_mean_lost: bool, last_token_at_s: float, empty_step_s: float, now_s: float
) -> float:
    """Return how long a sequence can wait by its bound on the longest gap, or by the target."""
    if empty_step_s <= bounds.longest_s < inf:
        return last_token_at_s + KEPT_LONGEST * bounds.longest_s - now_s
    has_mean = bounds.longest_s == inf != bounds.mean_s and not is_mean_lost
    return inf if has_mean else target_gap_s(empty_step_s)


def is_lost(left_s: float, gaps_left: int, mean_s: float, empty_step_s: float) -> bool:
    """Return whether a bound on the mean gap cannot be met any more.

    Args:
        left_s: Until the sequence's next token is due by KEPT_MEAN of the bound.
        gaps_left: The next one included.
        mean_s: The bound.
    """
    return left_s + KEPT_MEAN * mean_s * (gaps_left - 1) < empty_step_s * gaps_left


class BudgetedStep:
    """One step, while prompts take their shares of it in turn."""

    __slots__ = (
        "_attended",
        "_chunk_ratio",
        "_cost",
        "_is_full",
        "_limit_s",
        "_load",
        "_new_tokens",
        "_num_left",
        "_num_taken",
        "_starves_in",
        "has_passed",
        "tokens_left",
    )

    def __init__(
        self,
        tokens_left: int,
        cost: StepCost | None = None,
        load: DecodeLoad = NOBODY_DECODES,
        num_starved: int = 0,
        chunk_ratio: float = 1.0,
        num_prompts: int = 0,
    ) -> None:
        """Begin with nothing taken.

        Args:
            tokens_left: Tokens of prompts at most, whoever decodes.
            cost: Predicts; None: nothing is known, and `tokens_left` alone bounds.
            num_starved: Steps before this one in which prompts waited and none was given anything.
            chunk_ratio: What predictions of steps with chunks are multiplied with.
            num_prompts: Prompts that wait for this step, or go on in it.
        """
        self.tokens_left = tokens_left
        self.has_passed = False
        """Whether prompts were passed over, and nobody had anything."""
        self._cost = cost
        self._load = load
        self._chunk_ratio = chunk_ratio
        self._limit_s = min(load.mean_left_s, load.longest_left_s)
        self._starves_in = STARVED_STEPS - num_starved
        self._new_tokens = 0
        self._attended = 0.0
        self._num_left = num_prompts
        self._num_taken = 0
        self._is_full = False

    @property
    def is_full(self) -> bool:
        """Whether no prompt gets any more of it."""
        return self._is_full or self.tokens_left <= 0

    def pass_over(self) -> None:
        """Note that prompts wait for a place among the sequences of a step."""
        self.has_passed = not self._new_tokens

    def take(self, wanted: int, prefix: int, weight: int = 1) -> int:
        """Take up to `wanted` tokens for a prompt of which `prefix` are computed; return how many.

        `weight`: tokens of the step's that each takes.
        """
        if self.is_full or wanted <= 0:
            return 0
        most = min(wanted, max(1, self.tokens_left // weight))
        tokens = most if self._cost is None else self._fitting(self._cost, most, prefix)
        self._num_left -= 1
        self._num_taken += 1
        self.tokens_left -= tokens * weight
        if tokens:
            self.has_passed = False
            self._new_tokens += tokens
            self._attended += attended_by(tokens, prefix)
        self._is_full = self._is_full or tokens < most
        return tokens

    def _joining(self, cost: StepCost, most: int, prefix: int) -> int:
        """Return `most`, or 0 where those in the step would wait longer for it than it saves."""
        if not self._num_taken:
            return most
        later_s = self._seconds(cost, most, prefix) - self._seconds(cost, 0, 0)
        counted = cost if self._num_left == 1 else _unpadded(cost)
        alone_s = counted.with_chunks_s(most, attended_by(most, prefix), 0, 0)
        saved_s = self._seconds(counted, 0, 0) + alone_s - self._seconds(counted, most, prefix)
        return 0 if self._num_taken * later_s > BUSY * self._num_left * saved_s else most

    def _fitting(self, cost: StepCost, most: int, prefix: int) -> int:
        """Return the most tokens that end in time; 0 where so few are not worth beginning a chunk."""
        if not self._load.batch:
            return self._joining(cost, most, prefix)
        limit_s = self._limit_s / self._chunk_ratio
        if self._seconds(cost, most, prefix) <= limit_s:
            return most
        found = self._most_within(cost, limit_s, most, prefix)
        if self._new_tokens:
            return found
        least = max(1, self._least(cost, most, prefix))
        if found >= least:
            return found
        if self._starves_in <= 0:
            return least
        # waiting saves nothing of a bound on the longest gap
        longest_s = self._load.longest_left_s / self._chunk_ratio
        most_ever = least if longest_s == inf else self._most_within(cost, longest_s, least, prefix)
        if found and found >= most_ever:
            return found
        self.has_passed = True
        return 0

    def _least(self, cost: StepCost, most: int, prefix: int) -> int:
        """Return the tokens of the shortest chunk that is worth its step."""
        load = self._load
        part_tokens = cost.chunk_part_s(load.batch) / cost.prefill_token_s
        least = ceil(min(most, WORTHWHILE * part_tokens))
        well = ceil(min(most, WELL_WORTHWHILE * part_tokens))
        patience_steps = PATIENCE_STEPS - (STARVED_STEPS - self._starves_in)
        is_saving = load.saving_s > 0 and load.mean_left_s < load.longest_left_s
        if well > least and is_saving and patience_steps > 0:
            saved_s = (load.mean_left_s + patience_steps * load.saving_s) / self._chunk_ratio
            least = max(least, self._most_within(cost, saved_s, well, prefix))
        return least

    def _seconds(self, cost: StepCost, tokens: int, prefix: int) -> float:
        """Return the seconds of the step if this prompt takes so many tokens more."""
        attended = self._attended + attended_by(tokens, prefix)
        load = self._load
        return cost.with_chunks_s(self._new_tokens + tokens, attended, load.batch, load.context_tokens)

    def _most_within(self, cost: StepCost, limit_s: float, most: int, prefix: int) -> int:
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self._seconds(cost, middle, prefix) <= limit_s:
                low = middle
            else:
                high = middle - 1
        return low


@lru_cache(maxsize=16)
def _unpadded(cost: StepCost) -> StepCost:
    return replace(cost, step_tokens=())
