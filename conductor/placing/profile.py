"""Profiles: a dozen numbers of one kind of node running one model.

`cost_model.py` predicts with them, and says what they mean together; `conductor/profile_file.py` reads them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement, and what the profile fitted to all of them says to it."""

    tokens: float
    """Of prefill: tokens computed. Of decode: sequences of the step."""
    context: float
    """Of prefill: tokens of the prefix. Of decode: tokens of each sequence."""
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One measured step with a chunk of a prompt in it, and what the profile says to it."""

    chunk_tokens: int
    prefix_tokens: float
    """Before the chunk, on the device; the mean of several steps."""
    batch: int
    """Sequences that decode in the same step."""
    context: float
    """Tokens of each of them."""
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a profile was fitted to. Errors are relative; none of it enters a prediction."""

    device: str = ""
    model: str = ""
    """Family and shape."""
    versions: str = ""
    commit: str = ""
    date: str = ""
    prefill: tuple[Point, ...] = ()
    decode: tuple[Point, ...] = ()
    prefill_left_out_error: float = 0.0
    """Mean error at a point of a fit to all the others."""
    decode_left_out_error: float = 0.0
    worst_left_out_error: float = 0.0
    steps: tuple[StepPoint, ...] = ()
    steps_left_out_error: float = 0.0
    """Mean error at a step with a chunk, of a fit to all the others."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured costs of one kind of node with one model. Seconds, bytes, tokens."""

    name: str
    source: str
    """Where the numbers come from; "uncalibrated" where nobody measured."""
    kv_token_bytes: int
    num_layers: int
    prefill_fixed_s: float
    prefill_token_s: float
    prefill_token2_s: float
    """Times the difference of squares: attention."""
    prefill_small_s: float
    """Added to a prefill of few tokens, less the more they are: see `prefill_small_tokens`."""
    prefill_small_tokens: int
    """At so many new tokens half of `prefill_small_s` is left."""
    prefix_token_s: float
    """To bring a matched token's KV from host memory to where attention reads it."""
    decode_fixed_s: float
    decode_sequence_s: float
    decode_context_token_s: float
    transfer_bytes_per_s: float
    """Of one node's link, each way."""
    transfer_fixed_s: float
    device_kv_tokens: int
    """Tokens of KV that fit beside the weights."""
    host_kv_tokens: int
    """Tokens of KV in the node's share of host memory."""
    disk_kv_tokens: int = 0
    disk_bytes_per_s: float = 0.0
    evidence: Evidence = Evidence()
    request_s: float = 0.0
    """Of a prefill node's time, that a request takes beside its prefill: scheduling, sampling, storing."""
    step_tokens: tuple[int, ...] = ()
    """Lengths, rising, that a step with a chunk is padded to; past the last it is as long as it is."""
    launches_ahead: bool = False
    """Whether a step is launched before the tokens of the one before are known."""
    chunk_step_s: float = 0.0
    """Of a step with a chunk, beside the chunk's prefill: nothing is launched ahead of it."""
    mixed_step_s: float = 0.0
    """Of such a step, if sequences decode in it, beside that."""
    chunk_sequence_s: float = 0.0
    """Of such a step, for each of these sequences."""
    chunk_token2_s: float = 0.0
    """Of such a step of fewer than `long_chunk_tokens` rows, instead of `prefill_token2_s`: attention is
    another kernel's there."""
    attention_rows: int = 1
    """That kernel takes for fewer rows of chunks as long as for a multiple of this."""
    long_chunk_tokens: int = 0
    """Rows from which on attention is as a whole prompt's."""
    start_s: float = 0.0
    """Between the first token of a request that was handed over and its decode node's turn: messages."""
    join_s: float = 0.0
    """Of the first step in which it decodes there: its KV's sums."""
    dispatch_s: float = 0.0
    """Of a request's TTFT, that no node computes in: HTTP, messages."""
    dispatch_token_s: float = 0.0
    """The same for each token of its prompt: reading and tokenizing it."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and (not math.isfinite(value) or value < 0):
                raise ValueError(f"{field.name}: finite and not negative, not {value}")
        for name in ("kv_token_bytes", "num_layers", "prefill_token_s", "decode_fixed_s"):
            if not getattr(self, name):
                raise ValueError(f"{name}: more than 0")
        if not self.transfer_bytes_per_s:
            raise ValueError("transfer_bytes_per_s: more than 0")


def profile_json(profile: Profile) -> str:
    """Return what `load_profile` reads."""
    return json.dumps(dataclasses.asdict(profile), indent=1) + "\n"
