"""The two calls that generate: /v1/chat/completions and /v1/completions.

    body -> requests, one for each prompt and choice -> pieces -> events or a whole answer

All prompts run at once and write as their tokens come. Of the choices for one prompt the
first goes ahead: when its first token is there, so is the prompt's KV, and the others match
it. The prompt is counted once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from base.clock import wall_clock_s
from base.errors import invalid
from base.prompt_logprobs import PromptLogprobs
from base.request import RequestId
from base.together import together
from conductor.api.answer_blocks import AnswerBlocks
from conductor.api.backend import Backend
from conductor.api.completion import PART_UNITS
from conductor.api.headers import Caller
from conductor.api.http_reply import Reply
from conductor.api.openai_format import CHAT, COMPLETION, DONE, Choice, Envelope, Shape, Shown, usage
from conductor.api.openai_message import CHAT_WORDS
from conductor.api.openai_schema import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    num_chat_logprobs,
    to_options,
)
from conductor.api.options import (
    Options,
    TextRequest,
    check_options,
    check_prompt_logprobs,
    check_request_id,
    make_request,
    params_spelled,
    require_model,
    unique_id,
)
from conductor.api.prompt import text_token_ids, token_ids_text
from conductor.api.served_model import ServedModel
from conductor.api.texts import asked_turn
from conductor.api.turn import ChatTurn, answer_to, call_ids, with_turn, without_thinking


async def chat(backend: Backend, body: ChatBody, caller: Caller, reply: Reply) -> None:
    """Answer a /v1/chat/completions call; raises ServeError."""
    model = backend.model
    max_tokens_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    spelled = {"prompt": "messages", "max_tokens": max_tokens_name, "logprobs": "top_logprobs"}
    with params_spelled(spelled):
        _check(body, model, reply)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        options = to_options(body, max_tokens, num_chat_logprobs(body))
        check_options(options, caller, model)
        caller.charge((body.n or 1) - 1)
        turn = await asked_turn(model, body, body.messages)
        if options.grammar is not None:
            turn = without_thinking(model, turn)
        prompts = [Shown(turn.token_ids)]
        requests = _requests(backend, prompts, with_turn(options, turn), caller, reply, None)
    turn_or_none = turn if turn.form is not None else None
    await _Generation(CHAT, backend, body, prompts, requests, reply, turn_or_none).answer()


async def completion(backend: Backend, body: CompletionBody, caller: Caller, reply: Reply) -> None:
    """Answer a /v1/completions call; raises ServeError."""
    model = backend.model
    _check(body, model, reply)
    is_prompt_alone = bool(body.echo) and body.max_tokens == 0
    options = to_options(body, 1 if is_prompt_alone else body.max_tokens, body.logprobs)
    if body.echo:
        options = options._replace(prompt_logprobs=body.logprobs, is_prompt_alone=is_prompt_alone)
    check_options(options, caller, model)
    if len(body.prompt) * (body.n or 1) > MAX_CHOICES:
        raise invalid("n", f"at most {MAX_CHOICES} choices of all prompts together")
    caller.charge(len(body.prompt) * (body.n or 1) - 1)
    prompts = [await _prompt(body, given, model) for given in body.prompt]
    if options.prompt_logprobs is not None:
        num_tokens = sum(len(prompt.given_ids) for prompt in prompts)
        check_prompt_logprobs(num_tokens, options.prompt_logprobs)
    requests = _requests(backend, prompts, options, caller, reply, DEFAULT_COMPLETION_TOKENS)
    await _Generation(COMPLETION, backend, body, prompts, requests, reply).answer()


def _check(body: ChatBody | CompletionBody, model: ServedModel, reply: Reply) -> None:
    if body.request_id:
        check_request_id(body.request_id)
        reply.request_id = body.request_id
    require_model(model, body.model)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "only with stream: true")


async def _prompt(body: CompletionBody, given: str | list[int], model: ServedModel) -> Shown:
    if isinstance(given, str):
        token_ids = await text_token_ids(model, given, body.add_special_tokens is not False)
        return Shown(token_ids, given if body.echo else "")
    if not body.echo or len(given) >= model.max_model_len:  # of which no request is made
        return Shown(tuple(given))
    echo = await token_ids_text(model, given, "prompt", body.skip_special_tokens is not False)
    return Shown(tuple(given), echo)


def _requests(
    backend: Backend,
    prompts: Sequence[Shown],
    options: Options,
    caller: Caller,
    reply: Reply,
    default_max_tokens: int | None,
) -> list[TextRequest]:
    unique = unique_id(reply.request_id, backend.rng)
    return [
        make_request(
            RequestId(f"{unique}-p{index}" if len(prompts) > 1 else unique),
            prompt.given_ids,
            options,
            caller,
            backend.model,
            backend.rng,
            default_max_tokens,
        )
        for index, prompt in enumerate(prompts)
    ]


class _Generation:
    """The choices of one call, from their requests to the end of the answer. Owned by the event loop."""

    def __init__(
        self,
        shape: Shape,
        backend: Backend,
        body: ChatBody | CompletionBody,
        prompts: Sequence[Shown],
        requests: Sequence[TextRequest],
        reply: Reply,
        turn: ChatTurn | None = None,
    ) -> None:
        """Begin. `requests`: one for each prompt; `turn`: of a chat whose answers are taken apart."""
        self._turn = turn
        self._completions = backend.completions
        self._prompts = prompts
        self._reply = reply
        self._stream = reply if body.stream else None
        self._envelope = Envelope(
            shape=shape,
            answer_id=reply.request_id,
            created_s=int(wall_clock_s()),
            model_name=backend.model.name,
            tokenizer=backend.model.tokenizer,
            with_logprobs=requests[0].request.num_logprobs is not None,
            with_token_ids=bool(body.return_token_ids),
            with_usage=body.include_usage,
        )
        n = self._n = body.n or 1
        self._choices = [
            Choice(self._envelope, at * n + offset, shown, self._blocks(backend, body))
            for at, shown in enumerate(prompts)
            for offset in range(n)
        ]
        self._asked = [
            request.choice(offset) if n > 1 else request for request in requests for offset in range(n)
        ]

    def _blocks(self, backend: Backend, body: ChatBody | CompletionBody) -> AnswerBlocks | None:
        if self._turn is None or not isinstance(body, ChatBody):
            return None
        num_calls = sum(len(message.tool_calls or ()) for message in body.messages)
        return AnswerBlocks(call_ids(backend.model.family, backend.rng, num_calls), CHAT_WORDS)

    async def answer(self) -> None:
        """Run all choices and write the answer; raises ServeError."""
        last = ""
        if len(self._choices) == 1:
            last = await self._run(0)
        else:
            prefilled = [asyncio.Event() for _ in self._prompts]
            await together(self._run_beside(at, prefilled[at // self._n]) for at in range(len(self._choices)))
        if self._stream is not None:
            event = self._envelope.usage_event(self._usage()) if self._envelope.with_usage else ""
            await self._stream.end(last + event + DONE)
        else:
            await self._reply.whole(await self._whole())

    async def _whole(self) -> list[bytes | bytearray]:
        before, after = self._envelope.ends(self._usage())
        parts: list[bytes | bytearray] = [before]
        for choice in self._choices:
            if len(parts) > 1:
                parts.append(b",")
                await self._completions.turn(choice.num_tokens)
            parts += choice.whole()
        return [*parts, after]

    async def _run_beside(self, at: int, prefilled: asyncio.Event) -> None:
        """Run one of several choices; the first of a prompt says when the others may begin."""
        if at % self._n:
            await prefilled.wait()
        last = await self._run(at, prefilled)
        if self._stream is not None and last:
            await self._stream.event(last)

    async def _run(self, at: int, prefilled: asyncio.Event | None = None) -> str:
        """Fill in a choice, and send its events as they come where the answer streams.

        Returns the events of the last piece, which were not sent: more may go with them.
        """
        events = ""
        choice, stream = self._choices[at], self._stream
        async with aclosing(answer_to(self._turn, self._completions, self._asked[at])) as pieces:
            async for piece in pieces:
                if piece.prompt_logprobs is not None:
                    await self._show_prompt(at // self._n, piece.prompt_logprobs)
                if prefilled is not None:
                    prefilled.set()
                if stream is None:
                    choice.keep(piece)
                else:
                    events = choice.events(piece)
                    if events and piece.finish_reason is None:
                        await stream.event(events)
        return events

    async def _show_prompt(self, at: int, logprobs: PromptLogprobs) -> None:
        """Take the log probabilities of a prompt, as JSON that its choices begin with."""
        token_ids, num_top = self._prompts[at].given_ids, self._asked[at * self._n].request.num_logprobs
        count = max(1, PART_UNITS // (1 + (num_top or 0)))
        for begin in range(0, logprobs.num_tokens + 1, count):
            await self._completions.turn(PART_UNITS)
            tokens = logprobs.tokens(token_ids, begin, min(begin + count, logprobs.num_tokens + 1))
            self._prompts[at].add_logprobs(tokens, self._envelope)

    def _usage(self) -> Mapping[str, Any]:
        blocks = [choice.blocks for choice in self._choices if choice.blocks is not None]
        return usage(
            sum(len(prompt.given_ids) for prompt in self._prompts),
            sum(choice.num_tokens for choice in self._choices),
            sum(choice.num_cached_tokens for choice in self._choices[:: self._n]),
            sum(found.num_reasoning_tokens for found in blocks) if self._turn is not None else None,
        )
