"""The simulated conductor: the service's own decisions, with events where the service has tasks.

A request passes the queue before placement, `place`, admission, the test at its decode node, and is tried
again when its node is lost, all by the code of `conductor/placing`. What the service's dispatcher and
observer do between those calls is done here.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from base.errors import LostError, RejectedError, ServeError, SloUnreachableError
from base.messages import PrefillTimes
from base.request import NodeId, RequestId
from conductor.placing.admission import admit_to_decode
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.fair_queue import Criticality, Waiting, waiting
from conductor.placing.kept_copies import KeptCopies
from conductor.placing.learner import Learner
from conductor.placing.placement import (
    UNBOUNDED,
    Placement,
    PlacementRequest,
    Rejection,
    RejectReason,
)
from conductor.placing.placement_queue import PlacementQueue
from conductor.placing.prefill_policies import POLICIES, PrefillPolicy
from conductor.placing.scheduler import Turn, is_final, place, try_again_at_s, turn_of
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.replay.block_news import BlockNews
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.events import Schedule
from conductor.replay.policies import RandomPrefill, with_policy
from conductor.replay.sim_request import SimRequest

BEAT_S = 2.0
"""Seconds after which those who wait are tried though nothing happened: live, only as a queue gets short."""

CLOCK_S = 1e-6
"""Seconds that a node's clock shows, at least."""

Placer = Callable[
    [PlacementRequest, ClusterView, CostModel, float, SchedulerSettings, PrefillPolicy],
    Placement | Rejection,
]


def in_order(item: Waiting, arrival_s: float) -> Waiting:
    """Return who waits as one of a line without classes and tenants: whoever came first goes first."""
    begun = Criticality.BEGUN
    level = begun if item.criticality is begun else Criticality.STANDARD
    return item._replace(criticality=level, tenant="", due_at_s=arrival_s, pressed_due_at_s=inf)


class _RefusedError(RejectedError):
    """A placement was refused; the message is the reason's name."""


class _QueuedRequest(NamedTuple):
    """A request in the queue before placement."""

    conductor: SimConductor
    request: SimRequest

    def try_to_place(self, ahead_s: float) -> bool:
        return self.conductor.try_to_place(self.request, ahead_s)

    def ended(self, error: ServeError | None) -> None:
        if error is not None:
            self.conductor.refuse(self.request, error)


class SimConductor:
    """Decides on every request of a simulated cluster."""

    def __init__(
        self,
        cost: CostModel,
        options: ClusterOptions,
        schedule: Schedule,
        on_placed: Callable[[SimRequest], None],
        on_refused: Callable[[SimRequest, str], None],
        placer: Placer = place,
    ) -> None:
        """Begin without nodes: they are added to `view`.

        Args:
            cost: Predicts seconds.
            options: The cluster's.
            schedule: Has something called at a moment.
            on_placed: Called with a request that has its `placement`, counted in the view.
            on_refused: Called with a request and the name of the reason.
            placer: Wraps `scheduler.place`, to time or record it.
        """
        self.view = ClusterView(cost, options.block_size)
        self.now_s = 0.0
        self._cost = cost
        self._settings = with_policy(options.settings, options.policy)
        self._kept_copies = KeptCopies(cost, self._settings)
        self._decode_caches = options.decode_caches
        self._choose = options.rule or POLICIES[self._settings.policy]
        if options.rule is None and options.policy == "random":
            self._choose = RandomPrefill(options.seed).choose
        reject = self._settings.reject
        self._refuses = reject is not RejectPolicy.NONE
        # where a decode node computes prompts, what those who decode there can bear is known to placement
        self._knows_bounds = self._refuses or self._settings.roles_follow
        self._patience_s = options.patience_s if self._refuses else inf
        self._is_fair, self._max_attempts = options.is_fair, options.max_attempts
        self._retests = options.retests and self._refuses
        self._schedule = schedule
        self._on_placed = on_placed
        self._on_refused = on_refused
        self._place = placer
        self.news = BlockNews(self.view, options.view_delay_s)
        self._learner = Learner(self.view, cost, 0.0) if options.learns else None
        self._queue = PlacementQueue(
            options.max_waiting,
            options.role_wait_s,
            self.view.missing_role,
            lambda: self.view.prefill_mask.bit_count(),
            0.0,
        )
        self._waiting = self._queue.places
        self._beat_at_s = inf
        self._is_pump_due = False

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be placed."""
        return len(self._waiting)

    @property
    def waiting_s(self) -> float:
        """Predicted seconds of prefill of those who wait."""
        return self._queue.waiting_s

    def ask(self, request: SimRequest, now_s: float) -> None:
        """Place a request, refuse it, or let it wait."""
        self.now_s = now_s
        self.news.settle(now_s)
        nobody_waits = not self._waiting
        try:
            if nobody_waits and self.try_to_place(request, 0.0):
                return
            slo_s = request.slo.ttft_slo_s if self._refuses else inf
            by_s = inf if request.has_begun else request.arrival_s + min(slo_s, self._patience_s)
            cost_s = self.view.computing_s(request.chain, request.num_tokens)
            is_retry = request.retries is not None
            item = waiting(
                request.request_id,
                request.priority,
                request.tenant,
                request.arrival_s,
                slo_s,
                cost_s,
                self._cost.prefill_s(request.num_tokens, 0),
                is_retry,
            )._replace(decodes=request.output_tokens > 0)
            if not self._is_fair:
                item = in_order(item, request.arrival_s)
            waits = self._queue.join(item, _QueuedRequest(self, request), now_s, by_s, inf, nobody_waits)
        except ServeError as error:
            self.refuse(request, error)
            return
        if waits:
            self._look_later(request, now_s)
            self._beat_later(now_s)

    def try_to_place(self, request: SimRequest, ahead_s: float) -> bool:
        """Place a request; False: it has to wait. Others before it take `ahead_s`.

        Raises:
            ServeError: waiting is of no use.
        """
        view, now_s, settings = self.view, self.now_s, self._settings
        has_begun = request.first_token_s is not None
        slo = request.slo if self._knows_bounds and not has_begun else UNBOUNDED
        view.num_waiting = len(self._waiting)
        turn = turn_of(slo, ahead_s, view, settings, now_s, request.output_tokens > 0)
        if turn is Turn.LATER:
            return False
        asked = PlacementRequest(
            request.request_id,
            request.chain,
            request.num_tokens,
            request.tokens_left,
            slo,
            request.priority,
            now_s - request.arrival_s + ahead_s,
            request.is_promised,
            request.retries.avoid if request.retries else (),
        )
        result = self._place(asked, view, self._cost, now_s, settings, self._choose)
        if not is_final(result, turn, asked, ahead_s, view, self._patience_s, has_begun):
            if isinstance(result, Rejection) and not view.can_hold(asked.num_tokens):
                raise LostError("no decode node is large enough to go on with it")
            request.is_promised = isinstance(result, Placement)
            return False
        if isinstance(result, Rejection):
            view.rejected(result.reason, result.has_room)
            if self._learner is not None:
                self._learner.refused(now_s)
            raise _RefusedError(result.reason.value)
        view.placed(asked, result, now_s)
        if self._learner is not None:
            self._learner.placed(result, now_s)
        request.asked, request.placement = asked.past_line(ahead_s), result
        request.evict_first_on = (
            self._kept_copies.evict_first_on(asked, result, view) if self._decode_caches else None
        )
        self._on_placed(request)
        return True

    def was_prefilled(self, request: SimRequest, now_s: float) -> bool:
        """Take in the token that prefill made; False: its decode node has no time for it any more."""
        view, placement = self.view, request.placement
        if self._retests and request.output_tokens:
            node, asked = view.node(placement.decode_node), request.asked
            if not admit_to_decode(node, self._cost, asked.num_tokens, asked.slo, self._settings.reject):
                view.rejected(RejectReason.TBT)
                return False
        view.prefill_done(request.request_id, now_s)
        if self._learner is not None:
            compute_s = request.computed_at_s - request.started_at_s
            queue_s = request.started_at_s - request.arrival_s - request.asked.waited_s
            shown_s = now_s - request.computed_at_s
            # nobody learns from what no clock shows, as where a hand-off takes no time
            times = PrefillTimes(max(0.0, queue_s), compute_s, shown_s if shown_s > CLOCK_S else 0.0)
            ttft_s = None if request.has_begun else now_s - request.arrival_s + self._dispatch_s(request)
            self._learner.first_token(ttft_s, times, request.asked, placement, now_s)
        self.pump(now_s)
        return True

    def ended(self, request: SimRequest, now_s: float, output_tokens: int | None = None) -> None:
        """Take in the end of an attempt that was placed; `output_tokens` where it ended well."""
        self.view.finished(request.request_id, now_s, output_tokens)
        if self._learner is not None:
            # the first gap is no step alone: who was handed over has yet to join
            num_steps, mean_s = (output_tokens or 0) - 2, None
            if num_steps > 0:
                first_s = request.gaps[request.num_gaps_before][0]
                mean_s = (now_s - request.prefilled_at_s - first_s) / num_steps
            self._learner.ended(request.request_id, mean_s, now_s)
        self.pump(now_s)

    def lost(self, request: SimRequest, node_id: NodeId, now_s: float) -> None:
        """Try a request again whose attempt a node has lost, if it may be."""
        self.ended(request, now_s)
        if request.begin_again(node_id, self._max_attempts):
            self.ask(request, now_s)
        else:
            self.refuse(request, LostError(node_id))

    def pump(self, now_s: float) -> None:
        """Try those who wait, once all that happens at this moment is known: something has changed."""
        if self._waiting and not self._is_pump_due:
            self._is_pump_due = True
            self._schedule(now_s, self._pump, now_s)

    def _pump(self, now_s: float) -> None:
        self._is_pump_due = False
        self.now_s = now_s
        self.news.settle(now_s)
        self._queue.pump(now_s)
        if self._waiting:
            self._beat_later(now_s)

    def refuse(self, request: SimRequest, error: ServeError) -> None:
        """Let a request go that was never placed, or lost too often."""
        if isinstance(error, _RefusedError):
            reason = str(error)
        elif isinstance(error, SloUnreachableError):
            reason = "ttft"
        elif isinstance(error, RejectedError):
            reason = "max_waiting"
        elif isinstance(error, LostError):
            reason = "lost"
        else:
            reason = f"no_{self.view.missing_role()}_node"
        self._on_refused(request, reason)

    def _dispatch_s(self, request: SimRequest) -> float:
        profile = self._cost.profile
        return profile.dispatch_s + request.prompt_tokens * profile.dispatch_token_s

    def _look(self, request: SimRequest, name: RequestId, now_s: float) -> None:
        """Let a request go that has waited long enough; `name` is the attempt's that waited."""
        if name not in self._queue:
            return
        self.now_s = now_s
        error = self._queue.overdue(name, now_s)
        if error is None:
            self._look_later(request, now_s)
        else:
            self._queue.leave(name)
            self.refuse(request, error)

    def _look_later(self, request: SimRequest, now_s: float) -> None:
        at_s = self._queue.look_at_s(request.request_id, now_s)
        self._schedule(at_s, self._look, request, request.request_id, at_s)

    def _beat(self, now_s: float) -> None:
        """Try those who wait: a queue may have become short enough by time alone."""
        if now_s == self._beat_at_s:
            self._beat_at_s = inf
            self._pump(now_s)

    def _beat_later(self, now_s: float) -> None:
        """Try those who wait when a queue will have become short enough, and each BEAT_S at least."""
        next_s = min(now_s + BEAT_S, try_again_at_s(self.view, self._settings, now_s))
        if next_s < self._beat_at_s:
            self._beat_at_s = next_s
            self._schedule(next_s, self._beat, next_s)
