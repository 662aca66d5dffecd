"""The calls that only turn text to token ids and back: /tokenize and /detokenize."""

from __future__ import annotations

from functools import partial

from base.errors import InvalidRequestError
from base.off_loop import off_loop
from conductor.api.backend import Backend
from conductor.api.headers import Caller
from conductor.api.http_reply import Reply, to_json
from conductor.api.openai_schema import ChatBody, DetokenizeBody, Message, TokenizeBody, chat_messages
from conductor.api.openai_tools import CALL_CHARS
from conductor.api.options import require_model
from conductor.api.prompt import text_token_ids, token_ids_text
from conductor.api.served_model import ServedModel
from conductor.api.turn import ChatTurn, prepare_turn


async def asked_turn(model: ServedModel, body: ChatBody | TokenizeBody, messages: list[Message]) -> ChatTurn:
    """Return the turn that a body's conversation asks for; raises InvalidRequestError."""
    calls = (call for each in messages for call in each.tool_calls or ())
    num_chars = sum(CALL_CHARS + len(call.function.arguments) for call in calls)
    return await prepare_turn(
        model,
        await off_loop(num_chars, partial(chat_messages, messages)),
        body.asked_tools(),
        body.asked_reasoning(),
        body.chat_template_kwargs,
        body.add_generation_prompt is not False,
        bool(body.parse_special_tokens),
    )


async def tokenize(backend: Backend, body: TokenizeBody, caller: Caller, reply: Reply) -> None:
    model = backend.model
    require_model(model, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt, or messages: one of them is wanted", "prompt")
    if body.messages is not None:
        token_ids = (await asked_turn(model, body, body.messages)).token_ids
    else:
        token_ids = await text_token_ids(model, body.prompt or "", body.add_special_tokens is not False)
    answer = {"count": len(token_ids), "max_model_len": model.max_model_len, "tokens": token_ids}
    await reply.whole([to_json(answer).encode()])


async def detokenize(backend: Backend, body: DetokenizeBody, caller: Caller, reply: Reply) -> None:
    require_model(backend.model, body.model)
    text = await token_ids_text(backend.model, body.tokens, "tokens", skip_special_tokens=False)
    await reply.whole([to_json({"prompt": text}).encode()])
