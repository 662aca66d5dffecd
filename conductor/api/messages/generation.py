"""The calls of Anthropic's Messages API, from a body to an answer or its events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from base.errors import invalid
from conductor.api.answer_blocks import AnswerBlocks, all_but_last
from conductor.api.backend import Backend
from conductor.api.completion import Piece
from conductor.api.headers import Caller
from conductor.api.http_reply import Reply, to_json
from conductor.api.messages.blocks import MESSAGE_WORDS, content, event, stop_reason, usage
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
    prepare_turn,
    room_for,
    taken_apart,
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
    num_calls = sum(block.type == "tool_use" for message in body.messages for block in _blocks(message))
    call_id = call_ids(backend.model.family, backend.rng, num_calls, "toolu_")
    blocks, num_prompt_tokens = AnswerBlocks(call_id, MESSAGE_WORDS), len(turn.token_ids)
    message: dict[str, Any] = {
        "id": f"msg_{reply.request_id}",
        "type": "message",
        "role": "assistant",
        "model": backend.model.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
    }

    def said(piece: Piece) -> str:
        is_first, events = not blocks.is_begun, "".join(blocks.add(piece))
        if not (is_first and body.stream):
            return events
        begun = {**message, "usage": usage(blocks, num_prompt_tokens)}
        return event("message_start", message=begun) + events

    pieces = taken_apart(backend.completions, turn, asked)
    last = await all_but_last(pieces, said, reply if body.stream else None)
    stopped = {
        "stop_reason": stop_reason(blocks, is_short),
        "stop_sequence": blocks.stopped_by or None,
        "container": None,
    }
    used = usage(blocks, num_prompt_tokens)
    if body.stream:
        await reply.end(last + event("message_delta", delta=stopped, usage=used) + event("message_stop"))
    else:
        whole = {**message, **stopped, "content": content(blocks), "usage": used}
        await reply.whole([to_json(whole).encode()])
