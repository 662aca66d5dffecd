"""The call of the Responses API, from a body to an answer or its events."""

from __future__ import annotations

import asyncio
import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from base.clock import wall_clock_s
from base.errors import invalid
from base.off_loop import off_loop
from base.request import FinishReason
from conductor.api.answer_blocks import AnswerBlocks, all_but_last
from conductor.api.backend import Backend
from conductor.api.chat_template import ChatMessage, PastCall, ToolSpec
from conductor.api.completion import Piece
from conductor.api.headers import Caller
from conductor.api.http_reply import Reply, to_json
from conductor.api.openai_format import DONE
from conductor.api.openai_schema import sampling_of
from conductor.api.openai_tools import past_arguments, tool_names
from conductor.api.options import check_options, make_request, params_spelled, require_model, unique_id
from conductor.api.parsing.events import Called, Said, value_or_none
from conductor.api.prompt import MANY_CHARS_A_TOKEN, following_token_ids
from conductor.api.responses.held import HeldResponse
from conductor.api.responses.items import OutputItems, usage
from conductor.api.responses.schema import ResponsesBody
from conductor.api.turn import (
    ChatTurn,
    call_ids,
    prepare_turn,
    room_for,
    taken_apart,
    with_turn,
    without_thinking,
)

_SHOWN_SAMPLING = ("top_p", "temperature", "presence_penalty", "frequency_penalty")
_SPELLED = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}


class _Asked(NamedTuple):
    """The turn of a body, with the conversation before it."""

    turn: ChatTurn
    messages: tuple[ChatMessage, ...]
    """The whole conversation."""
    setting: bytes


async def create_response(backend: Backend, body: ResponsesBody, caller: Caller, reply: Reply) -> None:
    """Answer a /v1/responses call; raises ServeError."""
    model = backend.model
    with params_spelled(_SPELLED):
        require_model(model, body.model)
        asked = await _asked(backend, body, caller)
        if body.options(1).grammar is not None:
            asked = asked._replace(turn=without_thinking(model, asked.turn))
        turn = asked.turn
        most = body.max_output_tokens or model.max_model_len
        options = with_turn(body.options(room_for(len(turn.token_ids), most, model)), turn)
        check_options(options, caller, model)
        unique = unique_id(reply.request_id, backend.rng)
        request = make_request(unique, turn.token_ids, options, caller, model, backend.rng)
    num_calls = sum(len(message.calls) for message in asked.messages)
    items = OutputItems(unique)
    blocks = AnswerBlocks(call_ids(model.family, backend.rng, num_calls), items.words)
    response = _Response(backend, body, asked, f"resp_{unique}", items)
    generated: list[int] = []
    setting = asked.setting

    def said(piece: Piece) -> str:
        nonlocal setting
        generated.extend((*piece.inserted, *(token.token_id for token in piece.tokens)))
        if piece.is_cut:  # the tokens say more than the answer did
            setting = b""
        begun = response.begun() if body.stream and not blocks.is_begun else ""
        return begun + "".join(blocks.add(piece))

    pieces = taken_apart(backend.completions, turn, request)
    last = await all_but_last(pieces, said, reply if body.stream else None)
    if body.store is not False:
        asked = asked._replace(setting=setting)
        await _hold(backend, caller, response.response_id, asked, blocks, generated)
    whole = response.ended(blocks)
    if body.stream:
        await reply.end(last + items.event(f"response.{whole['status']}", response=whole) + DONE)
    else:
        await reply.whole([to_json(whole).encode()])


async def _asked(backend: Backend, body: ResponsesBody, caller: Caller) -> _Asked:
    model, tools, reasoning = backend.model, body.asked_tools(), body.asked_reasoning()
    held = None
    if body.previous_response_id is not None:
        held = backend.held.find(caller.tenant, body.previous_response_id)
    before = held.messages if held is not None else ()
    known = {call.call_id for message in before for call in message.calls}
    new = await off_loop(body.num_json_chars, partial(body.conversation_after, known))
    if not new:
        raise invalid("input", "at least one item is wanted")
    system = (ChatMessage("system", body.instructions),) if body.instructions else ()
    variables = {**reasoning.variables, **(body.chat_template_kwargs or {})}
    # Long ones are refused where they become a prompt; here they only must not hold up the event loop.
    setting = await asyncio.to_thread(_setting, body.instructions, tools.offered, variables)
    token_ids = None
    if held is not None and held.setting == setting:
        token_ids = await following_token_ids(model, held.token_ids, new, variables, tools.offered)
    turn = await prepare_turn(
        model, (*system, *before, *new), tools, reasoning, body.chat_template_kwargs, token_ids=token_ids
    )
    return _Asked(turn, (*before, *new), setting)


def _setting(instructions: str | None, tools: Sequence[ToolSpec], variables: Mapping[str, Any]) -> bytes:
    """Return what is equal where the prompts of two turns begin alike: a digest, however long these are."""
    shown = [instructions, [tool.as_template_sees_it() for tool in tools], dict(variables)]
    text = json.dumps(shown, ensure_ascii=False)  # in one call, during which all threads stand
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


async def _hold(
    backend: Backend,
    caller: Caller,
    response_id: str,
    asked: _Asked,
    blocks: AnswerBlocks,
    generated: list[int],
) -> None:
    def held() -> HeldResponse:
        calls = tuple(
            PastCall(call.call_id, call.name, past_arguments(call.text, "arguments"))
            for call in blocks.of(Called)
            if call.is_whole
        )
        text = "".join(block.text for block in blocks.of(Said))
        answer = ChatMessage("assistant", text, calls=calls)
        is_ended = bool(generated) and generated[-1] in backend.model.eos_token_ids
        token_ids = array("I", asked.turn.token_ids)
        token_ids.extend(generated[:-1] if is_ended else generated)
        return HeldResponse(token_ids, (*asked.messages, answer), asked.setting)

    num_chars = MANY_CHARS_A_TOKEN * (len(asked.turn.token_ids) + len(generated))
    backend.held.hold(caller.tenant, response_id, await off_loop(num_chars, held))


class _Response:
    """The response object, as it is shown in events and in the end."""

    def __init__(
        self,
        backend: Backend,
        body: ResponsesBody,
        asked: _Asked,
        response_id: str,
        items: OutputItems,
    ) -> None:
        self.response_id = response_id
        """Unlike a client's request id, that of one response alone."""
        self._items = items
        self._num_prompt_tokens = len(asked.turn.token_ids)
        sampling, sampled = backend.model.sampling, sampling_of(body)
        reasoning = body.reasoning
        self._shown: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(wall_clock_s()),
            "model": backend.model.name,
            "previous_response_id": body.previous_response_id,
            "instructions": body.instructions,
            "error": None,
            "tools": [_shown_tool(tool) for tool in asked.turn.tools.offered],
            "tool_choice": _shown_choice(body),
            "truncation": "disabled",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": _shown_format(body)},
            **{name: sampled.get(name, getattr(sampling, name)) for name in _SHOWN_SAMPLING},
            "top_logprobs": 0,
            "reasoning": {
                "effort": reasoning.effort if reasoning is not None else None,
                "summary": reasoning.summary if reasoning is not None else None,
            },
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "store": body.store is not False,
            "background": False,
            "service_tier": "default",
            "metadata": body.metadata or {},
            "safety_identifier": None,
            "prompt_cache_key": None,
        }

    def begun(self) -> str:
        """Return the events before all others."""
        shown = self._at("in_progress", output=[], usage=None)
        event = self._items.event
        return event("response.created", response=shown) + event("response.in_progress", response=shown)

    def ended(self, blocks: AnswerBlocks) -> Mapping[str, Any]:
        shown: dict[str, Any] = {"output": self._items.done(blocks)}
        shown["usage"] = usage(blocks, self._num_prompt_tokens)
        if blocks.finish_reason is FinishReason.LENGTH:
            return self._at("incomplete", **shown, incomplete_details={"reason": "max_output_tokens"})
        return self._at("completed", **shown, completed_at=int(wall_clock_s()))

    def _at(self, status: str, **fields: Any) -> Mapping[str, Any]:
        empty = {"incomplete_details": None, "completed_at": None}
        return {**self._shown, "status": status, **empty, **fields}


def _shown_tool(tool: ToolSpec) -> dict[str, Any]:
    """Return a tool that the model was offered: its text is in the prompt, and within the window so."""
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.is_strict,
    }


def _shown_format(body: ResponsesBody) -> Mapping[str, Any]:
    asked = body.text.format if body.text is not None else None
    if asked is None or asked.type != "json_schema":
        return {"type": asked.type if asked is not None else "text"}
    schema = value_or_none(asked.json_schema or "{}")
    if schema is None:
        raise invalid("text.format.schema", "JSON of a schema is wanted")
    return {"type": asked.type, "name": asked.name, "schema": schema, "description": None, "strict": True}


def _shown_choice(body: ResponsesBody) -> Any:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    shown: dict[str, Any] = {"type": choice.type, "name": choice.name, "mode": choice.mode}
    if choice.tools is not None:
        names = tool_names(choice.tools, "tool_choice.tools")
        shown["tools"] = [{"type": "function", "name": name} for name in names]
    return {name: value for name, value in shown.items() if value is not None}
