"""The calls of Anthropic's Messages API, from a body to an answer or its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from base.errors import invalid
from conductor.api.backend import Backend
from conductor.api.headers import Caller
from conductor.api.http_reply import Reply, to_json
from conductor.api.messages.blocks import MessageBlocks, event
from conductor.api.messages.schema import AnthropicMessage, Block, CountTokensBody, MessagesBody
from conductor.api.options import (
    TextRequest,
    check_options,
    make_request,
    params_spelled,
    require_model,
    unique_id,
)
from conductor.api.prompt import plain_token_ids
from conductor.api.served_model import ServedModel
from conductor.api.turn import (
    ChatTurn,
    call_ids,
    parts_of,
    prepare_turn,
    room_for,
    with_turn,
    without_thinking,
)

_SPELLED = {"prompt": "messages", "stop": "stop_sequences"}


async def create_message(backend: Backend, body: MessagesBody, caller: Caller, reply: Reply) -> None:
    """Answer a /v1/messages call; raises ServeError."""
    model = backend.model
    with params_spelled(_SPELLED):
        turn = await _turn(model, body)
        max_tokens = room_for(len(turn.token_ids), body.max_tokens, model)
        options = with_turn(body.options(max_tokens), turn)
        check_options(options, caller, model)
        unique = unique_id(reply.request_id, backend.rng)
        asked = make_request(unique, turn.token_ids, options, caller, model, backend.rng)
    await _answer(backend, body, turn, asked, reply, is_short=max_tokens < body.max_tokens)


async def count_tokens(backend: Backend, body: CountTokensBody, caller: Caller, reply: Reply) -> None:
    """Answer a /v1/messages/count_tokens call; raises ServeError."""
    with params_spelled(_SPELLED):
        turn = await _turn(backend.model, body)
    await reply.whole([to_json({"input_tokens": len(turn.token_ids)}).encode()])


async def _turn(model: ServedModel, body: CountTokensBody) -> ChatTurn:
    """Return the turn of a body; raises InvalidRequestError."""
    require_model(model, body.model)
    messages, beginning = body.conversation()
    turn = await prepare_turn(
        model, messages, body.asked_tools(), body.asked_reasoning(), body.chat_template_kwargs
    )
    if beginning or body.grammar() is not None:
        turn = without_thinking(model, turn)
    if not beginning:
        return turn
    if isinstance(body, MessagesBody):
        _require_one_beginning(body)
    begun = await plain_token_ids(model, beginning)
    return replace(turn, token_ids=(*turn.token_ids, *begun))


def _require_one_beginning(body: MessagesBody) -> None:
    """Raise InvalidRequestError where something else than the client's words begins the answer, too.

    A form begins it with its own words, and so does a call that is demanded; reasoning goes before all."""
    is_demanded = body.tool_choice is not None and body.tool_choice.type in ("any", "tool")
    if is_demanded or body.grammar() is not None:
        raise invalid(
            "messages",
            "an answer that a last message of the assistant's begins has no form and no call that "
            "is demanded: leave that message out, or output_config.format and tool_choice",
        )
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    if thinks and not any(block.type.endswith("thinking") for block in _blocks(body.messages[-1])):
        raise invalid(
            "messages", "the last one is the assistant's, before which there is no thinking: leave out one"
        )


def _blocks(message: AnthropicMessage) -> Sequence[Block]:
    return () if isinstance(message.content, str) else message.content


async def _answer(
    backend: Backend, body: MessagesBody, turn: ChatTurn, asked: TextRequest, reply: Reply, is_short: bool
) -> None:
    model = backend.model
    num_calls = sum(block.type == "tool_use" for message in body.messages for block in _blocks(message))
    blocks = MessageBlocks(call_ids(model.family, backend.rng, num_calls, "toolu_"))
    num_prompt_tokens = len(turn.token_ids)
    events, is_begun = "", False
    async with aclosing(parts_of(backend.completions, turn, asked)) as parts:
        async for part in parts:
            added = blocks.add(part, is_short)
            if not body.stream:
                continue
            if not is_begun:
                is_begun = True
                whole = _message(model, reply, blocks, num_prompt_tokens, is_whole=False)
                added = event("message_start", message=whole) + added
            if part.piece.finish_reason is not None:
                events = added
            elif added:
                await reply.event(added)
    if body.stream:
        stopped = {
            "stop_reason": blocks.stop_reason,
            "stop_sequence": blocks.stop_sequence,
            "container": None,
        }
        usage = blocks.usage(num_prompt_tokens)
        await reply.end(events + event("message_delta", delta=stopped, usage=usage) + event("message_stop"))
    else:
        await reply.whole([to_json(_message(model, reply, blocks, num_prompt_tokens)).encode()])


def _message(
    model: ServedModel, reply: Reply, blocks: MessageBlocks, num_prompt_tokens: int, is_whole: bool = True
) -> Mapping[str, Any]:
    return {
        "id": f"msg_{reply.request_id}",
        "type": "message",
        "role": "assistant",
        "model": model.name,
        "content": blocks.content if is_whole else [],
        "stop_reason": blocks.stop_reason if is_whole else None,
        "stop_sequence": blocks.stop_sequence if is_whole else None,
        "stop_details": None,
        "container": None,
        "usage": blocks.usage(num_prompt_tokens),
    }
