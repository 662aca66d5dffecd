"""The life of one request, from placement to last token. The only file that knows it whole.

    place -> Reserve (decode node) and Prefill (prefill node) -> Granted -> Start (decode node) -> tokens

An `Attempt` owns everything the request holds on its two nodes: leaving its `with`, for
whatever reason, releases it, and there is no second clean-up. KV arrival needs no message
of its own: the prefill node answers only after its last write was acknowledged, so `Start`
is sent when the KV is there. A prompt is computed while its blocks are set aside; where they are is sent
to the prefill node in the turn of the event loop that brought `Reserved`: the request's task need not wake.

A node that is lost costs the client nothing but time. The request is placed again, with
its prompt and the tokens made so far as the new prompt; the random number of a position
depends on seed and position alone, so the sequence goes on as it would have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from math import inf

from base.clock import Clock
from base.config import SchedulerConfig, ServerConfig
from base.errors import (
    CapacityError,
    DeadlineError,
    LostError,
    RejectedError,
    ServeError,
    SloUnreachableError,
    StaleError,
    UnavailableError,
)
from base.logs import event
from base.messages import (
    Granted,
    Lend,
    Lent,
    Prefill,
    Prefilled,
    Reserve,
    Reserved,
    Source,
    Start,
    Tokens,
)
from base.request import Request, RequestId
from conductor.placing.admission import admit_to_decode, joined_tbt_s
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.decisions import Actual, Decision, decision
from conductor.placing.fair_queue import Waiting
from conductor.placing.kept_copies import KeptCopies
from conductor.placing.placement import Placement, PlacementRequest, Rejection, RejectReason
from conductor.placing.placement_queue import PlacementQueue
from conductor.placing.scheduler import (
    Turn,
    is_final,
    place,
    try_again_at_s,
    turn_of,
    until_a_finish_s,
)
from conductor.placing.scheduler_settings import DEFAULT_SETTINGS, RejectPolicy, SchedulerSettings
from conductor.serving.attempt import Attempt, Placed
from conductor.serving.generated import Generated
from conductor.serving.membership import Membership
from conductor.serving.nodes import Mailbox, NodeSession
from conductor.serving.request_state import RequestState
from conductor.serving.stream_pace import StreamPace
from conductor.serving.waiting import wait_until_placed

log = logging.getLogger(__name__)

TRIED_TOGETHER = 16
"""Requests that waited and are tried in one turn of the event loop: with a long prompt each takes 0.5 ms."""
LEND_TIMEOUT_S = 1.0
"""The time that a node has to lend blocks. One that needs longer would not have saved any."""


class RequestObserver:
    """Is notified of requests where things happen to them, in the event loop; raises nothing."""

    def begun(self, request: Request) -> str:
        """Note a request. Return the traceparent that its nodes go by; empty: the one that it came with."""
        return ""

    def decided(self, made: Decision) -> None:
        """Note a decision, refusals included."""

    def first_token(
        self, ttft_s: float | None, prefilled: Prefilled, asked: PlacementRequest, placement: Placement
    ) -> None:
        """Note the first token of an attempt; `ttft_s` is None where the request had one before."""

    def next_tokens(self, gap_s: float, num_tokens: int) -> None:
        """Note tokens that arrived together, `gap_s` after the one before them."""

    def ended(self, attempt_id: RequestId, actual: Actual) -> None:
        """Note how an attempt that was placed went."""

    def finished(self, request_id: RequestId, num_tokens: int, outcome: str, reason: str) -> None:
        """Note that a request is over. `outcome`: as in `RequestState`; `reason`: why it failed, or empty."""


class Dispatcher:
    """Runs requests on the attached nodes."""

    def __init__(
        self,
        membership: Membership,
        view: ClusterView,
        cost: CostModel,
        observers: Sequence[RequestObserver],
        clock: Clock,
        settings: SchedulerSettings = DEFAULT_SETTINGS,
        server: ServerConfig | None = None,
        waiting: SchedulerConfig | None = None,
    ) -> None:
        """Begin.

        Args:
            settings: An operator's; by default the cost model decides.
            server: How long requests may take, and how seldom their streams are written to.
            waiting: How many requests may wait to be placed and how long, also for a role without a node.
        """
        server, waiting = server or ServerConfig(), waiting or SchedulerConfig()
        self._membership = membership
        self._view = view
        self._kept_copies = KeptCopies(cost, settings)
        self._cost = cost
        self._observers = observers
        self._clock = clock
        self._settings = settings
        self._request_timeout_s = server.request_timeout_s
        self._patience_s = inf if settings.reject is RejectPolicy.NONE else waiting.patience_s
        self._pace = StreamPace(server.stream_interval_ms / 1e3, clock)
        self.num_running = 0
        """Requests taken in and not finished."""
        self._next_try: asyncio.TimerHandle | None = None
        """The timer for those who wait while nothing happens."""
        self._next_try_at_s = inf
        self.queue = PlacementQueue(
            waiting.max_waiting,
            waiting.role_wait_s,
            view.missing_role,
            lambda: view.prefill_mask.bit_count(),
            clock.now_s(),
        )
        """The requests that wait to be placed."""
        self._is_pump_due = False
        membership.on_change(self._pump_soon)
        membership.on_heartbeat(self._pump_soon)

    @property
    def is_ready(self) -> bool:
        """Whether a node of each role is attached."""
        return self._view.missing_role() is None

    async def generate(self, request: Request) -> AsyncGenerator[Generated, None]:
        """Yield the request's tokens, first to last, or its vector. Consume under `contextlib.aclosing`.

        Closing it cancels the request and frees what it holds on every node.

        Raises:
            RejectedError: not now; nothing was done.
            UnavailableError: no node of a role is attached.
            DeadlineError: the request's time ran out.
            LostError: nodes were lost as often as this request may lose them.
        """
        state = RequestState(request, self._request_timeout_s, self._clock)
        for observer in self._observers:
            state.traceparent = observer.begun(request) or state.traceparent
        self.num_running += 1
        try:
            while not state.is_complete:
                state.begin_attempt()
                try:
                    with Attempt(state, self._finished) as attempt:
                        found = await self._first(attempt)
                        while not state.is_complete:
                            yield found
                            found = await self._next(state)
                    yield found
                except (LostError, RejectedError) as error:
                    if not _may_try_again(state, error):
                        if state.generated and isinstance(error, RejectedError):
                            # What was begun is not rejected.
                            raise LostError(f"no node could go on with it: {error}") from error
                        raise
        except ServeError as error:
            state.outcome, state.reason = type(error).__name__, str(error)
            raise
        finally:
            self.num_running -= 1
            for observer in self._observers:
                observer.finished(request.request_id, len(state.generated), state.outcome, state.reason)

    async def _first(self, attempt: Attempt) -> Generated:
        """Place the attempt and return its first token."""
        state, queue = attempt.state, self.queue
        nobody_waits = not len(queue)
        try:
            if not (nobody_waits and self._place(attempt, 0.0)):
                item, place_it = self._waiting(state), partial(self._place, attempt)
                bounds = state.first_token_by_s(self._patience_s), state.give_up_at_s
                await wait_until_placed(queue, item, place_it, *bounds, self._clock, nobody_waits)
        except ServeError as error:
            if not attempt.is_decided:
                self._was_let_go(attempt, error)
            raise
        finally:
            if attempt.placed is None and self._next_try is None:
                # it may have been first, for a role that is not there, before others who do not need that
                self._pump_soon()
        placed = attempt.placed
        assert placed is not None
        placement = placed.placement
        decode = self._membership.session(placement.decode_node)
        prefill = self._membership.session(placement.prefill_node)
        attempt.deadline = state.deadline()
        attempt.begin(decode, state.attempt_id, state.mailbox)
        if stays := prefill is decode:
            source = await self._lent(attempt, placed)
            pooling, scored = state.request.pooling, state.num_prompt_logprobs
            work = state.work(state.attempt_id, placed.root)
            decode.send(Prefill(work, source, pooling is None, scored, pooling))
            prefilled = await state.mailbox.next(Prefilled)
        else:
            evicts_first = placed.evict_first_on == placement.decode_node
            decode.send(Reserve(state.work(state.attempt_id, placed.root, evicts_first)))
            source = await self._lent(attempt, placed)
            prefilled = await self._handed_over(attempt, placed, decode, prefill, source)
        self._was_prefilled(attempt, placed, prefilled)
        finish = state.finish_of_first(prefilled, decode.info.max_model_len)
        if finish is None:
            self._pace.began()
            attempt.is_streaming = True
            # in the turn in which a client that reads has the last tokens
            soon = asyncio.get_running_loop().call_soon
            state.mailbox.when_over(lambda is_whole: soon(self._left, attempt, is_whole))
            if not stays:
                # Before the client has the first token: the decode node need not wait for that.
                assert prefilled.first_token is not None, "of a vector nothing is handed over"
                token_id, sums, parts = prefilled.first_token.token_id, prefilled.checksums, prefilled.parts
                decode.send(Start(state.attempt_id, token_id, sums, parts))
        return state.add_first(prefilled, finish)

    def _waiting(self, state: RequestState) -> Waiting:
        """Return a request as one that waits, by the seconds that it is expected to take."""
        num_tokens = len(state.token_ids)
        whole_s = self._cost.prefill_s(num_tokens, 0)
        if self._view.missing_role(state.decodes) is not None:
            return state.waiting(whole_s, whole_s)  # how its blocks are named is for nodes to say
        chain = state.sparing_chain(self._view.block_size, self._membership.chain_root(state.request))
        return state.waiting(self._view.computing_s(chain, num_tokens), whole_s)

    def _place(self, attempt: Attempt, ahead_s: float) -> bool:
        """Place the attempt and return True; False: it has to wait. Others take `ahead_s` before it.

        Raises:
            RejectedError: waiting would not help.
        """
        state, now_s = attempt.state, self._clock.now_s()
        self._view.num_waiting = len(self.queue)
        turn = turn_of(state.slo, ahead_s, self._view, self._settings, now_s, state.decodes)
        if turn is Turn.LATER:
            self._try_later(now_s, state.decodes)
            return False
        root = self._membership.chain_root(state.request)
        chain = state.sparing_chain(self._view.block_size, root)
        asked = state.asked(chain, now_s - state.arrived_at_s + ahead_s)
        result = place(asked, self._view, self._cost, now_s, self._settings)
        has_begun = bool(state.generated)
        if not is_final(result, turn, asked, ahead_s, self._view, self._patience_s, has_begun):
            if isinstance(result, Rejection) and not self._view.can_hold(asked.num_tokens):
                self._decided(attempt, asked, result, now_s)
                raise LostError("no decode node is large enough to go on with it")
            state.is_promised = isinstance(result, Placement)
            self._try_later(now_s, state.decodes)
            return False
        self._decided(attempt, asked, result, now_s)
        if isinstance(result, Rejection):
            self._view.rejected(result.reason, result.has_room)
            raise refusal(result, asked.waited_s)
        self._view.placed(asked, result, now_s)
        state.placed()
        evict_first_on = self._kept_copies.evict_first_on(asked, result, self._view)
        attempt.placed = Placed(asked.past_line(ahead_s), result, root, evict_first_on)
        return True

    def _decided(
        self, attempt: Attempt, asked: PlacementRequest, result: Placement | Rejection, now_s: float
    ) -> None:
        attempt.is_decided = True
        made = decision(asked, self._view, result, attempt.state.arrived_at_s, now_s)
        for observer in self._observers:
            observer.decided(made)

    def _was_let_go(self, attempt: Attempt, error: ServeError) -> None:
        """Note that a request waited in vain, as a decision that those who wait made."""
        state, view, now_s = attempt.state, self._view, self._clock.now_s()
        view.num_waiting = len(self.queue)
        # where a role is missing, nobody says how blocks are named
        is_named = view.missing_role(state.decodes) is None
        root = self._membership.chain_root(state.request) if is_named else None
        chain = state.sparing_chain(view.block_size, root) if root is not None else ()
        asked = state.asked(chain, now_s - state.arrived_at_s)
        if isinstance(error, UnavailableError):
            result = place(asked, view, self._cost, now_s, self._settings)
        else:
            is_late = isinstance(error, (SloUnreachableError, DeadlineError))
            reason = RejectReason.WAITED if is_late else RejectReason.TOO_MANY_WAIT
            retry_after_s = error.retry_after_s if isinstance(error, RejectedError) else 0.0
            result = Rejection(state.attempt_id, reason, retry_after_s)
        self._decided(attempt, asked, result, now_s)

    def _was_prefilled(self, attempt: Attempt, placed: Placed, prefilled: Prefilled) -> None:
        """Test the decode load again, as arXiv 2407.00079 has it, and count the prompt as computed."""
        state, asked, placement = attempt.state, placed.asked, placed.placement
        attempt.end_all_but(state.attempt_id)
        node = self._view.decode_node(state.attempt_id)
        load = node, self._cost, asked.num_tokens
        if state.decodes and not admit_to_decode(*load, asked.slo, self._settings.reject):
            self._view.rejected(RejectReason.TBT)
            tbt_s = joined_tbt_s(*load)
            raise SloUnreachableError(
                "decode load rose past the SLO while the prompt was computed: "
                f"a token is predicted every {tbt_s:.3g} s",
                until_a_finish_s(self._view),
                self._clock.now_s() - state.arrived_at_s,
                tbt_s,
            )
        self._view.prefill_done(state.attempt_id, self._clock.now_s())
        ttft_s = state.prefilled(prefilled)
        for observer in self._observers:
            observer.first_token(ttft_s, prefilled, asked, placement)
        self._pump_soon()

    def _pump_soon(self) -> None:
        """Try to place those who wait two turns of the event loop later: something has changed.

        By then the requests that a node has answered have gone on, and the node's state that came with the
        answers has been taken in (`attach.py`), such as which blocks it has computed.
        """
        if not self._is_pump_due and len(self.queue):
            self._is_pump_due = True
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._pump)

    def _pump(self) -> None:
        """Try to place those who wait."""
        self._is_pump_due = False
        if self.queue.pump(self._clock.now_s(), TRIED_TOGETHER):
            asyncio.get_running_loop().call_soon(self._pump)

    def _try_later(self, now_s: float, decodes: bool) -> None:
        """Have those who wait tried when a queue will have become short enough, though nothing happens."""
        at_s = try_again_at_s(self._view, self._settings, now_s, decodes)
        if at_s >= self._next_try_at_s:
            return
        if self._next_try is not None:
            self._next_try.cancel()
        self._next_try_at_s = at_s
        self._next_try = asyncio.get_running_loop().call_later(at_s - now_s, self._try_now)

    def _try_now(self) -> None:
        self._next_try, self._next_try_at_s = None, inf
        self._pump()

    def _finished(self, attempt: Attempt, error: BaseException | None) -> None:
        state = attempt.state
        assert attempt.placed is not None
        if attempt.is_streaming:
            self._pace.ended()
        if isinstance(error, ServeError):
            state.failed_at(attempt.placed.placement, error)
        end = type(error).__name__ if isinstance(error, Exception) else "cancelled"
        actual = state.actual("finished" if state.is_complete else end)
        self._left(attempt, state.is_complete)
        for observer in self._observers:
            observer.ended(state.attempt_id, actual)

    def _left(self, attempt: Attempt, is_whole: bool) -> None:
        """Count the nodes as free of an attempt, once: its client may read of it for long after."""
        if not attempt.has_left:
            attempt.has_left = True
            num_tokens = 1 + attempt.state.mailbox.num_tokens if is_whole else None
            self._view.finished(attempt.state.attempt_id, self._clock.now_s(), num_tokens)
            self._pump_soon()

    async def _lent(self, attempt: Attempt, placed: Placed) -> Source | None:
        """Return blocks that the prefill node may load, lent until the prompt is computed.

        None if placement wants none, or if they cannot be had: they are computed then.
        """
        placement, state = placed.placement, attempt.state
        if (node := placement.source_node) is None:
            return None
        name = RequestId(f"{placement.request_id}.lend")
        first, end = placement.local_blocks, placement.matched_blocks
        blocks = tuple(state.chain(self._view.block_size, placed.root)[:end])
        mailbox = Mailbox()
        try:
            session = self._membership.session(node)
            attempt.begin(session, name, mailbox)
            session.send(Lend(name, blocks, self._request_timeout_s, first))
            async with asyncio.timeout(LEND_TIMEOUT_S):
                lent = await mailbox.next(Lent)
        except (ServeError, TimeoutError) as error:
            reason = f"{type(error).__name__}: {error}"
            event(log, "blocks not lent", request_id=placement.request_id, node=node, reason=reason)
            return None
        return Source(session.info.peer, lent.grant, lent.checksums, first)

    async def _handed_over(
        self,
        attempt: Attempt,
        placed: Placed,
        decode: NodeSession,
        prefill: NodeSession,
        source: Source | None,
    ) -> Prefilled:
        """Return what one node says of a prompt whose KV another one has by then."""
        state, name, target = attempt.state, attempt.state.prefill_id, decode.info.peer
        attempt.begin(prefill, name, state.mailbox)
        work = state.work(name, placed.root, placed.evict_first_on == placed.placement.prefill_node)
        prefill.send(Prefill(work, source, num_prompt_logprobs=state.num_prompt_logprobs))

        def send(reserved: Reserved) -> None:
            attempt.is_reserved = True
            state.reserved()
            first = reserved.num_matched_blocks
            prefill.send(Granted(name, first, target, reserved.grant, reserved.ranks))

        state.mailbox.when_reserved(send)
        try:
            return await state.mailbox.next(Prefilled)
        except CapacityError as error:
            # Another conductor was there first, or an attempt before still holds blocks: they are the node's
            # to give, and nothing was lost.
            failed = state.mailbox.failed
            if attempt.is_reserved or (failed is not None and failed.request_id == name):
                raise  # the prefill node's: it computes meanwhile, and may have spoken first
            self._view.refused(decode.info.node_id, self._clock.now_s())
            state.retries.num_idle += 1
            if not state.retries.may_try_again:
                raise
            raise StaleError(f"node {decode.info.node_id} has no room any more") from error

    async def _next(self, state: RequestState) -> Generated:
        """Return the tokens that come next, and with them those that came while the last were sent."""
        pause_s = self._pace.interval_s - state.since_last_s
        message = await state.mailbox.next(Tokens, pause_s, self._pace.wake)
        self._pace.sent(state.since_last_s)
        tokens, finish_reason = message.tokens, message.finish_reason
        for later in state.mailbox.take_tokens():
            tokens, finish_reason = tokens + later.tokens, later.finish_reason
        if tokens:
            gap_s = state.decoded()
            for observer in self._observers:
                observer.next_tokens(gap_s, len(tokens))
        return state.add(tokens, finish_reason)


def _may_try_again(state: RequestState, error: LostError | RejectedError) -> bool:
    """Return whether an attempt that was lost is followed by another."""
    if isinstance(error, RejectedError) and not state.generated:
        return False
    event(
        log,
        "attempt lost",
        level=logging.WARNING,
        attempt=state.attempt_id,
        tokens=len(state.generated),
        reason=error,
    )
    return state.retries.may_try_again


def refusal(rejection: Rejection, waited_s: float) -> ServeError:
    """Return the error that says why a request was not placed, and when to ask again."""
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
        case RejectReason.WAITED | RejectReason.TOO_MANY_WAIT:
            message = "it waited in vain"
    return SloUnreachableError(message, rejection.retry_after_s, ttft_s, tbt_s)
