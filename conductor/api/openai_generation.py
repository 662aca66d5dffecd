"""The two calls that generate: /v1/chat/completions and /v1/completions.

    body -> requests, one for each prompt and choice -> pieces -> events or a whole answer

All prompts run at once and write as their tokens come. Of the choices for one prompt the
first goes ahead: when its first token is there, so is the prompt's KV, and the others match
it. The prompt is counted once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from base.clock import wall_clock_s
from base.errors import InvalidRequestError
from base.request import RequestId
from base.together import together
from conductor.api.completion import Completions
from conductor.api.headers import Caller
from conductor.api.http_reply import Reply
from conductor.api.openai_format import CHAT, COMPLETION, DONE, Answer, Choice, Shape, Shown, usage
from conductor.api.openai_schema import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    chat_messages,
    num_chat_logprobs,
    read_long_body,
    to_options,
)
from conductor.api.options import (
    Options,
    TextRequest,
    check_options,
    check_request_id,
    make_request,
    params_spelled,
    require_model,
    unique_id,
)
from conductor.api.prompt import chat_token_ids, text_token_ids, token_ids_text


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: tuple[int, ...]
    echo: str = ""


class Generation:
    """Answers calls that generate. Owned by the event loop."""

    def __init__(self, completions: Completions, rng: random.Random) -> None:
        self._completions = completions
        self._model = completions.model
        self._rng = rng

    async def chat(self, raw: bytes, caller: Caller, reply: Reply) -> None:
        """Answer a /v1/chat/completions call; raises ServeError."""
        body = await read_long_body(raw, ChatBody)
        max_tokens_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        with params_spelled({"prompt": "messages", "max_tokens": max_tokens_name}):
            self._check(body, reply)
            max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
            options = to_options(body, max_tokens, num_chat_logprobs(body), caller)
            check_options(options, self._model)
            caller.charge((body.n or 1) - 1)
            token_ids = await chat_token_ids(
                self._model,
                chat_messages(body.messages),
                body.add_generation_prompt is not False,
                body.chat_template_kwargs,
                bool(body.parse_special_tokens),
            )
            requests = self._requests([_Prompt(token_ids)], options, caller, reply, None)
        await self._answer(CHAT, body, [_Prompt(token_ids)], requests, reply)

    async def completion(self, raw: bytes, caller: Caller, reply: Reply) -> None:
        """Answer a /v1/completions call; raises ServeError."""
        body = await read_long_body(raw, CompletionBody)
        self._check(body, reply)
        if body.echo and body.logprobs is not None:
            raise InvalidRequestError("echo: logprobs of the prompt are not computed", "echo")
        options = to_options(body, body.max_tokens, body.logprobs, caller)
        check_options(options, self._model)
        if len(body.prompt) * (body.n or 1) > MAX_CHOICES:
            raise InvalidRequestError(f"n: at most {MAX_CHOICES} choices of all prompts together", "n")
        caller.charge(len(body.prompt) * (body.n or 1) - 1)
        prompts = [await self._prompt(body, given, options) for given in body.prompt]
        requests = self._requests(prompts, options, caller, reply, DEFAULT_COMPLETION_TOKENS)
        await self._answer(COMPLETION, body, prompts, requests, reply)

    def _check(self, body: ChatBody | CompletionBody, reply: Reply) -> None:
        if body.request_id:
            check_request_id(body.request_id)
            reply.request_id = body.request_id
        require_model(self._model, body.model)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequestError("stream_options: only with stream: true", "stream_options")

    async def _prompt(self, body: CompletionBody, given: str | list[int], options: Options) -> _Prompt:
        if isinstance(given, str):
            token_ids = await text_token_ids(self._model, given, body.add_special_tokens is not False)
            return _Prompt(token_ids, given if body.echo else "")
        if not body.echo:
            return _Prompt(tuple(given))
        echo = await token_ids_text(self._model, given, "prompt", options.skip_special_tokens)
        return _Prompt(tuple(given), echo)

    def _requests(
        self,
        prompts: Sequence[_Prompt],
        options: Options,
        caller: Caller,
        reply: Reply,
        default_max_tokens: int | None,
    ) -> list[TextRequest]:
        unique = unique_id(reply.request_id, self._rng)
        return [
            make_request(
                RequestId(f"{unique}-p{index}" if len(prompts) > 1 else unique),
                prompt.token_ids,
                options,
                self._model,
                self._rng,
                caller.arrived_at_s,
                default_max_tokens,
            )
            for index, prompt in enumerate(prompts)
        ]

    async def _answer(
        self,
        shape: Shape,
        body: ChatBody | CompletionBody,
        prompts: Sequence[_Prompt],
        requests: Sequence[TextRequest],
        reply: Reply,
    ) -> None:
        answer = Answer(
            shape=shape,
            answer_id=reply.request_id,
            created_s=int(wall_clock_s()),
            model_name=self._model.name,
            tokenizer=self._model.tokenizer,
            with_logprobs=requests[0].request.num_logprobs is not None,
            with_token_ids=bool(body.return_token_ids),
            with_usage=body.include_usage,
        )
        n = body.n or 1
        choices = [
            Choice(answer, at * n + offset, shown)
            for at, shown in enumerate(Shown(prompt.token_ids, prompt.echo) for prompt in prompts)
            for offset in range(n)
        ]
        asked = [request.choice(offset) if n > 1 else request for request in requests for offset in range(n)]
        stream = reply if body.stream else None
        last = ""
        if len(choices) == 1:
            last = await self._run(choices[0], asked[0], stream)
        else:
            ahead = [asyncio.Event() for _ in prompts]
            await together(
                self._run_beside(choice, one, stream, ahead[at // n], at % n == 0)
                for at, (choice, one) in enumerate(zip(choices, asked, strict=True))
            )
        if body.stream:
            told = answer.usage_event(_usage(prompts, choices, n)) if answer.with_usage else ""
            await reply.end(last + told + DONE)
        else:
            await reply.in_parts(200, await self._whole(answer, choices, _usage(prompts, choices, n)))

    async def _whole(
        self, answer: Answer, choices: Sequence[Choice], used: Mapping[str, Any]
    ) -> list[bytes | bytearray]:
        before, after = answer.ends(used)
        parts: list[bytes | bytearray] = [before]
        for choice in choices:
            if len(parts) > 1:
                parts.append(b",")
                await self._completions.turn(choice.num_tokens)
            parts += choice.whole()
        return [*parts, after]

    async def _run_beside(
        self,
        choice: Choice,
        asked: TextRequest,
        stream: Reply | None,
        prefilled: asyncio.Event,
        is_first: bool,
    ) -> None:
        """Run one of several choices; the first of a prompt says when the others may begin."""
        if not is_first:
            await prefilled.wait()
        last = await self._run(choice, asked, stream, prefilled)
        if stream is not None and last:
            await stream.event(last)

    async def _run(
        self,
        choice: Choice,
        asked: TextRequest,
        stream: Reply | None,
        prefilled: asyncio.Event | None = None,
    ) -> str:
        """Fill in `choice`, and tell `stream` of it as it comes if there is one.

        Returns the events of the last piece, which `stream` was not told: more may go with them.
        """
        events = ""
        async with aclosing(self._completions.generate(asked)) as pieces:
            async for piece in pieces:
                if prefilled is not None:
                    prefilled.set()
                if stream is None:
                    choice.keep(piece)
                else:
                    events = choice.events(piece)
                    if events and piece.finish_reason is None:
                        await stream.event(events)
        return events


def _usage(prompts: Sequence[_Prompt], choices: Sequence[Choice], n: int) -> Mapping[str, Any]:
    return usage(
        sum(len(prompt.token_ids) for prompt in prompts),
        sum(choice.num_tokens for choice in choices),
        sum(choice.num_cached_tokens for choice in choices[::n]),
    )
