"""The life of one request, from placement to last token. The only file that knows it whole.

    place -> Reserve (decode node) -> Prefill (prefill node) -> Start (decode node) -> tokens

The exchanges with the two nodes own everything the request holds there: leaving their
`with`, for whatever reason, releases it, and there is no second clean-up. KV arrival
needs no message of its own: the prefill node answers only after its last write was
acknowledged, so `Start` is sent when the KV is there.

A node that is lost costs the client nothing but time. The request is placed again, with
its prompt and the tokens made so far as the new prompt; the random number of a position
depends on seed and position alone, so the sequence goes on as it would have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Protocol

from base.block_hash import BlockHash, hash_chain
from base.clock import Clock
from base.errors import (
    CapacityError,
    DeadlineError,
    LostError,
    ProtocolError,
    ServeError,
    SloUnreachableError,
    UnavailableError,
)
from base.logs import event
from base.messages import (
    FromNode,
    Lend,
    Lent,
    Prefill,
    Prefilled,
    PrefillTimes,
    Reserve,
    Reserved,
    Source,
    Start,
    Tokens,
    Work,
)
from base.request import FinishReason, Request, RequestId
from conductor.cluster_view import ClusterView
from conductor.cost_model import CostModel
from conductor.generated import Generated
from conductor.membership import Membership
from conductor.nodes import Mailbox, NodeSession
from conductor.placement import Placement, PlacementRequest, Rejection, RejectReason
from conductor.scheduler import SchedulerSettings, place

log = logging.getLogger(__name__)

# One, and three more when nodes are lost. A request that takes down every node it meets
# must not meet them all.
MAX_ATTEMPTS = 4


LEND_TIMEOUT_S = 1.0
"""For a node to lend blocks. One that needs longer would not have saved any time."""


class TimesObserver(Protocol):
    """Is told the times of requests: metrics, and the cost model's correction."""

    def first_token(
        self, ttft_s: float, times: PrefillTimes, asked: PlacementRequest, placement: Placement
    ) -> None: ...

    def next_tokens(self, gap_s: float, num_tokens: int) -> None: ...


class Dispatcher:
    """Runs requests on the attached nodes."""

    def __init__(
        self,
        membership: Membership,
        view: ClusterView,
        cost: CostModel,
        request_timeout_s: float,
        observer: TimesObserver,
        clock: Clock,
        settings: SchedulerSettings | None = None,
    ) -> None:
        """Begin. `settings`: an operator's; by default the cost model decides."""
        self._membership = membership
        self._view = view
        self._cost = cost
        self._request_timeout_s = request_timeout_s
        self._observer = observer
        self._clock = clock
        self._settings = settings
        self._num_running = 0

    @property
    def is_ready(self) -> bool:
        """Whether a node of each role is attached."""
        return bool(self._view.prefill_mask and self._view.decode_mask)

    @property
    def num_running(self) -> int:
        """Requests taken in and not finished."""
        return self._num_running

    async def generate(self, request: Request) -> AsyncGenerator[Generated, None]:
        """Yield the request's tokens, first to last. Consume under `contextlib.aclosing`.

        Closing it cancels the request and frees what it holds on every node.

        Raises:
            RejectedError: not now; nothing was done.
            UnavailableError: no node of a role is attached.
            DeadlineError: the request's time ran out.
            LostError: nodes were lost as often as this request may lose them.
        """
        self._num_running += 1
        try:
            async with aclosing(self._with_retries(request)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._num_running -= 1

    async def _with_retries(self, request: Request) -> AsyncGenerator[Generated, None]:
        run = _Run(request, self._request_timeout_s, self._clock)
        while True:
            try:
                async with aclosing(self._attempt(run)) as pieces:
                    async for piece in pieces:
                        run.generated += [token.token_id for token in piece.tokens]
                        yield piece
                return
            except LostError as error:
                event(
                    log,
                    "attempt lost",
                    level=logging.WARNING,
                    attempt=run.attempt_id,
                    tokens=len(run.generated),
                    reason=error,
                )
                if run.num_attempts == MAX_ATTEMPTS:
                    raise

    async def _attempt(self, run: _Run) -> AsyncGenerator[Generated, None]:
        run.begin_attempt()
        root = self._membership.chain_root(run.request)
        chain = hash_chain(run.token_ids, self._view.block_size, root)
        asked = PlacementRequest(
            request_id=run.attempt_id,
            chain=chain,
            num_tokens=len(run.token_ids),
            max_tokens=run.request.stop.max_tokens - len(run.generated),
            slo=run.request.slo,
            priority=run.request.priority,
        )
        placement = place(asked, self._view, self._cost, self._clock.now_s(), self._settings)
        if isinstance(placement, Rejection):
            raise refusal(placement)
        decode = self._membership.session(placement.decode_node)
        prefill = self._membership.session(placement.prefill_node)
        with ExitStack() as held:
            self._view.placed(asked, placement, self._clock.now_s())
            held.callback(self._finished, run)
            held.enter_context(decode.exchange(run.attempt_id, run.mailbox))
            decode.send(Reserve(run.work(root)))
            source = await self._lent(chain, placement, held)
            prefilled = await self._prefill(run, run.work(root), decode, prefill, source)
            self._was_prefilled(run, asked, placement, prefilled)
            finish = run.finish_of_first(prefilled)
            yield Generated((prefilled.first_token,), finish, run.num_cached_tokens(prefilled))
            if finish is not None:
                run.is_complete = True
                return
            decode.send(Start(run.attempt_id, prefilled.first_token.token_id, prefilled.checksums))
            async with aclosing(self._decode(run, prefilled)) as pieces:
                async for piece in pieces:
                    yield piece

    def _was_prefilled(
        self, run: _Run, asked: PlacementRequest, placement: Placement, prefilled: Prefilled
    ) -> None:
        now_s = self._clock.now_s()
        self._view.prefill_done(run.attempt_id, now_s)
        if not run.generated:
            self._observer.first_token(now_s - run.arrived_at_s, prefilled.times, asked, placement)

    def _finished(self, run: _Run) -> None:
        output_tokens = len(run.generated) if run.is_complete else None
        self._view.finished(run.attempt_id, self._clock.now_s(), output_tokens)

    async def _lent(self, chain: list[BlockHash], placement: Placement, held: ExitStack) -> Source | None:
        """Return blocks that the prefill node may load, lent for as long as `held`.

        None if placement wants none, or if they cannot be had: they are computed then.
        """
        if placement.source_node is None:
            return None
        name = RequestId(f"{placement.request_id}.lend")
        first, end = placement.local_blocks, placement.matched_blocks
        mailbox = Mailbox()
        try:
            session = self._membership.session(placement.source_node)
            held.enter_context(session.exchange(name, mailbox))
            session.send(Lend(name, tuple(chain[first:end]), self._request_timeout_s))
            async with asyncio.timeout(LEND_TIMEOUT_S):
                lent = await mailbox.next()
        except (ServeError, TimeoutError) as error:
            reason = f"{type(error).__name__}: {error}"
            event(
                log,
                "blocks not lent",
                request_id=placement.request_id,
                node=placement.source_node,
                reason=reason,
            )
            return None
        if not isinstance(lent, Lent):
            raise ProtocolError(f"{type(lent).__name__} where Lent was expected")
        return Source(session.info.peer, lent.grant, lent.checksums, first)

    async def _prefill(
        self, run: _Run, work: Work, decode: NodeSession, prefill: NodeSession, source: Source | None
    ) -> Prefilled:
        reserved = await run.next_message()
        if not isinstance(reserved, Reserved):
            raise ProtocolError(f"{type(reserved).__name__} where Reserved was expected")
        # Under a name of its own, because one node may have both roles. The exchange ends
        # with the answer: the prefill node keeps nothing then.
        work = replace(work, request_id=RequestId(f"{run.attempt_id}.prefill"))
        with prefill.exchange(work.request_id, run.mailbox):
            target = decode.info.peer
            prefill.send(Prefill(work, target, reserved.grant, reserved.num_matched_blocks, source))
            prefilled = await run.next_message()
        if not isinstance(prefilled, Prefilled):
            raise ProtocolError(f"{type(prefilled).__name__} where Prefilled was expected")
        return prefilled

    async def _decode(self, run: _Run, prefilled: Prefilled) -> AsyncGenerator[Generated, None]:
        last_at_s = self._clock.now_s()
        while True:
            tokens = await run.next_message()
            if not isinstance(tokens, Tokens):
                raise ProtocolError(f"{type(tokens).__name__} where Tokens was expected")
            if tokens.tokens:
                now_s = self._clock.now_s()
                self._observer.next_tokens(now_s - last_at_s, len(tokens.tokens))
                last_at_s = now_s
            yield Generated(tokens.tokens, tokens.finish_reason, run.num_cached_tokens(prefilled))
            if tokens.finish_reason is not None:
                run.is_complete = True
                return


class _Run:
    """What of a request outlives an attempt to run it."""

    def __init__(self, request: Request, timeout_s: float, clock: Clock) -> None:
        self.request = request
        self.generated: list[int] = []
        self.num_attempts = 0
        self.is_complete = False
        self.mailbox = Mailbox()
        self.arrived_at_s = clock.now_s()
        self._clock = clock
        if request.deadline_s is not None:
            timeout_s = min(timeout_s, request.deadline_s)
        self._deadline_at_s = self.arrived_at_s + timeout_s
        self._num_cached_tokens: int | None = None

    def begin_attempt(self) -> None:
        """Start afresh: a late message of the attempt before must not be taken for ours."""
        self.num_attempts += 1
        self.mailbox = Mailbox()

    @property
    def attempt_id(self) -> RequestId:
        """The request's name on the nodes."""
        return RequestId(f"{self.request.request_id}.{self.num_attempts}")

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.request.token_ids, *self.generated)

    def work(self, root: BlockHash) -> Work:
        return Work(
            request_id=self.attempt_id,
            token_ids=self.token_ids,
            num_prompt_tokens=len(self.request.token_ids),
            chain_root=root,
            sampling=self.request.sampling,
            stop=self.request.stop,
            num_logprobs=self.request.num_logprobs,
            priority=self.request.priority,
            deadline_s=self._remaining_s(),
        )

    async def next_message(self) -> FromNode:
        """Return the attempt's next message; raises DeadlineError when time is up."""
        try:
            async with asyncio.timeout(self._remaining_s()):
                return await self.mailbox.next()
        except TimeoutError:
            raise DeadlineError(f"request {self.request.request_id} ran out of time") from None

    def finish_of_first(self, prefilled: Prefilled) -> FinishReason | None:
        """Return why the sequence is over with the token that prefill sampled, if it is."""
        if prefilled.finish_reason is not None:
            return prefilled.finish_reason
        num_tokens = len(self.generated) + 1
        return FinishReason.LENGTH if num_tokens >= self.request.stop.max_tokens else None

    def num_cached_tokens(self, prefilled: Prefilled) -> int:
        """Return the prompt tokens that were matched when the request first ran."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = prefilled.num_cached_tokens
        return self._num_cached_tokens

    def _remaining_s(self) -> float:
        return max(0.0, self._deadline_at_s - self._clock.now_s())


def refusal(rejection: Rejection) -> ServeError:
    """Return the error that tells a client why it was not placed, and when to come back."""
    match rejection.reason:
        case RejectReason.NO_PREFILL_NODE:
            return UnavailableError("no prefill node is attached")
        case RejectReason.NO_DECODE_NODE:
            return UnavailableError("no decode node is attached")
        case RejectReason.NO_FREE_BLOCKS:
            return CapacityError("no decode node has the KV blocks free", rejection.retry_after_s)
        case RejectReason.TTFT:
            message = f"the first token is predicted after {rejection.predicted_ttft_s:.3g} s, past its SLO"
        case RejectReason.TBT:
            message = f"a token is predicted every {rejection.predicted_tbt_s:.3g} s, past the SLO"
    return SloUnreachableError(message, rejection.retry_after_s)
