"""A device without a model: a token's KV is a digest of the tokens before it, in each layer.

It asserts that what it reads is what it would have written, and that it holds the blocks. So a
block that was used too early, too late, twice, or half is found at the first step that reads it.

A sequence whose KV is not proven yet may read what is wrong: what it computes from that is wrong too,
so that a client who is told a token of it, or a sequence that matches a block of it, finds that out.
"""

from __future__ import annotations

import numpy as np

from base.kv_layout import head_layout
from base.request import Pooling, SampledToken
from engine.runner import StepRunner
from engine.step import LaunchedStep, LayerGroup, StepResult
from tests.simulation.grammars import VOCAB, begun, next_token

LAYOUT = head_layout(num_layers=2, num_heads=1, head_dim=1, block_size=16, dtype="float32")
"""In each layer of a block, 8 bytes for each token."""
_FACTORS = (1_000_003, 1_000_033)
_MODULUS = 1 << 61


def continuation(token_ids, stop, grammar=None):
    """What the device answers a prompt with, and whether it stopped by itself."""
    state, tokens = 0, []
    constraint = begun(grammar, stop) if grammar is not None else None
    for token_id in token_ids:
        state = (state * _FACTORS[0] + token_id + 1) % _MODULUS
    while len(tokens) < stop.max_tokens:
        tokens.append(state % VOCAB if constraint is None else next_token(constraint, state))
        if tokens[-1] in stop.stop_token_ids:
            return tokens, True
        if constraint is not None:
            constraint.follow(tokens[-1:])
        state = (state * _FACTORS[0] + tokens[-1] + 1) % _MODULUS
    return tokens, False


def vector_of(token_ids, pooling):
    """What the device makes of a prompt of which a vector is wanted."""
    state, states = 0, []
    for token_id in token_ids:
        state = (state * _FACTORS[0] + token_id + 1) % _MODULUS
        states.append(_hidden(state))
    if pooling is Pooling.LAST:
        return np.array(states[-1:], "<f4").tobytes()
    weights = np.arange(1, len(states) + 1) if pooling is Pooling.WEIGHTED_MEAN else np.ones(len(states))
    return np.array([weights @ np.array(states) / weights.sum()], "<f4").tobytes()


def _hidden(state):
    return float(state % 1009)


class _Digests:
    """Of each prefix of one sequence, as it grows."""

    def __init__(self):
        self._states = [0, 0]
        self.bytes = (bytearray(), bytearray())
        self.last = [0]
        self.drawn = {}
        """The token after so many, by its number, under a constraint."""
        self.is_wrong = False
        """Something that its sequence read was."""

    def extend(self, token_ids):
        for token_id in token_ids[len(self.last) - 1 :]:
            for layer, factor in enumerate(_FACTORS):
                self._states[layer] = (self._states[layer] * factor + token_id + 1) % _MODULUS
                self.bytes[layer].extend(self._states[layer].to_bytes(8, "little"))
            self.last.append(self._states[0])


class SimDevice(StepRunner):
    """Runs steps on the memory of one node. `fails()` says whether a step raises."""

    poolings = tuple(Pooling)

    def __init__(self, memory, pool, fails):
        self._memory, self._pool, self._fails = memory, pool, fails
        self._digests = {}
        self._ending = set()
        """Sequences of steps that failed, which end once the loop hears of it."""

    def fails(self, plan):
        """Say whether a step fails; what is computed of its sequences from then on is for nothing."""
        has_failed = self._fails()
        if has_failed:
            self._ending |= {entry.sequence for entry in plan.entries}
        return has_failed

    def execute(self, plan):
        if self.fails(plan):
            raise RuntimeError("the device failed")
        for layer in range(LAYOUT.num_layers):
            self.compute(plan, layer)
        return self.sampled(plan)

    def compute(self, plan, layer):
        for entry in plan.entries:
            self._compute(entry, layer)

    def sampled(self, plan):
        tokens = tuple(self._sampled(entry) for entry in plan.entries)
        return StepResult(tokens, pooled=tuple(map(self._pooled, plan.entries)))

    def _pooled(self, entry):
        if not entry.pooled:
            return None
        digests, weighs = self._digests_of(entry), entry.sequence.pooling is Pooling.WEIGHTED_MEAN
        states = (_hidden(digests.last[at + 1] + digests.is_wrong) for at in entry.pooled)
        weights = (at + 1 if weighs else 1 for at in entry.pooled)
        return np.array([sum(state * weight for state, weight in zip(states, weights, strict=True))])

    def _digests_of(self, entry):
        digests = self._digests.setdefault(entry.sequence, _Digests())
        digests.extend(entry.sequence.token_ids[: entry.context_len])
        if len(digests.last) == entry.context_len:
            # launched ahead, and the sequence was ended before its last token was told
            known = entry.sequence.token_ids
            digests.extend([*known, self._drawn(entry.sequence, digests, len(known))])
        return digests

    def _drawn(self, sequence, digests, count):
        """Return the token after the first `count`, all of which are known."""
        state, constraint = digests.last[count] + digests.is_wrong, sequence.constraint
        if constraint is None:
            return state % VOCAB
        if count not in digests.drawn:
            constraint.follow(sequence.token_ids[sequence.num_prompt_tokens + constraint.num_tokens :])
            before = digests.drawn.get(count - 1)
            if constraint.num_tokens < count - sequence.num_prompt_tokens and before is not None:
                constraint.follow([before])  # drawn by a step that is not committed yet
            digests.drawn[count] = next_token(constraint, state)
        return digests.drawn[count]

    def _sampled(self, entry):
        if not entry.samples:
            return None
        digests = self._digests_of(entry)
        return SampledToken(self._drawn(entry.sequence, digests, entry.context_len))

    def _compute(self, entry, layer):
        digests = self._digests_of(entry)
        expected = digests.bytes[layer]
        self._pool.require_held(entry.block_table)
        name, size, memory = entry.sequence.request_id, LAYOUT.block_size * 8, self._memory
        for index, block_id in enumerate(entry.block_table):
            begin, end = index * size, min((index + 1) * size, entry.context_len * 8)
            if begin >= end:
                break
            computed = min(max(entry.start * 8, begin), end)
            at = LAYOUT.offset(block_id, layer) - begin
            found = memory[at + begin : at + computed]
            # A step that was launched ahead of the end of a sequence computes it for nothing.
            ends = entry.sequence.finish_reason is not None or entry.sequence in self._ending
            is_right = found == expected[begin:computed] or ends
            assert is_right or not entry.sequence.is_proven, (
                f"{name} reads KV that is not its own, block {index}"
            )
            digests.is_wrong |= not is_right
            written = bytes(end - computed) if digests.is_wrong else expected[computed:end]
            memory[at + computed : at + end] = written


class LaunchingDevice(StepRunner):
    """The same for steps that are launched ahead, and tell which layers are complete."""

    max_steps = 2
    poolings = tuple(Pooling)

    def __init__(self, device):
        self._device = device
        self._last = None

    def launch(self, plan):
        self._last = step = _Launched(self._device, plan, self._last)
        return LaunchedStep(step.resolve, step.layer_groups)


class _Launched:
    def __init__(self, device, plan, before):
        self._device, self._plan, self._before = device, plan, before
        self._num_done, self._has_failed = 0, False
        # beside sequences that decode, and of every other chunk, nobody hears before the step has ended
        reports_layers = not plan.num_single and plan.num_tokens % 2
        groups = (LayerGroup(0, 1, lambda: self._until(1)), LayerGroup(1, 1, lambda: self._until(2)))
        self.layer_groups = groups if reports_layers else ()

    def finish(self):
        """Compute what is not computed yet: a device takes steps in their order."""
        if not self._has_failed:
            self._until(LAYOUT.num_layers)

    def resolve(self):
        self._has_failed = self._device.fails(self._plan)
        self._until(LAYOUT.num_layers)
        return self._device.sampled(self._plan)

    def _until(self, num_layers):
        if self._has_failed:
            raise RuntimeError("the device failed")
        if self._before is not None:
            self._before.finish()
            self._before = None
        while self._num_done < num_layers:
            self._device.compute(self._plan, self._num_done)
            self._num_done += 1
