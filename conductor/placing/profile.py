"""Profiles: a dozen numbers of one kind of node running one model.

`cost_model.py` predicts with them, and says what they mean together; `conductor/profiles/reader.py` reads
them.
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
    """Tokens computed by a prefill; sequences of a decode step."""
    context: float
    """Tokens of the prefix of a prefill; tokens of each sequence of a decode step."""
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One measured step with a chunk of a prompt in it, and what the profile says to it."""

    chunk_tokens: int
    prefix_tokens: float
    """Tokens before the chunk, on the device; the mean of several steps."""
    batch: int
    """Sequences that decode in the same step."""
    context: float
    """Tokens of each of them."""
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """The measurements that a profile was fitted to. Errors are relative; none of it enters a prediction."""

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
    """New tokens at which half of `prefill_small_s` is left."""
    prefix_token_s: float
    """Seconds to bring a matched token's KV from host memory to where attention reads it."""
    decode_fixed_s: float
    decode_sequence_s: float
    decode_context_token_s: float
    transfer_bytes_per_s: float
    """The rate of one node's link, each way."""
    transfer_fixed_s: float
    device_kv_tokens: int
    """Tokens of KV that fit beside the weights."""
    host_kv_tokens: int
    """Tokens of KV in the node's share of host memory."""
    disk_kv_tokens: int = 0
    disk_bytes_per_s: float = 0.0
    evidence: Evidence = Evidence()
    step_tokens: tuple[int, ...] = ()
    """Lengths, rising, that a step with a chunk is padded to; past the last it is as long as it is."""
    quantization: str = "none"
    """Format of the weights; none: floats."""
    kv_dtype: str = ""
    """Kind of the numbers that are cached: float32, float8_e4m3fn; empty: not said."""
    launches_ahead: bool = False
    """Whether a step is launched before the tokens of the one before are known."""
    chunk_step_s: float = 0.0
    """Seconds of a step with a chunk, however short that is, beside its tokens and attention."""
    mixed_step_s: float = 0.0
    """Seconds that a step with a chunk takes longer if sequences decode in it."""
    chunk_sequence_s: float = 0.0
    """Seconds of a step with a chunk for each sequence that decodes in it."""
    chunk_token2_s: float = 0.0
    """Stands for `prefill_token2_s` in a step with a chunk of fewer than `long_chunk_tokens` rows: attention
    is another kernel's there."""
    attention_rows: int = 1
    """Rows that the kernel of short chunks takes at once: fewer take as long as these."""
    long_chunk_tokens: int = 0
    """Rows of a step with a chunk from which on attention is as a whole prompt's."""
    start_s: float = 0.0
    """Seconds of messages between the first token of a request that was handed over and its decode turn."""
    join_s: float = 0.0
    """Seconds that the sums of its KV add to the first step in which it decodes there."""
    dispatch_s: float = 0.0
    """Seconds of a request's TTFT in which no node computes: HTTP, messages."""
    dispatch_token_s: float = 0.0
    """Seconds of a request's TTFT for each token of its prompt, to read and tokenize it."""
    decode_experts_s: float = 0.0
    """Seconds in which a step reads all experts of all layers; few tokens hit some of them."""
    fitted_tokens: int = 0
    """Tokens of the longest context that it was fitted to, where no evidence says so; 0: nobody knows."""
    expert_share: float = 0.0
    """Share of a layer's experts that a token goes to; 0: there are no experts."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and (not math.isfinite(value) or value < 0):
                raise ValueError(f"{field.name}: finite and not negative, not {value}")
        for name in ("kv_token_bytes", "num_layers", "prefill_token_s", "decode_fixed_s"):
            if not getattr(self, name):
                raise ValueError(f"{name}: more than 0")
        if self.expert_share > 1:
            raise ValueError(f"expert_share: at most 1, not {self.expert_share}")
        if not self.transfer_bytes_per_s:
            raise ValueError("transfer_bytes_per_s: more than 0")

    def without_store(self) -> Profile:
        """Return the costs of nodes without a store: what they find of a prompt lies on the device."""
        return dataclasses.replace(
            self, prefix_token_s=0.0, host_kv_tokens=self.device_kv_tokens, disk_kv_tokens=0
        )


COMPUTED = (
    "prefill_fixed_s",
    "prefill_token_s",
    "prefill_token2_s",
    "prefill_small_s",
    "prefix_token_s",
    "decode_fixed_s",
    "decode_sequence_s",
    "decode_context_token_s",
    "decode_experts_s",
    "chunk_step_s",
    "mixed_step_s",
    "chunk_sequence_s",
    "chunk_token2_s",
)
"""Fields that a slower processor multiplies."""


def slowed(profile: Profile, factor: float) -> Profile:
    """Return the profile of a node that computes so many times slower; its link and memory are the same."""
    return dataclasses.replace(profile, **{name: getattr(profile, name) * factor for name in COMPUTED})


def profile_json(profile: Profile) -> str:
    """Return what `load_profile` reads."""
    return json.dumps(dataclasses.asdict(profile), indent=1) + "\n"
