"""A client's text or conversation to token ids, and token ids to text.

A long text is tokenised on another thread (1 MB takes a second, and every stream of the
process would stand still for it), a short one at once: the way to a thread and back costs
as much as a thousand characters do. What cannot fit the context window however it is
split is refused before it is tokenised, and what does not fit it as soon as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from base.errors import InvalidRequestError
from conductor.chat_template import ChatMessage
from conductor.options import check_token_ids, prompt_too_long
from conductor.served_model import ServedModel

INLINE_CHARS = 2_000
"""Longer texts leave the event loop: about 2 ms of it."""
INLINE_TOKENS = 2_000
"""More token ids leave the event loop to become text."""


async def text_token_ids(model: ServedModel, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Return the token ids of a text that is to be continued.

    Raises:
        InvalidRequestError: it cannot fit the context window.
    """
    at_least = model.tokenizer.min_tokens(text)
    if at_least >= model.max_model_len:
        raise prompt_too_long(at_least, model.max_model_len)
    if len(text) <= INLINE_CHARS:
        return model.tokenizer.encode(text, add_special_tokens)
    token_ids = await asyncio.to_thread(model.tokenizer.encode, text, add_special_tokens)
    if len(token_ids) >= model.max_model_len:
        raise prompt_too_long(len(token_ids), model.max_model_len)
    return token_ids


async def token_ids_text(
    model: ServedModel, token_ids: Sequence[int], param: str, skip_special_tokens: bool
) -> str:
    """Return the text of token ids.

    Raises:
        InvalidRequestError: there are more than the context window has, or one is outside the vocabulary;
            `param` names the field.
    """
    if len(token_ids) > model.max_model_len:
        raise InvalidRequestError(
            f"{param}: at most {model.max_model_len} token ids, not {len(token_ids)}", param
        )
    check_token_ids(token_ids, model, param)
    if len(token_ids) <= INLINE_TOKENS:
        return model.tokenizer.decode(token_ids, skip_special_tokens)
    return await asyncio.to_thread(model.tokenizer.decode, token_ids, skip_special_tokens)


async def chat_token_ids(
    model: ServedModel,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Return the token ids of a conversation, in the form the model was trained on.

    Raises:
        InvalidRequestError: there is no message, the model has no such form, its template
            refuses the messages, or they cannot fit the context window.
    """
    if not messages:
        raise InvalidRequestError("messages: at least one is wanted", "messages")
    template = model.chat_template
    if template is None:
        raise InvalidRequestError(f"{model.name} has no chat template; it takes completions", "messages")
    if sum(len(message.content) for message in messages) <= INLINE_CHARS:
        text = template.render(messages, add_generation_prompt, variables)
    else:
        text = await asyncio.to_thread(template.render, messages, add_generation_prompt, variables)
    # The template has written the special tokens out.
    return await text_token_ids(model, text, add_special_tokens=False)
