"""Text requests at work: from the tokens of the nodes to the pieces of text that clients are sent.

Every API for clients uses one `Completions`. It knows the calls in progress, which a drain waits for, and
keeps the books that a client would keep: arrival to first token, to last token, how it ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from math import inf
from types import TracebackType
from typing import NamedTuple

from base.alarm import Alarm
from base.clock import Clock
from base.errors import (
    DeadlineError,
    LostError,
    ProtocolError,
    RejectedError,
    ServeError,
    SloUnreachableError,
    UnavailableError,
)
from base.metrics import ConductorMetrics
from base.prompt_logprobs import PromptLogprobs
from base.request import FinishReason, SampledToken, Slo
from base.turns import TurnBudget
from conductor.api.access import Client
from conductor.api.grammar_checker import GrammarChecker
from conductor.api.headers import Caller, header_slo, header_traceparent
from conductor.api.options import TextRequest
from conductor.api.parsing.events import Event
from conductor.api.served_model import ServedModel
from conductor.api.shares import Shares
from conductor.api.text_stream import TextStream
from conductor.api.tokenizer import Detokenizer
from conductor.serving.generated import Consuming, EnoughError, Generated, TokenGenerator, enough

MAX_BODIES = 32
"""Bodies of the greatest length whose bytes may be held at once; shorter ones may be more."""

# A unit of work is one sampled token, or a likely one beside it: some 7 us of the event loop.
PROMPT_UNITS = 10
TOKENS_OF_A_UNIT = 200
"""Tokens of a prompt whose hashes take one unit."""
BIASES_OF_A_UNIT = 4
"""Logit biases that take one unit to send to two nodes."""
PIECE_UNITS = 4
PART_UNITS = 500
"""Tokens of one sequence that take more units become several pieces, and those of a prompt several parts."""


class Piece(NamedTuple):
    """A part of one answer, sent as one event."""

    text: str
    """New text; empty where it is held back, or there is none."""
    tokens: tuple[SampledToken, ...]
    """The piece's tokens, with those that end the answer, whose text is left out."""
    finish_reason: FinishReason | None
    """STOP or LENGTH in the last piece, and only there."""
    num_cached_tokens: int
    stopped_by: str = ""
    """The stop string that ended the answer, if one did."""
    prompt_logprobs: PromptLogprobs | None = None
    """None but in the first piece, and where they were not asked for."""
    events: Sequence[Event] = ()
    """The reasoning, text and calls in it, where the answer is taken apart (`turn.py`)."""
    num_reasoning_tokens: int = 0
    """Tokens of reasoning in the answer so far, where it is taken apart."""
    inserted: tuple[int, ...] = ()
    """Tokens that stand before the piece's, and that no node sampled: the mark that closes reasoning."""
    is_cut: bool = False
    """Whether the tokens say more than the events: calls after the first, where one alone is wanted."""

    def of_prompt_alone(self) -> Piece:
        """Return the one piece of an answer that is its prompt and no more."""
        return self._replace(text="", tokens=(), finish_reason=FinishReason.LENGTH)


def _cut_off() -> UnavailableError:
    return UnavailableError("the conductor is shutting down, and the answer is cut off")


def _not_read() -> DeadlineError:
    return DeadlineError("the client took longer than server.request_timeout_s to read its answer")


class InProgress:
    """A client's call, for the length of a `with`: its places, one for each choice, and its body's bytes."""

    def __init__(self, completions: Completions, client: Client) -> None:
        self._completions = completions
        self._client = client
        self._num_places = self._num_bytes = 0
        self.arrived_at_s = completions.clock.now_s()
        self._alarm = Alarm(_cut_off)
        self._is_over = False
        self._reading: asyncio.TimerHandle | None = None

    def __enter__(self) -> InProgress:
        self.take_places(1)
        self._completions.began(self)
        self._alarm.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        if self._reading is not None:
            self._reading.cancel()
        self._completions.places.give_back(self._client.tenant, self._num_places)
        self._completions.bodies.give_back(self._client.tenant, self._num_bytes)
        self._completions.ended(self)
        self._alarm.__exit__(kind, error, trace)

    def answers(self) -> None:
        """Take note that the answer begins, which its client has a request's time to read."""
        if self._reading is None and not self._is_over:
            later = asyncio.get_running_loop().call_later
            self._reading = later(self._completions.request_timeout_s, self.cut_off, _not_read)

    def cut_off(self, error: Callable[[], Exception] = _cut_off) -> None:
        """End the call with what `error` makes."""
        if not self._is_over:
            self._is_over = True
            self._alarm.ring(error)

    def caller(self, said: Mapping[str, str], default_slo: Slo, deadline_s: float | None = None) -> Caller:
        """Return who calls, and what `said`, headers or metadata, wishes; raises InvalidRequestError."""

        def charge(count: int) -> None:
            self.take_places(count)
            self._client.charge(count)

        return Caller(
            self.arrived_at_s,
            header_slo(said, default_slo),
            self._client.tenant,
            header_traceparent(said),
            self._client.may_be_critical,
            charge,
            deadline_s,
        )

    def take_places(self, count: int) -> None:
        """Count `count` more sequences; raises RejectedError."""
        places = self._completions.places
        if not places.take(self._client.tenant, count):
            raise RejectedError(
                f"{places.num_taken} of {places.total} sequences are in progress (server.max_waiting), "
                f"and {count} more are not to be had"
            )
        self._num_places += count

    def take_bytes(self, count: int) -> None:
        """Count `count` more bytes of the call's body; raises RejectedError."""
        bodies = self._completions.bodies
        if not bodies.take(self._client.tenant, count):
            raise RejectedError(f"the bodies of calls in progress have {bodies.num_taken} bytes already")
        self._num_bytes += count


class Completions:
    """Runs text requests. Owned by the event loop."""

    def __init__(
        self,
        model: ServedModel,
        dispatcher: TokenGenerator,
        metrics: ConductorMetrics,
        clock: Clock,
        max_calls: int,
        max_body_bytes: int = 8 << 20,
        has_tenants: bool = False,
        request_timeout_s: float = inf,
    ) -> None:
        """Begin with no call.

        Args:
            max_calls: Sequences in progress at most, one for each choice of a call; calls that still
                send their prompt count as one.
            max_body_bytes: The bytes of a body, at most; all together may have `MAX_BODIES` times as many.
            has_tenants: Whether tenants are known by keys: then none may take all.
            request_timeout_s: The time from an answer's first byte, after which its call ends.
        """
        self.model = model
        self.metrics = metrics
        self.clock = clock
        self._dispatcher = dispatcher
        self.grammars = GrammarChecker(model.folder, model.vocab_size)
        self.request_timeout_s = request_timeout_s
        self.places = Shares(max_calls, has_tenants)
        self.bodies = Shares(MAX_BODIES * max_body_bytes, has_tenants)
        self._turns = TurnBudget()
        self._is_draining = False
        self._calls: set[InProgress] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_ready(self) -> bool:
        """Whether a call that comes now would be served."""
        return self._dispatcher.is_ready and not self._is_draining

    def call(self, client: Client) -> InProgress:
        """Return a client's call, to be entered, which counts it.

        Raises UnavailableError when draining; on entering, RejectedError where too much is in progress, or
        too much of this tenant's.
        """
        if self._is_draining:
            raise UnavailableError("the conductor is shutting down")
        return InProgress(self, client)

    def began(self, call: InProgress) -> None:
        self._calls.add(call)
        self._idle.clear()

    def ended(self, call: InProgress) -> None:
        self._calls.discard(call)
        if not self._calls:
            self._idle.set()

    def drain(self) -> None:
        """Take no more calls; those in progress go on."""
        self._is_draining = True

    def cut_off(self) -> None:
        """End the calls in progress, with UnavailableError: no time is left for them."""
        for call in self._calls:
            call.cut_off()

    async def wait_idle(self) -> None:
        """Return when no call is in progress."""
        await self._idle.wait()

    async def generate(self, asked: TextRequest) -> AsyncGenerator[Piece, None]:
        """Yield the answer. Consume under `contextlib.aclosing`: closing cancels; `enough` does not.

        Raises:
            ServeError: any of its kinds, before the first piece or between two.
        """
        if asked.request.sampling.grammar is not None:
            asked = await self._checked(asked)
        request, options = asked.request, asked.options
        num_biases = len(request.sampling.logit_bias)
        await self.turn(
            PROMPT_UNITS + len(request.token_ids) // TOKENS_OF_A_UNIT + num_biases // BIASES_OF_A_UNIT
        )
        detokenizer = Detokenizer(self.model.tokenizer, options.skip_special_tokens, options.kept_token_ids)
        token_units = 1 + (request.num_logprobs or 0)
        most = PART_UNITS // token_units
        stream = TextStream(detokenizer, options.stop, options.include_stop, request.stop.min_tokens)
        with _Book(asked, self.metrics, self.clock) as book:
            async with Consuming(self._dispatcher.generate(request)) as generated:
                async for whole in generated:
                    for part in _parts(whole, most):
                        await self.turn(PIECE_UNITS + len(part.tokens) * token_units)
                        piece = _to_text(part, asked, stream)
                        if part.prompt_logprobs is not None:
                            piece = piece._replace(prompt_logprobs=part.prompt_logprobs)
                        if options.is_prompt_alone:
                            piece = piece.of_prompt_alone()
                        book.add(piece)
                        if piece.finish_reason is not None and whole.finish_reason is None:
                            await enough(generated)  # now: a client may take its time to read the piece
                        yield piece
                        if piece.finish_reason is not None:
                            return
            raise ProtocolError("the tokens ended without a finish reason")

    async def embed(self, asked: TextRequest) -> tuple[bytes, int]:
        """Return the vector of a request that wants one, and how many tokens of its prompt were cached.

        The vector is float32, as the model made it. Raises ServeError. Cancelling cancels.
        """
        request = asked.request
        await self.turn(PROMPT_UNITS + len(request.token_ids) // TOKENS_OF_A_UNIT)
        with _Book(asked, self.metrics, self.clock) as book:
            async with aclosing(self._dispatcher.generate(request)) as generated:
                async for whole in generated:
                    if whole.embedding is None:
                        break
                    book.embedded(whole.num_cached_tokens)
                    return whole.embedding, whole.num_cached_tokens
            raise ProtocolError("no vector came of the prompt")

    async def _checked(self, asked: TextRequest) -> TextRequest:
        """Return a request with its grammar as nodes are to have it; raises ServeError."""
        sampling = asked.request.sampling
        assert sampling.grammar is not None
        grammar = await self.grammars.checked(sampling.grammar, asked.options.grammar_param)
        return asked._replace(request=asked.request._replace(sampling=sampling._replace(grammar=grammar)))

    async def turn(self, units: int) -> None:
        """Return when the event loop has time for so much work."""
        if not self._turns.take(units):
            await self._turns.later(units)


def _parts(whole: Generated, most: int) -> list[Generated]:
    """Return `whole` in parts of at most `most` tokens."""
    tokens = whole.tokens
    if len(tokens) <= most:
        return [whole]
    parts = []
    for begin in range(0, len(tokens), most):
        is_last = begin + most >= len(tokens)
        reason = whole.finish_reason if is_last else None
        prompt_logprobs = None if begin else whole.prompt_logprobs
        part = tokens[begin : begin + most]
        parts.append(Generated(part, reason, whole.num_cached_tokens, prompt_logprobs))
    return parts


def _to_text(part: Generated, asked: TextRequest, stream: TextStream) -> Piece:
    """Return the text of `part`, cut where a stop string is complete."""
    if part.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
        raise LostError(f"the sequence ended with {part.finish_reason.value}")
    text, include_stop = "", asked.options.include_stop
    for count, token in enumerate(part.tokens, start=1):
        is_end = count == len(part.tokens) and part.finish_reason is FinishReason.STOP
        # The token that stops the sequence is no part of its text.
        if include_stop or not (is_end and token.token_id in asked.request.stop.stop_token_ids):
            text += stream.push(token.token_id)
        if stream.is_stopped:
            tokens = part.tokens[:count]
            return Piece(text, tokens, FinishReason.STOP, part.num_cached_tokens, stream.stopped_by)
    reason = part.finish_reason
    if reason is not None:
        text += stream.finish()
        reason = FinishReason.STOP if stream.is_stopped else reason
    return Piece(text, part.tokens, reason, part.num_cached_tokens, stream.stopped_by)


class _Book:
    """The account of one sequence in the metrics, for the length of a `with`."""

    def __init__(self, asked: TextRequest, metrics: ConductorMetrics, clock: Clock) -> None:
        self._request = asked.request
        self._is_prompt_alone = asked.options.is_prompt_alone
        self._metrics = metrics
        self._clock = clock
        self._first_at_s = 0.0
        self._num_tokens = 0
        self._outcome = "cancelled"
        self._is_over = False
        """Whether the last token is in it."""

    def __enter__(self) -> _Book:
        self._metrics.running.inc()
        if self._request.pooling is None:
            self._metrics.ttft_part["frontend"].observe(self._clock.now_s() - self._request.arrived_at_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ServeError):
            self._fail(error)
        elif isinstance(error, EnoughError) and not self._is_over:
            self._end(FinishReason.STOP)
        self._metrics.running.dec()
        self._metrics.sequences.labels(self._outcome).inc()

    def add(self, piece: Piece) -> None:
        metrics, num_tokens = self._metrics, len(piece.tokens)
        if not self._num_tokens and (num_tokens or self._is_prompt_alone):
            self._first_at_s = self._clock.now_s()
            metrics.ttft.observe(self._first_at_s - self._request.arrived_at_s)
            self._add_prompt(piece.num_cached_tokens)
        self._num_tokens += num_tokens
        metrics.generation_tokens.inc(num_tokens)
        if piece.finish_reason is not None:
            self._end(piece.finish_reason)

    def embedded(self, num_cached_tokens: int) -> None:
        """Note the vector, which is due when a first token would be."""
        seconds = self._clock.now_s() - self._request.arrived_at_s
        self._add_prompt(num_cached_tokens)
        self._metrics.embedding_seconds.observe(seconds)
        self._outcome = FinishReason.STOP.value
        if seconds > self._request.slo.ttft_slo_s:
            self._metrics.slo_misses.labels("ttft").inc()
        else:
            self._metrics.good_sequences.inc()

    def _add_prompt(self, num_cached_tokens: int) -> None:
        num_prompt_tokens = len(self._request.token_ids)
        self._metrics.prompt_tokens.inc(num_prompt_tokens)
        self._metrics.request_prompt_tokens.observe(num_prompt_tokens)
        self._metrics.cached_tokens.inc(num_cached_tokens)

    def _fail(self, error: ServeError) -> None:
        self._outcome = type(error).__name__
        if isinstance(error, RejectedError):
            reason = "slo" if isinstance(error, SloUnreachableError) else "capacity"
            self._metrics.rejections.labels(reason).inc()
            self._metrics.rejection_seconds.observe(self._clock.now_s() - self._request.arrived_at_s)

    def _end(self, reason: FinishReason) -> None:
        self._outcome, self._is_over = reason.value, True
        now_s, arrived_at_s, slo = self._clock.now_s(), self._request.arrived_at_s, self._request.slo
        self._metrics.request_seconds.observe(now_s - arrived_at_s)
        self._metrics.request_generation_tokens.observe(self._num_tokens)
        if self._num_tokens > 1:
            self._metrics.request_tbt.observe((now_s - self._first_at_s) / (self._num_tokens - 1))
        is_first_late = self._first_at_s - arrived_at_s > slo.ttft_slo_s
        are_next_late = now_s - self._first_at_s > slo.tbt_slo_s * max(1, self._num_tokens - 1)
        if is_first_late:
            self._metrics.slo_misses.labels("ttft").inc()
        if are_next_late:
            self._metrics.slo_misses.labels("tbt").inc()
        if not (is_first_late or are_next_late):
            self._metrics.good_sequences.inc()
