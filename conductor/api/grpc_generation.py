"""The choices of one `Generate` call, as the responses that bring them.

Of several choices the first goes ahead, as over HTTP, and the others match the KV of its prompt. Responses
come as tokens do, each with the index of its choice. What is shown of the prompt comes once, before the
first choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from base.prompt_logprobs import PromptLogprobs
from base.request import FinishReason, SampledToken
from base.together import merged
from conductor.api.completion import PART_UNITS, Completions, Piece
from conductor.api.options import TextRequest
from conductor.api.parsing.events import Called, Said, Thought
from conductor.api.turn import ChatTurn, answer_to
from protos import inference_pb2 as pb

PART_CHARS = 1 << 16
"""Characters of a prompt after which its next part begins: clients take messages of 4 MB."""
PART_TOKENS = 1 << 14


class Generation:
    """The choices of a call. Owned by the event loop."""

    def __init__(
        self,
        completions: Completions,
        asked: TextRequest,
        num_choices: int,
        request_id: str,
        turn: ChatTurn | None,
        call_id: Callable[[str, int], str],
        echo: str | None,
    ) -> None:
        """Begin. `asked`: the request of all choices, which the client calls `request_id`.

        `turn`, None: the answer is text and no more; `echo`: the prompt's text, where it is shown. `call_id`
        names a call by its tool and its number.
        """
        self._completions, self._asked, self._request_id = completions, asked, request_id
        self._num_choices, self._turn, self._call_id, self._echo = num_choices, turn, call_id, echo
        self._num_left = num_choices
        self._num_tokens = self._num_cached_tokens = 0
        self._num_reasoning_tokens: dict[int, int] = {}

    def responses(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Return what yields them, and raises ServeError. Consume under `aclosing`: closing cancels."""
        prefilled = asyncio.Event()
        if self._num_choices == 1:
            return self._choice(0, self._asked, prefilled)
        choices = range(self._num_choices)
        return merged(self._choice(index, self._asked.choice(index), prefilled) for index in choices)

    async def _choice(
        self, index: int, asked: TextRequest, prefilled: asyncio.Event
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yield one choice; the first says when the others may begin."""
        if index:
            await prefilled.wait()
        num_calls = 0
        async with aclosing(answer_to(self._turn, self._completions, asked)) as pieces:
            async for piece in pieces:
                if not prefilled.is_set():
                    prefilled.set()
                    if (echo := self._echo) is not None:
                        async with aclosing(self._shown_prompt(echo, piece.prompt_logprobs)) as shown:
                            async for response in shown:
                                yield response
                response = self._response(index, piece)
                if self._turn is not None:
                    num_calls = self._take_apart(piece, response, num_calls)
                    self._num_reasoning_tokens[index] = piece.num_reasoning_tokens
                if piece.finish_reason is not None:
                    self._finish(response)
                yield response

    def _take_apart(self, piece: Piece, response: pb.GenerateResponse, num_calls: int) -> int:
        """Write a piece's events into its response; return how many calls there are, after `num_calls`."""
        response.text = "".join(event.text for event in piece.events if isinstance(event, Said))
        response.reasoning = "".join(event.text for event in piece.events if isinstance(event, Thought))
        for call in (event for event in piece.events if isinstance(event, Called)):
            call_id = self._call_id(call.name, num_calls)
            response.tool_calls.add(id=call_id, name=call.name, arguments=call.arguments)
            num_calls += 1
        if num_calls and piece.finish_reason is FinishReason.STOP:
            response.finish_reason = "tool_calls"
        return num_calls

    async def _shown_prompt(
        self, text: str, logprobs: PromptLogprobs | None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        token_ids = self._asked.request.token_ids
        num_top = self._asked.request.num_prompt_logprobs or 0
        count = max(1, PART_UNITS // (1 + num_top)) if logprobs is not None else PART_TOKENS
        for at in range(max(-(-len(text) // PART_CHARS), -(-len(token_ids) // count))):
            await self._completions.turn(PART_UNITS)
            begin, end = at * count, min((at + 1) * count, len(token_ids))
            tokens = () if logprobs is None else logprobs.tokens(token_ids, begin, end)
            prompt = pb.Prompt(
                text=text[at * PART_CHARS : (at + 1) * PART_CHARS],
                token_ids=token_ids[begin:end],
                logprobs=map(_logprobs, tokens),
            )
            yield pb.GenerateResponse(request_id=self._request_id, prompt=prompt)

    def _response(self, index: int, piece: Piece) -> pb.GenerateResponse:
        """Return what brings a piece, and count it."""
        self._num_tokens += len(piece.tokens)
        if not index:
            self._num_cached_tokens = piece.num_cached_tokens
        return pb.GenerateResponse(
            request_id=self._request_id,
            index=index,
            text=piece.text,
            token_ids=[token.token_id for token in piece.tokens],
            logprobs=[_logprobs(token) for token in piece.tokens if token.logprobs is not None],
            finish_reason="" if piece.finish_reason is None else piece.finish_reason.value,
        )

    def _finish(self, response: pb.GenerateResponse) -> None:
        """Write the usage of all choices on the last response."""
        self._num_left -= 1
        if self._num_left:
            return
        usage = response.usage
        usage.prompt_tokens = len(self._asked.request.token_ids)
        usage.completion_tokens = self._num_tokens
        usage.cached_tokens = self._num_cached_tokens
        usage.reasoning_tokens = sum(self._num_reasoning_tokens.values())


def _logprobs(token: SampledToken) -> pb.TokenLogprobs:
    """Return what is known of a token; nothing of the first of a prompt."""
    logprobs = token.logprobs
    if logprobs is None:
        return pb.TokenLogprobs()
    return pb.TokenLogprobs(
        sampled=pb.TokenLogprob(token_id=token.token_id, logprob=logprobs.logprob),
        top=[pb.TokenLogprob(token_id=item, logprob=value) for item, value in logprobs.top],
    )
