"""The choices that a client may make for a request, their bounds, and the `Request` that becomes of them.

HTTP and gRPC both come through here, so a value is in bounds or refused in one place and
with one message. Names are the OpenAI API's and vLLM's; an error's `param` is the name of
the field, which `params_spelled` turns into what the client at hand calls it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from base.errors import ForbiddenError, InvalidRequestError, UnknownModelError, invalid
from base.request import (
    MAX_TOP_LOGPROBS,
    SAMPLING_FIELDS,
    SEED_RANGE,
    Grammar,
    Request,
    RequestId,
    SamplingParams,
    StopParams,
)
from conductor.api.headers import Caller
from conductor.api.served_model import ServedModel
from conductor.api.tokenizer import ContextLengthError, prompt_too_long

MAX_MESSAGES = 2_048
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_REQUEST_ID_CHARS = 128
MAX_PROMPT_LOGPROBS = 1 << 18
"""The log probabilities of the prompts of a call: some 10 MB of JSON."""
MAX_SHOWN_CHARS = 100
"""The most of a client's own words in an error."""


class Options(NamedTuple):
    """A request's choices. None, or empty: the client did not say."""

    sampling: Mapping[str, Any] = MappingProxyType({})
    """The numbers of `SamplingParams` that the client named, by name."""
    logit_bias: Mapping[int, float] = MappingProxyType({})
    grammar: Grammar | None = None
    """The form that the answer must have; `GrammarChecker` sees whether there is such a grammar."""
    grammar_param: str = "grammar"
    """The field that it was given in."""
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    """Whether the stop string itself is part of the text."""
    skip_special_tokens: bool = True
    kept_token_ids: frozenset[int] = frozenset()
    """Special tokens that are part of the text all the same: a parser reads them."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    is_prompt_alone: bool = False
    """Whether the answer is the prompt and no more: of the one token that is sampled, clients see nothing."""
    priority: int = 0
    cache_salt: str = ""


class TextRequest(NamedTuple):
    """A request, and how its tokens become text."""

    request: Request
    options: Options

    def choice(self, index: int) -> TextRequest:
        """Return the request for another answer to the same prompt, which the first shows."""
        request = self.request
        scored = None if index else request.num_prompt_logprobs
        seed = (request.sampling.seed + index) % SEED_RANGE
        return self._replace(
            request=request._replace(
                request_id=RequestId(f"{request.request_id}-{index}"),
                sampling=request.sampling._replace(seed=seed),  # the next one
                num_prompt_logprobs=scored,
            ),
        )


@contextmanager
def params_spelled(spelling: Mapping[str, str]) -> Iterator[None]:
    """Name the fields of errors, where their messages begin too, as the client at hand spells them."""
    try:
        yield
    except InvalidRequestError as error:
        if (param := error.param) is not None:
            error.param = spelling.get(param, param)
            if (message := str(error)).startswith(f"{param}: "):
                error.args = (error.param + message.removeprefix(param),)
        raise


def check_options(options: Options, caller: Caller, model: ServedModel) -> None:
    """Raise InvalidRequestError, naming the field, for the first value out of bounds.

    NaN is within no bounds, so it is refused too. Raises ForbiddenError for the critical class where the
    client may not ask for it.
    """
    for name, value in options.sampling.items():
        field = SAMPLING_FIELDS[name]
        _require_between(name, value, field.low, field.high)
    _require_between("max_tokens", options.max_tokens, 1, 1 << 31)
    _require_between("min_tokens", options.min_tokens, 0, options.max_tokens or model.max_model_len)
    _require_between("logprobs", options.logprobs, 0, MAX_TOP_LOGPROBS)
    _require_between("priority", options.priority, -(1 << 31), (1 << 31) - 1)
    if options.priority > 0 and not caller.may_be_critical:
        raise ForbiddenError(
            "priority: the critical class (above 0 in gRPC, below 0 in HTTP) is for keys made with "
            "`conductor keys add NAME --critical`, and without keys for server.critical_tenants"
        )
    _require_at_most("cache_salt", len(options.cache_salt), MAX_STOP_CHARS, "characters")
    _require_at_most("x-tenant-id", len(caller.tenant), MAX_STOP_CHARS, "characters")
    _check_stop(options.stop)
    _require_at_most("stop_token_ids", len(options.stop_token_ids), MAX_STOP_TOKEN_IDS, "token ids")
    check_token_ids(options.stop_token_ids, model, "stop_token_ids")
    _require_at_most("logit_bias", len(options.logit_bias), MAX_LOGIT_BIASES, "tokens")
    check_token_ids(tuple(options.logit_bias), model, "logit_bias")
    for bias in options.logit_bias.values():
        _require_between("logit_bias", bias, -100.0, 100.0)


def check_prompt_logprobs(num_tokens: int, num_top: int) -> None:
    """Raise InvalidRequestError for more log probabilities of prompts than an answer may have."""
    count = num_tokens * (1 + num_top)
    if count > MAX_PROMPT_LOGPROBS:
        raise invalid(
            "logprobs",
            f"with echo, at most {MAX_PROMPT_LOGPROBS} of all prompts together, not {count}: send "
            "fewer prompts, or ask for fewer beside each token",
        )


def check_token_ids(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Raise InvalidRequestError, naming `param`, for an id outside the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < model.vocab_size):
        raise invalid(param, f"token ids of this model are between 0 and {model.vocab_size - 1}")


def require_model(model: ServedModel, name: str | None) -> None:
    """Raise UnknownModelError if a client names another model than the one that is served."""
    if name is not None and name != model.name:
        shown = name if len(name) <= MAX_SHOWN_CHARS else f"{name[:MAX_SHOWN_CHARS]}..."
        raise UnknownModelError(f"the model {shown!r} does not exist; {model.name!r} does", "model")


def unique_id(request_id: str, rng: random.Random) -> RequestId:
    """Return the cluster's name of a request: a client's id need not be unique among clients."""
    return RequestId(f"{request_id}-{rng.getrandbits(32):08x}")


def check_request_id(request_id: str) -> None:
    """Raise InvalidRequestError for a name that would not fit a log line or a header."""
    if len(request_id) > MAX_REQUEST_ID_CHARS or not (request_id.isascii() and request_id.isprintable()):
        raise invalid("request_id", f"at most {MAX_REQUEST_ID_CHARS} printable ASCII characters")


def make_request(
    request_id: RequestId,
    token_ids: tuple[int, ...],
    options: Options,
    caller: Caller,
    model: ServedModel,
    rng: random.Random,
    default_max_tokens: int | None = None,
) -> TextRequest:
    """Return the request for one prompt.

    Args:
        request_id: Unique in the cluster.
        token_ids: The prompt.
        options: Passed `check_options`; what the client left open comes from `model` and `rng`.
        default_max_tokens: Used where the client did not say; None: to the end of the window.

    Raises:
        InvalidRequestError: the prompt is empty, of another vocabulary or too long for the context window
            (`param` is "prompt"), or too long with the answer ("max_tokens").
    """
    # The length first: each of a few is looked at, not each of millions.
    max_tokens = _max_tokens(len(token_ids), options.max_tokens, default_max_tokens, model.max_model_len)
    check_token_ids(token_ids, model, "prompt")
    # An answer of a form ends where that is complete, whoever ignores the end of sequence.
    is_endless = options.ignore_eos and options.grammar is None
    stop_token_ids = {*options.stop_token_ids, *(() if is_endless else model.eos_token_ids)}
    return TextRequest(
        request=Request(
            request_id=request_id,
            token_ids=token_ids,
            sampling=_sampling_params(options, model, rng),
            stop=StopParams(max_tokens, min(options.min_tokens, max_tokens), tuple(sorted(stop_token_ids))),
            num_logprobs=options.logprobs,
            num_prompt_logprobs=options.prompt_logprobs,
            slo=caller.slo,
            priority=options.priority,
            tenant=caller.tenant,
            cache_salt=options.cache_salt,
            deadline_s=caller.deadline_s,
            traceparent=caller.traceparent,
            arrived_at_s=caller.arrived_at_s,
        ),
        options=options,
    )


def _max_tokens(num_prompt_tokens: int, asked: int | None, default: int | None, max_model_len: int) -> int:
    if not num_prompt_tokens:
        raise invalid("prompt", "the prompt is empty")
    num_left = max_model_len - num_prompt_tokens
    if num_left < 1:
        raise prompt_too_long(num_prompt_tokens, max_model_len)
    if asked is None:
        return num_left if default is None else min(default, num_left)
    if asked > num_left:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + asked} tokens ({num_prompt_tokens} in the prompt, {asked} in the "
            "completion). Please reduce the length of the prompt or of the completion (max_tokens).",
            "max_tokens",
        )
    return asked


def _sampling_params(options: Options, model: ServedModel, rng: random.Random) -> SamplingParams:
    said = dict(options.sampling)
    said["top_k"] = max(said.get("top_k", model.sampling.top_k), 0)
    said["seed"] = said["seed"] % SEED_RANGE if "seed" in said else rng.getrandbits(64)
    return model.sampling._replace(
        **said, logit_bias=tuple(sorted(options.logit_bias.items())), grammar=options.grammar
    )


def _require_between(param: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        shown = value if abs(value) < 1e9 else "a number out of all bounds"
        raise invalid(param, f"between {low:g} and {high:.10g} is wanted, not {shown}")


def _require_at_most(param: str, count: int, limit: int, of_what: str) -> None:
    if count > limit:
        raise invalid(param, f"at most {limit} {of_what}, not {count}")


def _check_stop(stop: tuple[str, ...]) -> None:
    _require_at_most("stop", len(stop), MAX_STOP_STRINGS, "strings")
    for text in stop:
        if not text:
            raise invalid("stop", "an empty string stops nothing")
        _require_at_most("stop", len(text), MAX_STOP_CHARS, "characters in each")
