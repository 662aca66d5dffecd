"""The life of one request, from placement to last token. The only file that knows it whole.

    place -> Reserve (decode node) -> Prefill (prefill node) -> Start (decode node) -> tokens

An `Attempt` owns everything the request holds on its two nodes: leaving its `with`, for
whatever reason, releases it, and there is no second clean-up. KV arrival needs no message
of its own: the prefill node answers only after its last write was acknowledged, so `Start`
is sent when the KV is there. `Prefill` is sent in the turn of the event loop that brought
`Reserved`, by who delivers it: the request's task need not wake for that.

A node that is lost costs the client nothing but time. The request is placed again, with
its prompt and the tokens made so far as the new prompt; the random number of a position
depends on seed and position alone, so the sequence goes on as it would have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from base.block_hash import BlockHash
from base.clock import Clock
from base.errors import (
    CapacityError,
    LostError,
    ProtocolError,
    RejectedError,
    ServeError,
    SloUnreachableError,
    StaleError,
    UnavailableError,
)
from base.logs import event
from base.messages import (
    Failed,
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
from base.request import Request, RequestId
from conductor.placing.admission import admit_to_decode, joined_tbt_s
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.decisions import Actual, Decision, decision
from conductor.placing.placement import Placement, PlacementRequest, Rejection, RejectReason
from conductor.placing.scheduler import Turn, is_final, place, turn_of, until_a_finish_s
from conductor.placing.scheduler_settings import DEFAULT_SETTINGS, SchedulerSettings
from conductor.serving.attempt import Attempt, Placed
from conductor.serving.generated import Generated
from conductor.serving.membership import Membership
from conductor.serving.nodes import Mailbox, NodeSession
from conductor.serving.run import Run
from conductor.serving.waiting_room import WaitingRoom
from kvstore.index import Key

log = logging.getLogger(__name__)

PIECE_S = 1e-4
"""Of the event loop's time, that a piece of a stream takes: measured, bench/results/conductor_live.md."""
STREAMING_SHARE = 0.25
"""Of the event loop's time, at most, for pieces: where more would come, tokens go out together."""

LEND_TIMEOUT_S = 1.0
"""For a node to lend blocks. One that needs longer would not have saved any time."""


class RequestObserver(Protocol):
    """Is told what is decided and how it goes: metrics, corrections, explanations."""

    def decided(self, made: Decision) -> None:
        """Take in a decision, refusals included."""
        ...

    def first_token(
        self, ttft_s: float | None, times: PrefillTimes, asked: PlacementRequest, placement: Placement
    ) -> None:
        """Take in the first token of an attempt; `ttft_s` is None where the request had one before."""
        ...

    def next_tokens(self, gap_s: float, num_tokens: int) -> None: ...

    def ended(self, request_id: RequestId, actual: Actual) -> None:
        """Take in how an attempt that was placed went."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """How long and how many."""

    request_timeout_s: float = 600.0
    max_waiting: int = 512
    """Requests that wait to be placed."""
    role_wait_s: float = 10.0
    """For a role that has no node left."""
    stream_interval_s: float = 0.0
    """Between two pieces of one stream at least; what comes meanwhile goes out together."""


DEFAULT_LIMITS = Limits()


class Dispatcher:
    """Runs requests on the attached nodes."""

    def __init__(
        self,
        membership: Membership,
        view: ClusterView,
        cost: CostModel,
        observer: RequestObserver,
        clock: Clock,
        settings: SchedulerSettings = DEFAULT_SETTINGS,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """Begin. `settings`: an operator's; by default the cost model decides."""
        self._membership = membership
        self._view = view
        self._cost = cost
        self._request_timeout_s = limits.request_timeout_s
        self._stream_interval_s = limits.stream_interval_s
        self._observer = observer
        self._clock = clock
        self._settings = settings
        self._num_running = 0
        self._num_streaming = 0
        self._room = WaitingRoom(
            limits.max_waiting,
            limits.role_wait_s,
            lambda: view.missing_role,
            lambda: view.prefill_mask.bit_count(),
            clock,
        )
        membership.on_change(self._room.pump)
        membership.on_heartbeat(self._room.pump)

    @property
    def waiting_s(self) -> float:
        """Predicted seconds of prefill of those."""
        return self._room.waiting_s

    @property
    def is_ready(self) -> bool:
        """Whether a node of each role is attached."""
        return self._view.missing_role is None

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be placed."""
        return len(self._room)

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
        run = Run(request, self._request_timeout_s, self._clock)
        self._num_running += 1
        try:
            while not run.is_complete:
                run.begin_attempt()
                try:
                    with Attempt(run, self._finished) as attempt:
                        yield await self._first(attempt)
                        while not run.is_complete:
                            yield await self._next(run)
                except (LostError, RejectedError) as error:
                    if not _may_try_again(run, error):
                        if run.generated and isinstance(error, RejectedError):
                            # What was begun is not rejected.
                            raise LostError(f"no node could go on with it: {error}") from error
                        raise
        finally:
            self._num_running -= 1

    async def _first(self, attempt: Attempt) -> Generated:
        """Place the attempt and return its first token."""
        run = attempt.run
        asked, placement, root = await self._placed(attempt)
        work = run.work(root)
        decode = self._membership.session(placement.decode_node)
        prefill = self._membership.session(placement.prefill_node)
        attempt.deadline = run.deadline()
        attempt.begin(decode, run.attempt_id, run.mailbox)
        if stays := prefill is decode:
            source = await self._lent(asked.chain, placement, attempt)
            decode.send(Prefill(work, decode.info.peer, None, 0, source, stays=True))
            prefilled = await self._prefilled(run)
        else:
            decode.send(Reserve(work))
            source = await self._lent(asked.chain, placement, attempt)
            prefilled = await self._handed_over(attempt, work, decode, prefill, source)
        self._was_prefilled(run, asked, placement, prefilled)
        finish = run.finish_of_first(prefilled)
        if finish is None:
            self._num_streaming += 1
            attempt.is_streaming = True
            if not stays:
                # Before the client is told of the first token: the decode node need not wait for that.
                token_id, sums, parts = prefilled.first_token.token_id, prefilled.checksums, prefilled.parts
                decode.send(Start(run.attempt_id, token_id, sums, parts))
        return run.generate((prefilled.first_token,), finish)

    async def _placed(self, attempt: Attempt) -> Placed:
        """Return where the attempt runs, when its turn came; the view counts it until the attempt's end."""
        run = attempt.run

        def try_to_place(ahead_s: float) -> bool:
            found = self._place(run, ahead_s)
            if found is not None:
                self._view.placed(found.asked, found.placement, self._clock.now_s())
                attempt.placed = found
            return found is not None

        item = run.waiting(self._cost.prefill_s(len(run.token_ids), 0))
        await self._room.placed(item, try_to_place, run.first_token_by_s, run.give_up_at_s)
        assert attempt.placed is not None
        return attempt.placed

    def _place(self, run: Run, ahead_s: float) -> Placed | None:
        """Return a placement; None: it has to wait. Others take `ahead_s` before it.

        Raises:
            RejectedError: waiting would not help.
        """
        now_s = self._clock.now_s()
        turn = turn_of(run.slo, ahead_s, self._view, self._settings, now_s)
        if turn is Turn.LATER:
            return None
        root = self._membership.chain_root(run.request)
        asked = PlacementRequest(
            request_id=run.attempt_id,
            chain=run.chain(self._view.block_size, root),
            num_tokens=len(run.token_ids),
            max_tokens=run.request.stop.max_tokens - len(run.generated),
            slo=run.slo,
            priority=run.request.priority,
            waited_s=now_s - run.arrived_at_s + ahead_s,
            is_promised=run.is_promised,
            avoid=run.retries.avoid,
        )
        result = place(asked, self._view, self._cost, now_s, self._settings)
        if not is_final(result, turn, has_begun=bool(run.generated)):
            if isinstance(result, Rejection) and not self._view.can_hold(asked.num_tokens):
                raise LostError("no decode node is large enough to go on with it")
            run.is_promised = isinstance(result, Placement)
            return None
        self._observer.decided(decision(asked, self._view, result, run.arrived_at_s, now_s))
        if isinstance(result, Rejection):
            raise refusal(result, asked.waited_s)
        return Placed(asked, result, root)

    def _was_prefilled(
        self, run: Run, asked: PlacementRequest, placement: Placement, prefilled: Prefilled
    ) -> None:
        """Let the view know, and the decode load be tested again, as arXiv 2407.00079 has it."""
        node = self._view.decode_node(run.attempt_id)
        ratio = self._view.corrections.ratio(placement.decode_node, "decode")
        if not admit_to_decode(node, self._cost, asked.num_tokens, asked.slo, self._settings.reject, ratio):
            tbt_s = joined_tbt_s(node, self._cost, asked.num_tokens, ratio)
            raise SloUnreachableError(
                "decode load rose past the SLO while the prompt was computed: "
                f"a token is predicted every {tbt_s:.3g} s",
                until_a_finish_s(self._view),
                self._clock.now_s() - run.arrived_at_s,
                tbt_s,
            )
        self._view.prefill_done(run.attempt_id, self._clock.now_s())
        self._observer.first_token(run.prefilled(prefilled), prefilled.times, asked, placement)
        self._room.pump()

    def _finished(self, attempt: Attempt, error: BaseException | None) -> None:
        run = attempt.run
        assert attempt.placed is not None
        if attempt.is_streaming:
            self._num_streaming -= 1
        if isinstance(error, ServeError):
            run.failed_at(attempt.placed.placement, error)
        self._view.finished(
            run.attempt_id, self._clock.now_s(), len(run.generated) if run.is_complete else None
        )
        if run.is_complete:
            end = "finished"
        else:
            end = type(error).__name__ if isinstance(error, Exception) else "cancelled"
        self._observer.ended(run.attempt_id, run.actual(end))
        self._room.pump()

    async def _lent(self, chain: Sequence[Key], placement: Placement, attempt: Attempt) -> Source | None:
        """Return blocks that the prefill node may load, lent until the attempt's end.

        None if placement wants none, or if they cannot be had: they are computed then.
        """
        if placement.source_node is None:
            return None
        name = RequestId(f"{placement.request_id}.lend")
        first, end = placement.local_blocks, placement.matched_blocks
        mailbox = Mailbox()
        try:
            session = self._membership.session(placement.source_node)
            attempt.begin(session, name, mailbox)
            blocks = cast(Sequence[BlockHash], chain[:end])
            session.send(Lend(name, tuple(blocks), self._request_timeout_s, first))
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

    async def _handed_over(
        self, attempt: Attempt, work: Work, decode: NodeSession, prefill: NodeSession, source: Source | None
    ) -> Prefilled:
        """Return what one node says of a prompt whose KV another one has by then."""
        run = attempt.run
        target = decode.info.peer

        def send(reserved: Reserved) -> None:
            attempt.is_reserved = True
            mine, first = work._replace(request_id=run.prefill_id), reserved.num_matched_blocks
            try:
                attempt.begin(prefill, mine.request_id, run.mailbox)
            except LostError as error:
                run.mailbox.put(Failed(mine.request_id, LostError.__name__, str(error)))
            else:
                prefill.send(Prefill(mine, target, reserved.grant, first, source, reserved.ranks))

        run.mailbox.when_reserved(send)
        try:
            return await self._prefilled(run)
        except CapacityError as error:
            # Another conductor was there first: the blocks are the node's to give.
            if attempt.is_reserved or not run.retries.may_try_again:
                raise
            self._view.refused(decode.info.node_id, self._clock.now_s())
            raise StaleError(f"node {decode.info.node_id} has no room any more") from error

    async def _prefilled(self, run: Run) -> Prefilled:
        prefilled = await run.mailbox.next()
        if not isinstance(prefilled, Prefilled):
            raise ProtocolError(f"{type(prefilled).__name__} where Prefilled was expected")
        return prefilled

    async def _next(self, run: Run) -> Generated:
        """Return the tokens that come next, and with them those that came while the last were sent."""
        message = await run.mailbox.next(self._pace_s() - run.since_last_s)
        if not isinstance(message, Tokens):
            raise ProtocolError(f"{type(message).__name__} where Tokens was expected")
        tokens, finish_reason = message.tokens, message.finish_reason
        for later in run.mailbox.take_tokens():
            tokens, finish_reason = tokens + later.tokens, later.finish_reason
        if tokens:
            self._observer.next_tokens(run.decoded(), len(tokens))
        return run.generate(tokens, finish_reason)

    def _pace_s(self) -> float:
        """Return the seconds between two pieces of a stream, so that all streams leave time for the rest."""
        return max(self._stream_interval_s, self._num_streaming * PIECE_S / STREAMING_SHARE)


def _may_try_again(run: Run, error: LostError | RejectedError) -> bool:
    """Return whether an attempt that was lost is followed by another."""
    if isinstance(error, RejectedError) and not run.generated:
        return False
    event(
        log,
        "attempt lost",
        level=logging.WARNING,
        attempt=run.attempt_id,
        tokens=len(run.generated),
        reason=error,
    )
    return run.retries.may_try_again


def refusal(rejection: Rejection, waited_s: float) -> ServeError:
    """Return the error that tells a client why it was not placed, and when to come back."""
    ttft_s, tbt_s = waited_s + rejection.predicted_ttft_s, rejection.predicted_tbt_s
    match rejection.reason:
        case RejectReason.NO_PREFILL_NODE:
            return UnavailableError("no prefill node is attached")
        case RejectReason.NO_DECODE_NODE:
            return UnavailableError("no decode node is attached")
        case RejectReason.NO_FREE_BLOCKS:
            return CapacityError("no decode node has the KV blocks free", rejection.retry_after_s)
        case RejectReason.TTFT:
            message = f"the first token is predicted after {ttft_s:.3g} s, past its SLO"
        case RejectReason.TBT:
            message = f"a token is predicted every {tbt_s:.3g} s, past the SLO"
    return SloUnreachableError(message, rejection.retry_after_s, ttft_s, tbt_s)
