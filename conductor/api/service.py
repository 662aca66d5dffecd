"""gRPC for clients: `Inference` of protos/inference.proto.

A message becomes a request by the same rules as an HTTP body (`options.py`, `prompt.py`);
here are only the names. The call's deadline becomes the request's, and its cancellation
closes the generator, which cancels the request on the nodes. Errors are raised, and
`base/rpc.py` sends them.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from operator import attrgetter
from typing import Any

import grpc

from base.errors import InvalidRequestError, invalid
from base.message_bounds import FREE_BYTES, MAX_NUMBERS, parsed
from base.off_loop import on_body
from base.request import SAMPLING_FIELDS, Grammar, GrammarKind, SamplingParams, Slo
from base.rpc import Service
from conductor.api.access import Authorizer, metadata
from conductor.api.completion import Completions
from conductor.api.embeddings.batch import EmbeddingBatch, Input, Wanted, num_dimensions
from conductor.api.embeddings.generation import MAX_INPUTS
from conductor.api.grammar_fields import MAX_CHOICE_TEXTS, choice_grammar
from conductor.api.grpc_chat import Conversation, conversation
from conductor.api.grpc_generation import Generation
from conductor.api.headers import Caller
from conductor.api.openai_schema import MAX_CHOICES
from conductor.api.openai_tools import MAX_TOOL_CALLS, MAX_TOOLS
from conductor.api.options import (
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Options,
    check_options,
    check_prompt_logprobs,
    check_request_id,
    make_request,
    params_spelled,
    require_model,
    unique_id,
)
from conductor.api.prompt import text_token_ids, token_ids_text
from conductor.api.turn import ChatTurn, call_ids, prepare_turn, with_turn, without_thinking
from protos import inference_pb2, inference_pb2_grpc

NAME = "conductor.v1.Inference"

_FIELD_OF = {
    **{name: f"sampling.{name}" for name in SamplingParams._fields},
    "max_tokens": "stop.max_tokens",
    "min_tokens": "stop.min_tokens",
    "stop": "stop.strings",
    "stop_token_ids": "stop.token_ids",
    "logprobs": "num_logprobs",
    "messages": "chat.messages",
    "tools": "chat.tools",
    "tool_choice": "chat.tool_choice",
    "chat_template_kwargs": "chat.chat_template_kwargs",
}
MAX_ELEMENTS = {
    "token_ids.ids": MAX_NUMBERS,
    "chat.messages": MAX_MESSAGES,
    "chat.messages.tool_calls": MAX_TOOL_CALLS,
    "chat.tools": MAX_TOOLS,
    "chat.tool_choice.names": MAX_TOOLS,
    "sampling.logit_bias": MAX_LOGIT_BIASES,
    "sampling.grammar.choices.texts": MAX_CHOICE_TEXTS,
    "stop.strings": MAX_STOP_STRINGS,
    "stop.token_ids": MAX_STOP_TOKEN_IDS,
}
"""The bound of each list and map of a request. Token ids have the context window for a bound as well."""
_SLO_FIELDS = ("ttft_s", "tbt_s", "longest_gap_s")
"""The fields of a message's bounds, in the order of `Slo`."""
_PROMPT_FIELD_OF = {"text": "text", "token_ids": "token_ids.ids", "chat": "chat.messages", None: "input"}


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Answers clients. Owned by the event loop."""

    def __init__(
        self, completions: Completions, default_slo: Slo, rng: random.Random, authorizer: Authorizer
    ) -> None:
        self._authorizer = authorizer
        self._completions = completions
        self._model = completions.model
        self._default_slo = default_slo
        self._rng = rng

    def service(self) -> Service:
        add = partial(inference_pb2_grpc.add_InferenceServicer_to_server, self)
        return Service(NAME, add, takes_bytes=True)

    async def Generate(  # type: ignore[override]  # noqa: N802
        self,
        data: bytes,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        said = metadata(context)
        with self._authorizer.client(said) as client, self._completions.call(client) as call:
            call.take_bytes(len(data))
            caller = call.caller(said, self._default_slo, context.time_remaining())
            generation = await self._generation(data, caller)
            async with aclosing(generation.responses()) as responses:
                async for response in responses:
                    call.answers()
                    yield response

    async def Embed(  # type: ignore[override]  # noqa: N802
        self,
        data: bytes,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[inference_pb2.EmbedResponse, None]:
        said = metadata(context)
        with self._authorizer.client(said) as client, self._completions.call(client) as call:
            call.take_bytes(len(data))
            caller = call.caller(said, self._default_slo, context.time_remaining())
            message, inputs = await on_body(data, _embed_request)
            check_request_id(message.request_id)
            require_model(self._model, message.model or None)
            caller = _with_slo(caller, message.slo)
            request_id = message.request_id or f"{self._rng.getrandbits(64):016x}"
            asked = message.dimensions if message.HasField("dimensions") else None
            wanted = Wanted(
                inputs,
                num_dimensions(self._model, asked, len(inputs)),
                Options(max_tokens=1, priority=message.priority, cache_salt=message.cache_salt),
                True,
                lambda place: f"inputs[{place}]",
            )
            name = unique_id(request_id, self._rng)
            batch = EmbeddingBatch(self._completions, wanted, caller, name, self._rng)
            await batch.run()
            call.answers()
            for place, vector in enumerate(batch.vectors):
                await batch.turn()
                response = inference_pb2.EmbedResponse(
                    request_id=request_id, index=place, embedding=array("f", vector)
                )
                if place == len(inputs) - 1:
                    response.usage.prompt_tokens = batch.num_tokens
                    response.usage.cached_tokens = batch.num_cached_tokens
                yield response

    async def ListModels(  # type: ignore[override]  # noqa: N802
        self,
        data: bytes,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> inference_pb2.ListModelsResponse:
        await on_body(data, partial(parsed, kind=inference_pb2.ListModelsRequest))
        model = inference_pb2.Model(id=self._model.name, max_model_len=self._model.max_model_len)
        return inference_pb2.ListModelsResponse(models=[model])

    async def _generation(self, data: bytes, caller: Caller) -> Generation:
        """Return what a message asks for; raises ServeError."""
        spelled = _FIELD_OF.copy()
        with params_spelled(spelled):
            message, prompt, options = await on_body(data, _said)
            spelled["prompt"] = _PROMPT_FIELD_OF[message.WhichOneof("input")]
            check_request_id(message.request_id)
            require_model(self._model, message.model or None)
            caller = _with_slo(caller, message.slo)
            check_options(options, caller, self._model)
            num_choices = message.n or 1
            if num_choices > MAX_CHOICES:
                raise invalid("n", f"at most {MAX_CHOICES} choices")
            caller.charge(num_choices - 1)
            turn = echo = None
            num_calls = 0
            if isinstance(prompt, Conversation):
                turn = await self._turn(prompt, message, options)
                token_ids, options = turn.token_ids, with_turn(options, turn)
                num_calls = prompt.num_calls
            elif prompt is None:
                raise InvalidRequestError("one of text, token_ids and chat is wanted", "input")
            else:
                token_ids, echo = await self._shown_prompt(message, prompt, options)
            request_id = message.request_id or f"{self._rng.getrandbits(64):016x}"
            unique = unique_id(request_id, self._rng)
            asked = make_request(unique, token_ids, options, caller, self._model, self._rng)
        call_id = call_ids(self._model.family, self._rng, num_calls)
        turn = turn if turn is not None and turn.form is not None else None
        return Generation(self._completions, asked, num_choices, request_id, turn, call_id, echo)

    async def _turn(
        self, talk: Conversation, message: inference_pb2.GenerateRequest, options: Options
    ) -> ChatTurn:
        turn = await prepare_turn(
            self._model,
            talk.messages,
            talk.tools,
            talk.reasoning,
            talk.variables,
            talk.add_generation_prompt,
            message.parse_special_tokens,
        )
        return without_thinking(self._model, turn) if options.grammar is not None else turn

    async def _shown_prompt(
        self, message: inference_pb2.GenerateRequest, prompt: str | tuple[int, ...], options: Options
    ) -> tuple[tuple[int, ...], str | None]:
        """Return a prompt's token ids, and the text that is shown of it; None: nothing."""
        text = prompt
        if isinstance(prompt, str):
            adds_special = not message.HasField("add_special_tokens") or message.add_special_tokens
            token_ids = await text_token_ids(self._model, prompt, adds_special)
        else:
            token_ids = prompt
        if not message.echo or len(token_ids) >= self._model.max_model_len:  # of which no request is made
            return token_ids, None
        if options.prompt_logprobs is not None:
            check_prompt_logprobs(len(token_ids), options.prompt_logprobs)
        if not isinstance(text, str):
            text = await token_ids_text(self._model, token_ids, "prompt", options.skip_special_tokens)
        return token_ids, text


Prompt = str | tuple[int, ...] | Conversation | None


def _said(data: bytes) -> tuple[inference_pb2.GenerateRequest, Prompt, Options]:
    """Read a message, its prompt and choices; raises InvalidRequestError and DecodeError.

    To make a text or a tuple of a field is as much work as to parse it, so all of it is done here, once, and
    of a long message off the event loop.
    """
    message = parsed(data, inference_pb2.GenerateRequest)
    if len(data) > FREE_BYTES:
        _check_lists(message)
    prompt: Prompt = None
    match message.WhichOneof("input"):
        case "text":
            prompt = message.text
        case "token_ids":
            prompt = tuple(message.token_ids.ids)
        case "chat":
            if message.echo:
                raise invalid("echo", "the prompt of a chat is not shown")
            prompt = conversation(message.chat)
    return message, prompt, _options(message)


def _embed_request(data: bytes) -> tuple[inference_pb2.EmbedRequest, list[Input]]:
    """Read a message and its inputs; raises InvalidRequestError and DecodeError."""
    message = parsed(data, inference_pb2.EmbedRequest)
    if not 1 <= len(message.inputs) <= MAX_INPUTS:
        raise invalid("inputs", f"between 1 and {MAX_INPUTS} are wanted, not {len(message.inputs)}")
    inputs: list[Input] = []
    for place, given in enumerate(message.inputs):
        match given.WhichOneof("input"):
            case "text":
                inputs.append(given.text)
            case "token_ids":
                inputs.append(array("I", given.token_ids.ids))
            case _:
                raise invalid(f"inputs[{place}]", "one of text and token_ids is wanted")
    return message, inputs


def _check_lists(message: inference_pb2.GenerateRequest) -> None:
    """Raise InvalidRequestError, naming the field, for a list that is too long, before it is read."""
    for name, limit in MAX_ELEMENTS.items():
        if name == "chat.messages.tool_calls":
            continue  # each message has a list: `conversation` counts them
        count = len(attrgetter(name)(message))
        if count > limit:
            raise invalid(name, f"at most {limit} elements, not {count}")


def _options(message: inference_pb2.GenerateRequest) -> Options:
    sampling, stop = message.sampling, message.stop
    max_tokens = stop.max_tokens if stop.HasField("max_tokens") else None
    logprobs = message.num_logprobs if message.HasField("num_logprobs") else None
    return Options(
        sampling={name: getattr(sampling, name) for name in SAMPLING_FIELDS if sampling.HasField(name)},
        logit_bias=dict(sampling.logit_bias),
        grammar=_grammar(sampling) if sampling.HasField("grammar") else None,
        grammar_param="sampling.grammar",
        max_tokens=1 if _is_prompt_alone(message) else max_tokens,
        min_tokens=stop.min_tokens,
        stop=tuple(stop.strings),
        stop_token_ids=tuple(stop.token_ids),
        ignore_eos=stop.ignore_eos,
        include_stop=stop.include_stop_str_in_output,
        skip_special_tokens=not message.HasField("skip_special_tokens") or message.skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs if message.echo else None,
        is_prompt_alone=_is_prompt_alone(message),
        priority=message.priority,
        cache_salt=message.cache_salt,
    )


def _is_prompt_alone(message: inference_pb2.GenerateRequest) -> bool:
    """Return whether the prompt is to be shown, and no more."""
    return message.echo and message.stop.HasField("max_tokens") and not message.stop.max_tokens


def _grammar(sampling: inference_pb2.Sampling) -> Grammar | None:
    given = sampling.grammar
    match given.WhichOneof("form"):
        case "json_schema":
            return Grammar(GrammarKind.JSON_SCHEMA, given.json_schema)
        case "regex":
            return Grammar(GrammarKind.REGEX, given.regex)
        case "lark":
            return Grammar(GrammarKind.LARK, given.lark)
        case "choices":
            return choice_grammar(list(given.choices.texts), "grammar.choices").grammar
        case _:
            raise invalid("grammar", "one of json_schema, regex, lark and choices is wanted")


def _with_slo(caller: Caller, given: inference_pb2.Slo) -> Caller:
    """Return a caller with the message's bounds, where it has some; a deadline bounds TTFT too."""
    bounds = [
        getattr(given, name) if given.HasField(name) else bound_s
        for name, bound_s in zip(_SLO_FIELDS, caller.slo, strict=True)
    ]
    for name, bound_s in zip(_SLO_FIELDS, bounds, strict=True):
        if not bound_s > 0:
            raise invalid(f"slo.{name}", "seconds above 0 are wanted")
    if caller.deadline_s is not None:
        bounds[0] = min(bounds[0], max(caller.deadline_s, 0.0))
    return caller._replace(slo=Slo(*bounds))
