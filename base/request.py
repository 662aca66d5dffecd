"""A request and its parts: frozen values that every process reads alike.

Named tuples, where the rest of the code has frozen dataclasses: each is made for every request or every
token, and a frozen dataclass takes five times as long to make.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
NodeId = NewType("NodeId", str)

MAX_TOP_LOGPROBS = 20
"""OpenAI's own limit."""


class FinishReason(Enum):
    """Why a sequence ended; the values are OpenAI's words, but for the last two."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Role(Enum):
    """What a node does for requests placed on it."""

    PREFILL = "prefill"
    DECODE = "decode"


class SamplingParams(NamedTuple):
    """How the next token is chosen.

    `temperature` 0 is greedy: the token of the highest logit, the lowest id among
    equals. The random number of a position is a function of (`seed`, position), so a
    sequence continued on another node draws the same tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()


class StopParams(NamedTuple):
    """When a sequence ends. Stop strings are the conductor's: nodes know no text."""

    max_tokens: int
    """New tokens at most; >= 1."""
    min_tokens: int = 0
    """No stop token is sampled before this many new tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """End of sequence included, unless the request ignores it."""


class Slo(NamedTuple):
    """The bounds a request must meet, seconds; infinity where there is none."""

    ttft_slo_s: float = float("inf")
    tbt_slo_s: float = float("inf")


class Request(NamedTuple):
    """What a client asked, tokenised. One sequence: `n` choices are n requests."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    num_logprobs: int | None = None
    """None: no logprobs. 0: the sampled token's alone."""
    slo: Slo = Slo()
    priority: int = 0
    """Higher goes first; 0 is normal."""
    tenant: str = ""
    cache_salt: str = ""
    deadline_s: float | None = None
    """Seconds from arrival to the last token at most; None: the server's limit."""
    traceparent: str = ""
    """W3C's: the span that this request is part of. Empty: nobody traces it."""


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position, before temperature and penalties."""

    logprob: float
    """Of the token that was sampled."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), highest first."""


class SampledToken(NamedTuple):
    """One generated token of one sequence."""

    token_id: int
    logprobs: TokenLogprobs | None = None
