"""One turn of an assistant, for every API that has conversations: a prompt, and the parts of its answer.

    messages, tools -> token ids        by the model's chat template
    pieces of text  -> parts            by the parser of the model's family, or of demanded calls

Reasoning that exceeds its budget is ended here: the request ends, and another goes on from its tokens and the
mark that closes reasoning, whose prompt the nodes have already.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from base.errors import InvalidRequestError, invalid
from base.off_loop import off_loop
from base.request import MAX_GRAMMAR_CHARS, FinishReason, Grammar, GrammarKind, RequestId
from conductor.api.chat_template import ChatMessage, ToolSpec
from conductor.api.completion import Completions, Piece
from conductor.api.options import Options, TextRequest
from conductor.api.parsing.answer import AnswerParser, Form
from conductor.api.parsing.events import Called, Event, Said, Thought
from conductor.api.parsing.families import FORMS
from conductor.api.parsing.forced import DEMANDED, demanded_schema
from conductor.api.prompt import MANY_CHARS_A_TOKEN, chat_token_ids
from conductor.api.served_model import ServedModel
from conductor.api.tokenizer import Detokenizer
from conductor.api.tool_prompt import FAMILY
from conductor.serving.generated import enough

TAIL_TOKENS = 24
"""The end of a prompt that shows whether it opens reasoning."""


class Tools(NamedTuple):
    """The tools of a turn, and which the model may or must call."""

    offered: tuple[ToolSpec, ...] = ()
    demanded: tuple[str, ...] = ()
    """Names of which one must be called; none: the model decides."""
    is_parallel: bool = True
    """Whether there may be several calls."""


class Reasoning(NamedTuple):
    """The wishes of a client about reasoning."""

    is_shown: bool = True
    budget_tokens: int | None = None
    """Tokens of reasoning at most; 0: none. None: as many as the model likes."""
    variables: Mapping[str, Any] = {}
    """The chat template's variables for them."""


_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ChatTurn:
    """A turn's prompt, and how its answer is taken apart."""

    token_ids: tuple[int, ...]
    form: Form | None
    """How the answer is taken apart; None: it is text and no more."""
    tools: Tools
    reasoning: Reasoning
    is_thinking: bool
    """Whether the prompt ends within reasoning."""
    kept_token_ids: frozenset[int] = frozenset()
    grammar_source: str | None = None
    """JSON schema of the calls that are demanded."""

    def parser(self) -> AnswerParser:
        assert self.form is not None
        schemas = {tool.name: tool.parameters for tool in self.tools.offered}
        return AnswerParser(self.form, schemas, self.is_thinking)


async def prepare_turn(
    model: ServedModel,
    messages: Sequence[ChatMessage],
    tools: Tools,
    reasoning: Reasoning,
    variables: Mapping[str, Any] | None,
    add_generation_prompt: bool = True,
    parse_special_tokens: bool = False,
    token_ids: tuple[int, ...] | None = None,
) -> ChatTurn:
    """Return the turn that answers a conversation; raises InvalidRequestError.

    The template's `variables` go before those that `reasoning` names; `token_ids`: the prompt, where known.
    """
    if token_ids is None:
        given = {**reasoning.variables, **(variables or {})}
        token_ids = await chat_token_ids(
            model, messages, add_generation_prompt, given, parse_special_tokens, tools.offered
        )
    form = _form(model, tools)
    is_thinking = False
    if form is not None and form.think is not None:
        tail = model.tokenizer.decode(token_ids[-TAIL_TOKENS:], skip_special_tokens=False)
        is_thinking = tail.rstrip().endswith(form.think[0])
    turn = ChatTurn(token_ids, form, tools, reasoning, is_thinking)
    if tools.demanded or reasoning.budget_tokens == 0:
        turn = without_thinking(model, turn)
    if tools.demanded:
        schemas = {tool.name: tool.parameters for tool in tools.offered if tool.name in tools.demanded}
        num_chars = MANY_CHARS_A_TOKEN * len(token_ids)  # the schemas are in the prompt
        source = await off_loop(num_chars, partial(demanded_schema, schemas, tools.is_parallel))
        return replace(turn, form=DEMANDED, grammar_source=source)
    if form is None:
        return turn
    return replace(turn, kept_token_ids=model.tokenizer.specials_within(form.marks))


def without_thinking(model: ServedModel, turn: ChatTurn) -> ChatTurn:
    """Return a turn in which reasoning that the prompt opens is closed at once: what follows is none."""
    if turn.form is None or not turn.is_thinking:
        return turn
    closed = (*turn.token_ids, *_stop_thinking(model, turn.form))
    return replace(turn, token_ids=closed, is_thinking=False)


def _form(model: ServedModel, tools: Tools) -> Form | None:
    """Return how the model's answers are taken apart; None where they are text alone."""
    form = FORMS.get(model.family)
    if tools.offered:
        return form if form is not None and model.has_tools else FORMS[FAMILY]
    if form is None or not (form.run or (form.think and model.thinks)):
        return None
    return form if form.run else replace(form, calls={}, bare=None, ends_thinking=())


def _stop_thinking(model: ServedModel, form: Form) -> tuple[int, ...]:
    return model.tokenizer.encode(form.stop_thinking, add_special_tokens=False)


def answer_to(
    turn: ChatTurn | None, completions: Completions, asked: TextRequest
) -> AsyncGenerator[Piece, None]:
    """Return what yields the answer to a turn, with its events, or to a prompt that is none."""
    return completions.generate(asked) if turn is None else taken_apart(completions, turn, asked)


async def taken_apart(
    completions: Completions, turn: ChatTurn, asked: TextRequest
) -> AsyncGenerator[Piece, None]:
    """Yield the answer to a turn, with its events. Consume under `contextlib.aclosing`.

    Raises ServeError: any of its kinds, before the first piece or between two.
    """
    if turn.form is None:
        async with aclosing(completions.generate(asked)) as pieces:
            async for piece in pieces:
                yield piece._replace(events=[Said(piece.text)]) if piece.text else piece
        return
    state = _Answer(turn)
    while True:
        async with aclosing(completions.generate(asked)) as pieces:
            async for piece in pieces:
                piece = state.taken_apart(piece)
                if state.is_spent and piece.finish_reason is None:
                    break
                if piece.is_cut:
                    await enough(pieces)
                yield piece
                if piece.finish_reason is not None:
                    return
            await enough(pieces)
            yield piece
        inserted = _stop_thinking(completions.model, turn.form)
        events = state.pushed(_held_back(asked, state, completions.model) + turn.form.stop_thinking)
        continued = _continued(asked, state, inserted, completions.model)
        if continued is None:
            yield state.between(FinishReason.LENGTH, [*events, *state.finished()], inserted)
            return
        # Its books are its own: since the call arrived the first request was at work.
        request = continued.request._replace(arrived_at_s=completions.clock.now_s())
        asked = continued._replace(request=request)
        yield state.between(None, events, inserted)
        state.is_spent = False


def _continued(
    asked: TextRequest, state: _Answer, inserted: tuple[int, ...], model: ServedModel
) -> TextRequest | None:
    """Return the request that goes on where reasoning was stopped; None: no token is left for it."""
    request = asked.request
    state.num_stops += 1
    token_ids = (*request.token_ids, *state.token_ids, *inserted)
    spent = len(state.token_ids) + len(inserted)
    left = min(request.stop.max_tokens - spent, model.max_model_len - len(token_ids))
    if left < 1:
        return None
    least = min(max(0, request.stop.min_tokens - spent), left)
    stop = request.stop._replace(max_tokens=left, min_tokens=least)
    return asked._replace(
        request=request._replace(
            request_id=RequestId(f"{request.request_id}-r"), token_ids=token_ids, stop=stop
        )
    )


def _held_back(asked: TextRequest, state: _Answer, model: ServedModel) -> str:
    """Return text of the tokens so far that was not shown: a stop string could have begun with it."""
    options = asked.options
    if not options.stop:
        return ""
    detokenizer = Detokenizer(model.tokenizer, options.skip_special_tokens, options.kept_token_ids)
    return "".join(map(detokenizer.push, state.token_ids))[state.num_chars :]


@dataclass
class _Answer:
    """The state of one answer on its way."""

    turn: ChatTurn
    token_ids: list[int] = field(default_factory=list)
    is_spent: bool = False
    """Whether the budget of reasoning is spent, and reasoning is not at its end."""
    num_stops: int = 0
    num_chars: int = 0
    """Characters of the pieces so far."""
    num_reasoning: int = 0
    num_cached: int = 0
    """Tokens of the turn's prompt that were cached, as its first request had them."""

    def __post_init__(self) -> None:
        self._parser = self.turn.parser()

    def pushed(self, text: str) -> list[Event]:
        return self._shown(self._parser.push(text))

    def finished(self) -> list[Event]:
        """Return what is left of an answer that its limit cuts off."""
        return self._shown(self._parser.finish(is_cut=True))

    def between(self, reason: FinishReason | None, events: list[Event], inserted: tuple[int, ...]) -> Piece:
        """Return the piece that the mark which closes reasoning is, between two requests."""
        empty = Piece("", (), reason, self.num_cached)
        return empty._replace(events=events, num_reasoning_tokens=self.num_reasoning, inserted=inserted)

    def taken_apart(self, piece: Piece) -> Piece:
        """Return a piece with what is certain by it; only the first call of one that is not parallel."""
        if self.num_stops:  # a request that goes on finds what the turn itself has computed
            piece = piece._replace(num_cached_tokens=self.num_cached)
        self.num_cached = piece.num_cached_tokens
        self.num_chars += len(piece.text)
        was_thinking = self._parser.is_thinking
        pushed = self._parser.push(piece.text)
        if was_thinking or self._parser.is_thinking:
            self.num_reasoning += len(piece.tokens)
        else:
            self.num_reasoning += _reasoning_share(piece, pushed)
        events = self._shown(pushed)
        if piece.finish_reason is not None:
            events += self._shown(self._parser.finish(is_cut=piece.finish_reason is FinishReason.LENGTH))
        self.token_ids.extend(token.token_id for token in piece.tokens)
        budget = self.turn.reasoning.budget_tokens
        if budget is not None and not self.num_stops:
            self.is_spent = self._parser.is_thinking and len(self.token_ids) >= max(budget, 1)
        if not self.turn.tools.is_parallel:
            first = next((at for at, event in enumerate(events) if isinstance(event, Called)), None)
            if first is not None:
                events = events[: first + 1]
                piece = piece._replace(finish_reason=FinishReason.STOP, is_cut=True)
        return piece._replace(events=events, num_reasoning_tokens=self.num_reasoning)

    def _shown(self, events: list[Event]) -> list[Event]:
        if self.turn.reasoning.is_shown:
            return events
        return [event for event in events if not isinstance(event, Thought)]


def _reasoning_share(piece: Piece, events: Sequence[Event]) -> int:
    """Return how many of a piece's tokens are reasoning that begins and ends in it, by its characters."""
    num_chars = sum(len(event.text) for event in events if isinstance(event, Thought))
    return math.ceil(len(piece.tokens) * num_chars / max(1, len(piece.text)))


def call_ids(
    family: str, rng: random.Random, num_before: int, prefix: str = "call_"
) -> Callable[[str, int], str]:
    """Return what names the calls of an answer, by the tool's name and the call's number in it.

    Two families were trained on ids of a form of their own, which their templates write into later prompts.
    `num_before`: the calls of earlier turns.
    """
    if family.startswith("kimi"):
        return lambda name, index: f"functions.{name}:{num_before + index}"
    size = 9 if family.startswith("mistral") else 24
    start = "" if size == 9 else prefix
    return lambda name, index: start + "".join(rng.choices(_ID_CHARS, k=size))


def room_for(num_prompt_tokens: int, asked: int, model: ServedModel) -> int:
    """Return how many tokens an answer may have: as many as were asked for, or are left in the window."""
    return max(1, min(asked, model.max_model_len - num_prompt_tokens))


def with_turn(options: Options, turn: ChatTurn) -> Options:
    """Return the options of a request for the answer to a turn; raises InvalidRequestError."""
    if turn.grammar_source is None:
        return options._replace(kept_token_ids=turn.kept_token_ids)
    if options.grammar is not None:
        raise InvalidRequestError(
            f"{options.grammar_param} and tool_choice: an answer has one form; leave one out", "tool_choice"
        )
    if len(turn.grammar_source) > MAX_GRAMMAR_CHARS:
        raise invalid("tool_choice", f"schemas of {MAX_GRAMMAR_CHARS} characters at most can be demanded")
    grammar = Grammar(GrammarKind.JSON_SCHEMA, turn.grammar_source)
    return options._replace(grammar=grammar, grammar_param="tool_choice")
