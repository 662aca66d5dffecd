"""A client's text or conversation to token ids, and token ids to text.

A long text is tokenised on another thread (1 MB takes a second, and every stream of the
process would stand still for it), a short one at once: the way to a thread and back costs
as much as a thousand characters do. What cannot fit the context window however it is
split is refused before it is tokenised, and what does not fit it as soon as it is.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from base.errors import InvalidRequestError, invalid
from conductor.api.chat_template import ChatMessage, PastCall, ToolSpec
from conductor.api.options import check_token_ids
from conductor.api.parsing.events import with_texts
from conductor.api.served_model import ServedModel
from conductor.api.tokenizer import ContextLengthError, prompt_too_long
from conductor.api.tool_prompt import with_tools_in_words

INLINE_CHARS = 2_000
"""Longer texts leave the event loop: about 2 ms of it."""
MANY_CHARS_A_TOKEN = 4
"""The most of a conversation that fits the context window; a longer one is counted before it is rendered."""
PART_CHARS = 10
"""Characters whose time a turn, a call or a tool takes to render, however short it is."""
INLINE_TOKENS = 2_000
"""More token ids leave the event loop to become text."""


async def text_token_ids(
    model: ServedModel, text: str, add_special_tokens: bool = True, cut: str = ""
) -> tuple[int, ...]:
    """Return the token ids of a text that is to be continued; `cut` is that of `Tokenizer.encode`.

    Raises InvalidRequestError for a text that cannot fit the context window.
    """
    at_least = model.tokenizer.min_tokens(text)
    if at_least >= model.max_model_len:
        raise prompt_too_long(at_least, model.max_model_len)
    if len(text) <= INLINE_CHARS:
        return model.tokenizer.encode(text, add_special_tokens, cut, model.max_model_len)
    return await asyncio.to_thread(model.tokenizer.encode, text, add_special_tokens, cut, model.max_model_len)


async def plain_token_ids(model: ServedModel, text: str) -> tuple[int, ...]:
    """Return the token ids of a text in which names of special tokens stay text.

    Raises InvalidRequestError for a text that cannot fit the context window.
    """
    cut = f"cut{secrets.token_hex(16)}"
    marking = partial(model.tokenizer.with_specials_cut, text, cut, model.max_model_len)
    marked = marking() if len(text) <= INLINE_CHARS else await asyncio.to_thread(marking)
    return await text_token_ids(model, marked, False, cut)


async def token_ids_text(
    model: ServedModel, token_ids: Sequence[int], param: str, skip_special_tokens: bool
) -> str:
    """Return the text of token ids, which are in the field `param`.

    Raises InvalidRequestError for more than the context window has, or one outside the vocabulary.
    """
    if len(token_ids) > model.max_model_len:
        raise invalid(param, f"at most {model.max_model_len} token ids, not {len(token_ids)}")
    check_token_ids(token_ids, model, param)
    if len(token_ids) <= INLINE_TOKENS:
        return model.tokenizer.decode(token_ids, skip_special_tokens)
    return await asyncio.to_thread(model.tokenizer.decode, token_ids, skip_special_tokens)


async def chat_token_ids(
    model: ServedModel,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
    parse_special_tokens: bool = False,
    tools: Sequence[ToolSpec] = (),
) -> tuple[int, ...]:
    """Return the token ids of a conversation, in the form the model was trained on.

    The names of special tokens that the template writes become those tokens. In a message they stay text, or
    whoever writes one could end their turn and begin another's.

    `parse_special_tokens`: whether they become special tokens in messages too. Raises InvalidRequestError
    where there is no message, the model has no such form, its template refuses the messages, or they cannot
    fit the context window.
    """
    if not messages:
        raise invalid("messages", "at least one is wanted")
    cut = "" if parse_special_tokens else f"cut{secrets.token_hex(16)}"
    text = await _rendered(model, messages, add_generation_prompt, variables, cut, tools)
    # The template has written the special tokens out.
    return await text_token_ids(model, text, add_special_tokens=False, cut=cut)


async def following_token_ids(
    model: ServedModel,
    before: Sequence[int],
    messages: Sequence[ChatMessage],
    variables: Mapping[str, Any] | None,
    tools: Sequence[ToolSpec],
) -> tuple[int, ...] | None:
    """Return a prompt that begins with tokens that were computed: those up to the last answer's end.

    None where the template does not show the answer before `messages` once and as it is, or refuses
    `messages` after it. Raises InvalidRequestError as `chat_token_ids` does.
    """
    mark, cut = f"answer{secrets.token_hex(16)}", f"cut{secrets.token_hex(16)}"
    shown = [ChatMessage("user", "-"), ChatMessage("assistant", mark), *messages]
    try:
        text = await _rendered(model, shown, True, variables, cut, tools)
    except ContextLengthError:
        raise
    except InvalidRequestError:  # a tool's result after an answer that called none, say
        return None
    if text.count(mark) != 1:
        return None
    added = await text_token_ids(model, text.partition(mark)[2], add_special_tokens=False, cut=cut)
    return (*before, *added)


async def _rendered(
    model: ServedModel,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool,
    variables: Mapping[str, Any] | None,
    cut: str,
    tools: Sequence[ToolSpec],
) -> str:
    """Return the text of a conversation, with the mark `cut` where clients spelled special tokens."""
    template = model.chat_template
    if template is None:
        raise InvalidRequestError(f"{model.name} has no chat template; it takes completions", "messages")

    def render() -> str:
        cut_text = _Cutting(model, cut)
        turns = [_with_cuts(message, cut_text) for message in messages] if cut else messages
        offered = [_tool_with_cuts(tool, cut_text) for tool in tools] if cut else tools
        set_ones = with_texts(variables or {}, cut_text) if cut else variables
        if not model.has_tools:
            return template.render(with_tools_in_words(turns, offered), add_generation_prompt, set_ones)
        return template.render(turns, add_generation_prompt, set_ones, offered)

    def render_what_fits() -> str:
        if sum(_sizes(messages, tools, variables)) > MANY_CHARS_A_TOKEN * model.max_model_len:
            # A template copies what it is given several times.
            _require_window(model, messages)
        return render()

    # Counted no further than it takes to see that there is much to look at.
    if all(size <= INLINE_CHARS for size in accumulate(_sizes(messages, tools, variables))):
        return render()
    return await asyncio.to_thread(render_what_fits)


def _require_window(model: ServedModel, messages: Sequence[ChatMessage]) -> None:
    """Raise InvalidRequestError if the messages have more tokens than the window, however rendered."""
    num_tokens = 0
    for message in messages:
        found = model.tokenizer.encode(message.content, False, max_model_len=model.max_model_len)
        num_tokens += len(found)
        if num_tokens >= model.max_model_len:
            raise prompt_too_long(num_tokens, model.max_model_len)


def _sizes(
    messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], variables: Mapping[str, Any] | None
) -> Iterator[int]:
    """Yield about how many characters each part of a conversation has, or is worth."""
    for message in messages:
        yield PART_CHARS + len(message.content) + len(message.reasoning or "")
        for call in message.calls:
            yield PART_CHARS
            yield from _value_sizes(call.arguments)
    for tool in tools:
        yield PART_CHARS + len(tool.description)
        yield from _value_sizes(tool.parameters)
    yield from _value_sizes(variables or {})


def _value_sizes(value: Any) -> Iterator[int]:
    match value:
        case str():
            yield len(value) + 2
        case Mapping():
            for key, item in value.items():
                yield len(key) + 4
                yield from _value_sizes(item)
        case list():
            for item in value:
                yield from _value_sizes(item)
        case _:
            yield 6


class _Cutting:
    """Puts the mark `cut` into each name of a special token that a client wrote.

    All texts of a conversation have no more of them than its window has tokens.
    """

    def __init__(self, model: ServedModel, cut: str) -> None:
        self._tokenizer = model.tokenizer
        self._cut = cut
        self._window = self._num_left = model.max_model_len

    def __call__(self, text: str) -> str:
        try:
            found = self._tokenizer.with_specials_cut(text, self._cut, self._num_left)
        except ContextLengthError:
            raise prompt_too_long(self._window, self._window) from None
        self._num_left -= (len(found) - len(text)) // len(self._cut)
        return found


def _with_cuts(message: ChatMessage, cut_text: _Cutting) -> ChatMessage:
    """Return a turn in which names of special tokens stay text."""
    return replace(
        message,
        content=cut_text(message.content),
        name=message.name and cut_text(message.name),
        call_id=message.call_id and cut_text(message.call_id),
        reasoning=message.reasoning and cut_text(message.reasoning),
        calls=tuple(
            PastCall(cut_text(call.call_id), cut_text(call.name), with_texts(call.arguments, cut_text))
            for call in message.calls
        ),
    )


def _tool_with_cuts(tool: ToolSpec, cut_text: _Cutting) -> ToolSpec:
    parameters = with_texts(tool.parameters, cut_text)
    return replace(tool, description=cut_text(tool.description), parameters=parameters)
