"""From a request's tokens to the pieces of text that clients are sent.

Every API for clients uses one `Completions`. It knows how many calls it is in the middle
of, which is what a drain waits for, and it keeps the books that a client would keep:
arrival to first token, to last token, how it ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from types import TracebackType
from typing import NamedTuple

from base.alarm import Alarm
from base.clock import Clock
from base.errors import (
    LostError,
    ProtocolError,
    RejectedError,
    ServeError,
    SloUnreachableError,
    UnavailableError,
)
from base.metrics import ConductorMetrics
from base.request import FinishReason, SampledToken, Slo
from base.turns import Turns
from conductor.api.options import TextRequest
from conductor.api.served_model import ServedModel
from conductor.api.shares import Shares
from conductor.api.text_stream import TextStream
from conductor.api.tokenizer import Detokenizer
from conductor.serving.generated import Dispatcher, Generated

MAX_BODIES = 32
"""Bodies of the greatest length whose bytes may be held at once; shorter ones may be more."""

PROMPT_UNITS = 10
TOKENS_OF_A_UNIT = 200
"""Of a prompt: what its hashes take."""
BIASES_OF_A_UNIT = 4
"""What it takes to tell two nodes of them."""
PIECE_UNITS = 4
PART_UNITS = 500
"""A unit is a token that is told of, or a likely one beside it: some 7 us of the event loop. Of one sequence,
more are told of in several pieces."""


class Piece(NamedTuple):
    """What one event adds to an answer."""

    text: str
    """May be empty: held back, or no text."""
    tokens: tuple[SampledToken, ...]
    """Those that end the answer included, whose text is left out."""
    finish_reason: FinishReason | None
    """STOP or LENGTH in the last piece, and only there."""
    num_cached_tokens: int


class InProgress:
    """A client's call, for the length of a `with`: its places, one for each choice, and its body's bytes.

    Raises:
        UnavailableError: the conductor is draining.
        RejectedError: too much is in progress, or too much of this tenant's.
    """

    def __init__(self, completions: Completions, tenant: str) -> None:
        self._completions = completions
        self._tenant = tenant
        self._num_places = self._num_bytes = 0
        self.arrived_at_s = 0.0

    def __enter__(self) -> InProgress:
        self.arrived_at_s = self._completions.begin()
        try:
            self.take_places(1)
        except RejectedError:
            self._completions.end()
            raise
        self.alarm = Alarm(_cut_off).__enter__()
        self._completions.calls.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._completions.calls.discard(self)
        self._completions.places.give_back(self._tenant, self._num_places)
        self._completions.bodies.give_back(self._tenant, self._num_bytes)
        self._completions.end()
        self.alarm.__exit__(kind, error, trace)

    def take_places(self, count: int) -> None:
        """Count `count` more sequences; raises RejectedError."""
        places = self._completions.places
        if not places.take(self._tenant, count):
            raise RejectedError(
                f"{places.num_taken} of {places.total} sequences are in progress (server.max_waiting), "
                f"and {count} more are not to be had"
            )
        self._num_places += count

    def take_bytes(self, count: int) -> None:
        """Count `count` more bytes of the call's body; raises RejectedError."""
        bodies = self._completions.bodies
        if not bodies.take(self._tenant, count):
            raise RejectedError(f"the bodies of calls in progress have {bodies.num_taken} bytes already")
        self._num_bytes += count


def _cut_off() -> UnavailableError:
    return UnavailableError("the conductor is shutting down, and the answer is cut off")


class Completions:
    """Runs text requests. Owned by the event loop."""

    def __init__(
        self,
        model: ServedModel,
        dispatcher: Dispatcher,
        metrics: ConductorMetrics,
        clock: Clock,
        max_calls: int,
        max_body_bytes: int = 8 << 20,
        has_tenants: bool = False,
    ) -> None:
        """Begin with no call.

        Args:
            max_calls: Sequences in progress at most, one for each choice of a call; calls that still
                send their prompt count as one.
            max_body_bytes: The bytes of a body, at most; all together may have `MAX_BODIES` times as many.
            has_tenants: Whether tenants are known by keys: then none may take all.
        """
        self.model = model
        self.metrics = metrics
        self.clock = clock
        self._dispatcher = dispatcher
        self.places = Shares(max_calls, has_tenants)
        self.bodies = Shares(MAX_BODIES * max_body_bytes, has_tenants)
        self._turns = Turns()
        self._num_calls = 0
        self._is_draining = False
        self.calls: set[InProgress] = set()
        """The calls in progress that were not cut off."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_ready(self) -> bool:
        """Whether a call that comes now would be served."""
        return self._dispatcher.is_ready and not self._is_draining

    def call(self, tenant: str = "") -> InProgress:
        """Return what it is to be in the middle of a client's call."""
        return InProgress(self, tenant)

    def begin(self) -> float:
        """Count a call, and return the moment; raises UnavailableError when draining."""
        if self._is_draining:
            raise UnavailableError("the conductor is shutting down")
        self._num_calls += 1
        self._idle.clear()
        return self.clock.now_s()

    def end(self) -> None:
        self._num_calls -= 1
        if not self._num_calls:
            self._idle.set()

    def drain(self) -> None:
        """Take no more calls; those in progress go on."""
        self._is_draining = True

    def cut_off(self) -> None:
        """End the calls in progress, with UnavailableError: no time is left for them."""
        while self.calls:
            self.calls.pop().alarm.ring()

    async def wait_idle(self) -> None:
        """Return when no call is in progress."""
        await self._idle.wait()

    async def generate(self, asked: TextRequest) -> AsyncGenerator[Piece, None]:
        """Yield the answer. Consume under `contextlib.aclosing`: closing cancels.

        Raises:
            ServeError: any of its kinds, before the first piece or between two.
        """
        request, options = asked.request, asked.options
        num_biases = len(request.sampling.logit_bias)
        await self.turn(
            PROMPT_UNITS + len(request.token_ids) // TOKENS_OF_A_UNIT + num_biases // BIASES_OF_A_UNIT
        )
        book = _Book(asked, self.metrics, self.clock)
        detokenizer = Detokenizer(self.model.tokenizer, options.skip_special_tokens)
        token_units = 1 + (request.num_logprobs or 0)
        most = PART_UNITS // token_units
        stream = TextStream(detokenizer, options.stop, options.include_stop, request.stop.min_tokens)
        try:
            async with aclosing(self._dispatcher.generate(request)) as generated:
                async for whole in generated:
                    for part in _parts(whole, most):
                        await self.turn(PIECE_UNITS + len(part.tokens) * token_units)
                        piece = _to_text(part, asked, stream)
                        book.add(piece)
                        yield piece
                        if piece.finish_reason is not None:
                            return
            raise ProtocolError("the tokens ended without a finish reason")
        except ServeError as error:
            book.fail(error)
            raise
        finally:
            book.close()

    async def turn(self, units: int) -> None:
        """Return when the event loop has time for so much work."""
        if not self._turns.take(units):
            await self._turns.later(units)


def _parts(whole: Generated, most: int) -> Iterator[Generated]:
    """Yield `whole` in parts of at most `most` tokens."""
    tokens = whole.tokens
    if len(tokens) <= most:
        yield whole
        return
    for begin in range(0, len(tokens), most):
        is_last = begin + most >= len(tokens)
        reason = whole.finish_reason if is_last else None
        yield Generated(tokens[begin : begin + most], reason, whole.num_cached_tokens)


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
            return Piece(text, part.tokens[:count], FinishReason.STOP, part.num_cached_tokens)
    if part.finish_reason is not None:
        text += stream.finish()
        reason = FinishReason.STOP if stream.is_stopped else part.finish_reason
        return Piece(text, part.tokens, reason, part.num_cached_tokens)
    return Piece(text, part.tokens, None, part.num_cached_tokens)


class _Book:
    """The account of one sequence in the metrics."""

    def __init__(self, asked: TextRequest, metrics: ConductorMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._arrived_at_s = asked.arrived_at_s
        self._first_at_s = 0.0
        self._slo: Slo = asked.request.slo
        self._num_tokens = 0
        self._outcome = "cancelled"
        self._num_prompt_tokens = len(asked.request.token_ids)
        metrics.running.inc()
        metrics.ttft_part["frontend"].observe(clock.now_s() - asked.arrived_at_s)

    def add(self, piece: Piece) -> None:
        if not self._num_tokens and piece.tokens:
            self._first_at_s = self._clock.now_s()
            self._metrics.ttft.observe(self._first_at_s - self._arrived_at_s)
            self._metrics.prompt_tokens.inc(self._num_prompt_tokens)
            self._metrics.request_prompt_tokens.observe(self._num_prompt_tokens)
            self._metrics.cached_tokens.inc(piece.num_cached_tokens)
        self._num_tokens += len(piece.tokens)
        self._metrics.generation_tokens.inc(len(piece.tokens))
        if piece.finish_reason is not None:
            self._outcome = piece.finish_reason.value
            self._finish()

    def fail(self, error: ServeError) -> None:
        self._outcome = type(error).__name__
        if isinstance(error, RejectedError):
            reason = "slo" if isinstance(error, SloUnreachableError) else "capacity"
            self._metrics.rejections.labels(reason).inc()
            self._metrics.rejection_seconds.observe(self._clock.now_s() - self._arrived_at_s)

    def close(self) -> None:
        self._metrics.running.dec()
        self._metrics.sequences.labels(self._outcome).inc()

    def _finish(self) -> None:
        now_s = self._clock.now_s()
        self._metrics.request_seconds.observe(now_s - self._arrived_at_s)
        self._metrics.request_generation_tokens.observe(self._num_tokens)
        if self._first_at_s - self._arrived_at_s > self._slo.ttft_slo_s:
            self._metrics.slo_misses.labels("ttft").inc()
        if now_s - self._first_at_s > self._slo.tbt_slo_s * max(1, self._num_tokens - 1):
            self._metrics.slo_misses.labels("tbt").inc()
