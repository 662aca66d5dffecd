"""A request and its parts: frozen values that every process reads alike.

Named tuples, where the rest of the code has frozen dataclasses: each is made for every request or every
token, and a frozen dataclass takes five times as long to make.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, NamedTuple, NewType, get_args, get_type_hints

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
    """The part that a node takes in requests placed on it."""

    PREFILL = "prefill"
    DECODE = "decode"


class Pooling(Enum):
    """How one vector is made of the last hidden states of a prompt's tokens."""

    LAST = "last"
    """The last token's, which has seen all others."""
    MEAN = "mean"
    WEIGHTED_MEAN = "weighted_mean"
    """Each weighs as much as its place, counted from 1."""


class GrammarKind(Enum):
    """The languages in which a grammar may be written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


MAX_GRAMMAR_CHARS = 1 << 17


class Grammar(NamedTuple):
    """The form that an answer must have: its tokens are such that their text is in this language."""

    kind: GrammarKind
    source: str


SEED_RANGE = 1 << 64
"""Seeds are taken modulo this: a client's may be negative."""


class SamplingField(NamedTuple):
    """The bounds of one of the fields below, and who may give it a value."""

    low: float
    high: float
    has_models_default: bool = False
    """Whether a model may recommend a value, in generation_config.json."""


class SamplingParams(NamedTuple):
    """How the next token is chosen: the one schema of these fields.

    Bodies of OpenAI's API, `Sampling` of inference.proto and `SamplingParams` of nodes.proto have fields of
    these names, whose bounds and defaults are these.

    `temperature` 0 is greedy: the token of the highest logit, the lowest id among
    equals. The random number of a position is a function of (`seed`, position), so a
    sequence continued on another node draws the same tokens.
    """

    temperature: Annotated[float, SamplingField(0.0, 2.0, True)] = 1.0
    top_k: Annotated[int, SamplingField(-1, 1 << 31, True)] = 0
    """Number of likeliest tokens to draw from; 0: all tokens. A client's -1 is 0."""
    # Zero would leave no token to choose.
    top_p: Annotated[float, SamplingField(1e-9, 1.0, True)] = 1.0
    min_p: Annotated[float, SamplingField(0.0, 1.0, True)] = 0.0
    repetition_penalty: Annotated[float, SamplingField(0.01, 100.0, True)] = 1.0
    presence_penalty: Annotated[float, SamplingField(-2.0, 2.0)] = 0.0
    frequency_penalty: Annotated[float, SamplingField(-2.0, 2.0)] = 0.0
    seed: Annotated[int, SamplingField(-(1 << 63), SEED_RANGE - 1)] = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    """Grammar that the text follows; None: any text will do."""


SAMPLING_FIELDS: dict[str, SamplingField] = {
    name: get_args(hint)[1]
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    if name not in ("logit_bias", "grammar")
}
"""The numbers among them, in their order."""


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
    """Bound on the mean of the gaps between its tokens."""
    longest_gap_slo_s: float = float("inf")


def finite_or_none(bound_s: float) -> float | None:
    """Return a bound as JSON has it; None: there is none."""
    return None if bound_s == float("inf") else bound_s


class Request(NamedTuple):
    """A client's request, tokenised. One sequence: `n` choices are n requests."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    num_logprobs: int | None = None
    """Likely tokens shown beside each; None: no logprobs, 0: the sampled token's alone."""
    slo: Slo = Slo()
    priority: int = 0
    """Higher goes first; 0 is normal."""
    tenant: str = ""
    cache_salt: str = ""
    deadline_s: float | None = None
    """Seconds from arrival to the last token at most; None: the server's limit."""
    traceparent: str = ""
    """W3C's: the span that this request is part of. Empty: nobody traces it."""
    num_prompt_logprobs: int | None = None
    """Likely tokens shown beside each of the prompt's; None: no logprobs of it. 0: its own tokens' alone."""
    pooling: Pooling | None = None
    """The vector that is wanted of the prompt, in place of tokens; None: tokens are."""
    arrived_at_s: float = 0.0
    """The first moment of its call, on the conductor's clock; 0: it came as it is, without a call."""


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position, before temperature and penalties."""

    logprob: float
    """Log probability of the token that was sampled."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), highest first."""


class SampledToken(NamedTuple):
    """One generated token of one sequence."""

    token_id: int
    logprobs: TokenLogprobs | None = None
