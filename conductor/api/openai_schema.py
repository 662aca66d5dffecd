"""The bodies that OpenAI's API and vLLM's extras to it may send: names and types.

Bounds are in `options.py`, because gRPC has the same ones. JSON is read strictly (a number in quotes is no
number). Fields that have no place here are refused or ignored by the table of `openai_fields.py`.

pydantic parses the bytes itself, after `body_bounds.py` has bounded what they are made of; its lists stop at
the first fault, because a validator's report of each of a million costs more than all the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    create_model,
)
from pydantic_core import PydanticCustomError

from base.errors import InvalidRequestError, invalid
from base.request import SAMPLING_FIELDS, SamplingField, SamplingParams
from conductor.api.body_bounds import MAX_VALUES
from conductor.api.chat_template import ChatMessage, ChatRole, PastCall
from conductor.api.grammar_fields import GrammarFields
from conductor.api.openai_fields import refused_or_none
from conductor.api.openai_tools import (
    MAX_TOOL_CALLS,
    CallOfTool,
    NamedChoice,
    ToolChoice,
    ToolList,
    check_json_texts,
    offered_tools,
    past_arguments,
    require_called,
)
from conductor.api.options import (
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Options,
)
from conductor.api.strict_body import (
    StrictBody,
    TemplateVariables,
    TextOrParts,
    TextPart,
    joined_text,
    required,
)
from conductor.api.turn import Reasoning, Tools

MAX_CHOICES = 128
"""OpenAI's limit on `n`; here on all choices of a call together."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, where a completion does not say; a chat goes on to the end of the window."""


def _listed(value: Any) -> Any:
    """Return the list that a text, or null, stands for."""
    return [value] if isinstance(value, str) else [] if value is None else value


def _few_biases(value: Any) -> Any:
    """Refuse a table that is too long as a whole: pydantic would report each bias that is no number."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise PydanticCustomError("too_long", f"at most {MAX_LOGIT_BIASES} tokens, not {len(value)}")
    return value


class _StreamOptions(StrictBody):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


def _sampling_field(name: str, field: SamplingField) -> tuple[Any, None]:
    """Return a number of `SamplingParams` as a field of a body; `options.py` checks the bounds it shows."""
    kind = type(getattr(SamplingParams(), name))
    described = {"type": "integer" if kind is int else "number", "minimum": field.low, "maximum": field.high}
    return Annotated[kind, WithJsonSchema(described)] | None, None


_sampling_fields: dict[str, Any] = {
    name: _sampling_field(name, field) for name, field in SAMPLING_FIELDS.items()
}
SamplingBody = create_model("SamplingBody", __base__=StrictBody, **_sampling_fields)
"""The base of a body that says how tokens are sampled."""


class _GenerationBody(SamplingBody, GrammarFields):  # type: ignore[valid-type, misc]
    """The fields that chats and completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = None
    stop: Annotated[
        list[str],
        Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
        BeforeValidator(_listed),
    ] = Field(default_factory=list)  # a list itself would be copied deeply for each body
    logit_bias: (
        Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES), BeforeValidator(_few_biases)] | None
    ) = None

    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def reasoning_wishes(effort: ReasoningEffort | None, budget: int | None, is_shown: bool) -> Reasoning:
    """Return wishes about reasoning, under all the names that templates have for them."""
    variables: dict[str, Any] = {}
    if effort is not None:
        variables = {"enable_thinking": effort != "none", "thinking": effort != "none"}
        if effort != "none":
            variables["reasoning_effort"] = effort
    elif budget is not None:
        variables = {"enable_thinking": budget > 0, "thinking": budget > 0}
    return Reasoning(is_shown, 0 if effort == "none" else budget, variables)


class Message(StrictBody):
    role: ChatRole
    content: TextOrParts[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[CallOfTool], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: None = None
    audio: None = None


class _Rendered(StrictBody):
    """The fields of a conversation that the chat template renders."""

    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    parse_special_tokens: bool | None = None
    tools: ToolList | None = None
    tool_choice: ToolChoice[NamedChoice] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    include_reasoning: bool | None = None

    def asked_tools(self) -> Tools:
        """Return the tools of the turn; raises InvalidRequestError."""
        return offered_tools(self.tools, self.tool_choice, self.parallel_tool_calls is not False)

    def asked_reasoning(self) -> Reasoning:
        """Return the wishes about reasoning: templates differ in how they call them."""
        is_shown = self.include_reasoning is not False
        return reasoning_wishes(self.reasoning_effort, self.thinking_token_budget, is_shown)


class ChatBody(_GenerationBody, _Rendered):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


def _prompt_list(value: Any) -> list[str | list[int]]:
    """Return the prompts of a completion: texts and lists of token ids.

    pydantic would try one form after the other and report each of a million elements that do not fit it.
    """
    if is_token_ids(value):
        return [value]
    if isinstance(value, list) and len(value) > MAX_CHOICES:
        raise PydanticCustomError("too_long", f"at most {MAX_CHOICES} prompts, not {len(value)}")
    prompts = value if isinstance(value, list) else [value]
    if prompts and all(isinstance(item, str) or is_token_ids(item) for item in prompts):
        return prompts
    raise PydanticCustomError("prompt", "Input should be a string, a list of token ids, or a list of these")


def is_token_ids(value: Any) -> bool:
    """Return whether a value is a list, or a chain of lists, of whole numbers, of which there is one."""
    return isinstance(value, list | chain) and set(map(type, value)) == {int}


def read_by(listed: Callable[[Any], list[str | list[int]]], most: int) -> PlainValidator:
    """Return what reads a field of texts and lists of token ids, `most` at most, or of one without a list."""
    ids = Annotated[list[int], Field(max_length=MAX_VALUES)]
    each_of = Field(max_length=most)
    forms = str | Annotated[list[str], each_of] | ids | Annotated[list[ids], each_of]
    return PlainValidator(listed, json_schema_input_type=forms)


class CompletionBody(_GenerationBody):
    prompt: Annotated[list[str | list[int]], read_by(_prompt_list, MAX_CHOICES)]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


_CHAT_FIELDS = frozenset(ChatBody.model_fields | CompletionBody.model_fields) - {"messages", "prompt"}


class TokenizeBody(_Rendered):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(StrictBody):
    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_VALUES, fail_fast=True)]


Body = TypeVar("Body", bound=StrictBody)


def read_body(raw: bytes, into: type[Body]) -> Body:
    """Parse a call's body.

    Raises InvalidRequestError, whose `param` names the field, where it is no JSON object, a field has the
    wrong type or is missing, or it asks for what we do not do.
    """
    try:
        body = into.model_validate_json(raw)
    except ValidationError as error:
        raise _refusal(error) from None
    extra = body.model_extra or {}
    if (name := refused_or_none(extra, _CHAT_FIELDS if into.refuses_fields_of_chats else ())) is not None:
        raise InvalidRequestError(f"{name} is not supported: leave it out", name)
    return body


def _refusal(error: ValidationError) -> InvalidRequestError:
    """Return the first fault as OpenAI would name it: messages[0].content."""
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if fault["type"] == "json_invalid":
        return InvalidRequestError(f"the body is no JSON: {fault['msg'].removeprefix('Invalid JSON: ')}")
    param = ""
    for part in fault["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif " " not in part:
            param += f".{part}" if param else part
    if fault["type"] == "none_required":
        return InvalidRequestError(f"{param} is not supported: leave it out, or null", param)
    return InvalidRequestError(f"{param or 'the body'}: {fault['msg']}", param or None)


def chat_messages(messages: list[Message]) -> tuple[ChatMessage, ...]:
    """Return a conversation with plain contents; parts of a list are lines.

    Raises InvalidRequestError for a part that is no text, a message of nothing, or a tool's that answers no
    call that was made before it.
    """
    calls = (call for message in messages for call in message.tool_calls or ())
    check_json_texts((call.function.arguments for call in calls), "messages")
    call_ids: set[str] = set()
    turns = []
    for index, message in enumerate(messages):
        param = f"messages[{index}]"
        if message.role == "tool":
            call_id = required(message.tool_call_id, f"{param}.tool_call_id")
            require_called(call_id, call_ids, f"{param}.tool_call_id")
        turns.append(_chat_message(message, param))
        call_ids.update(call.call_id for call in turns[-1].calls)
    return tuple(turns)


def _chat_message(message: Message, param: str) -> ChatMessage:
    calls = message.tool_calls or ()
    if calls and message.role != "assistant":
        raise invalid(f"{param}.tool_calls", "the assistant alone calls")
    past = tuple(
        PastCall(
            call.id,
            call.function.name,
            past_arguments(call.function.arguments, f"{param}.tool_calls[{index}].function.arguments"),
        )
        for index, call in enumerate(calls)
    )
    content = message.content
    if content is None and not past:
        raise InvalidRequestError(f"{param}.content is missing", f"{param}.content")
    text = joined_text(content or "", f"{param}.content")
    thoughts = message.reasoning_content or message.reasoning
    return ChatMessage(message.role, text, message.name, past, message.tool_call_id, thoughts)


def sampling_of(body: StrictBody) -> dict[str, Any]:
    """Return how a `SamplingBody` says that tokens are sampled."""
    return {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}


def to_options(body: ChatBody | CompletionBody, max_tokens: int | None, num_logprobs: int | None) -> Options:
    """Return the body's choices by their common names.

    Raises InvalidRequestError for a bias of no token, or two grammars."""
    asked = body.asked_grammar()
    return Options(
        sampling=sampling_of(body),
        logit_bias=_logit_bias(body.logit_bias or {}),
        grammar=asked.grammar if asked is not None else None,
        grammar_param=asked.param if asked is not None else "",
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=num_logprobs,
        # vLLM's is the other way round: lower goes first.
        priority=-(body.priority or 0),
        cache_salt=body.cache_salt or "",
    )


def _logit_bias(table: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): bias for token_id, bias in table.items()}
    except ValueError:
        raise invalid("logit_bias", "keys are token ids") from None


def num_chat_logprobs(body: ChatBody) -> int | None:
    """Return how many alternatives a chat asks for with each token; None: no logprobs.

    Raises InvalidRequestError for alternatives without logprobs.
    """
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    return (body.top_logprobs or 0) if body.logprobs else None
