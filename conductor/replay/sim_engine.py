"""The engine of a simulated node: prompts and a batch, in the steps that `engine/scheduler.py` plans.

A step computes one token of each decoding sequence, and of prompts, first come first served, as many tokens
as those leave of a chunk, half of it at least, and can wait for (`base/step_budget.py`); of several prompts
where the first leaves some. A prompt is let in when its KV fits. What a step takes is
`StepCost.with_chunks_s` where it has a chunk, and the decode step otherwise. Where chunks have no length, as
in the papers' model, a step with a prompt is that whole prompt.

Steps that go alike are taken at once, as a segment: k of the same batch, or k whole chunks of one prompt.
While the same B sequences decode, the context grows by B a step, and so do the seconds, so k steps take

    T(k) = k A + d k (k - 1) / 2,   A = the first step,   d = what each next one takes more

and nothing is simulated but the moments when a segment ends: somebody came (a quadratic says in which
step), the first of the batch ends (the top of a heap), a prompt is done, or KV runs out. A sequence's
token gaps are the segments between its join and its end, so the mean of its longest tenth comes out of a
handful of triples.

What comes while a step is under way is in the next. An engine that launches ahead plans that one shortly
before the first ends, if there is anything to plan: what comes later is in the one after.

KV that does not fit, of which blocks that several hold count once (`shared_kv.py`): a sequence waits to join
until it does; where growth overruns the capacity the newest sequence is preempted, keeps its KV in host
memory, and waits first in line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf

from base.step_budget import BudgetedStep, DecodeLoad
from conductor.placing.cost_model import CostModel
from conductor.replay.events import Schedule
from conductor.replay.known_arrivals import KnownArrivals, put_in_order
from conductor.replay.segments import Segments, steps_begun
from conductor.replay.shared_kv import SharedKv
from conductor.replay.sim_request import SimRequest, decoding_with, work_of
from conductor.replay.sim_slack import BatchSlack
from conductor.replay.steps_learned import StepsLearned

Chunk = tuple[SimRequest, int]
"""A prompt, and how many of its tokens a step computes."""

OnProgress = Callable[[SimRequest, float], None]
"""(request, moment)."""


class SimEngine:
    """Continuous batching on one node."""

    def __init__(
        self,
        cost: CostModel,
        chunk_tokens: int,
        schedule: Schedule,
        on_start: Callable[[SimRequest, float], float],
        on_computed: OnProgress,
        on_finished: OnProgress,
        has_budgets: bool = True,
        max_batch: float = inf,
    ) -> None:
        """Begin without work.

        Args:
            chunk_tokens: Of a step; 0: a step with a prompt is all of it.
            has_budgets: Whether a step takes of prompts what those who decode in it can wait for.
            max_batch: Sequences in one step, at most.
            on_start: Sets the prefix of a prompt of which the first step begins, and returns the
                seconds of its prefill that are in none of its chunks; all, where chunks have no length.
            on_computed: Called when more of a prompt is computed; when all is, may say by `join` that it
                goes on here.
            on_finished: Called with a sequence that had its last token.
        """
        self.on_look: Callable[[SimRequest, list[Chunk]], None] | None = None
        """Called with a prompt that may begin in a step and, if that is planned ahead, the chunks before."""
        self.capacity_tokens = cost.profile.device_kv_tokens
        self.shared = SharedKv(1)  # its owner may set one of longer blocks
        self.num_preemptions = 0
        self.busy_s = 0.0
        """Seconds in steps with a prompt."""
        self._cost = cost
        self._token_s = cost.profile.decode_context_token_s
        self._launches_ahead = cost.profile.launches_ahead
        self._chunk_tokens = chunk_tokens
        self._max_batch = max_batch
        self._budget_cost = cost.step if has_budgets and chunk_tokens else None
        self._slack, self._learned = BatchSlack(), StepsLearned(self._budget_cost is not None)
        self._num_starved = 0  # steps in turn in which prompts waited and had nothing
        self._schedule, self._on_start = schedule, on_start
        self._on_computed, self._on_finished = on_computed, on_finished
        self._queue: deque[SimRequest] = deque()
        self._prompts: list[SimRequest] = []
        self.prompt_tokens = 0
        """Tokens of KV of the prompts that were let in, computed or not; to be read only, as the next two."""
        self.batch = self.context_tokens = 0
        """Sequences decoding, and their tokens of KV when their present segment began."""
        self.joining: deque[SimRequest] = deque()
        """The sequences that decode as soon as a step has place for them; to be read only."""
        self._running: list[tuple[int, int, SimRequest]] = []
        self._step = self._num_joined = 0
        self._joined_s = 0.0  # seconds that those new to the next step add to it
        self._segments = Segments()
        # the present segment
        self._chunks: list[Chunk] = []
        self._budget = 0  # prompt tokens that its first step has place for
        self._steps = self._version = 0
        self._started_at_s = self._first_s = self._growth_s = 0.0
        self._num_ended = 0  # steps of segments before it
        self._is_between_steps = False
        self._known = KnownArrivals()

    @property
    def num_waiting(self) -> int:
        """Prompts and sequences that are in no step yet."""
        return len(self._queue) + len(self.joining)

    @property
    def num_prompts(self) -> int:
        """Prompts of which a part is computed or in the present step."""
        return len(self._prompts)

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts that are not computed yet; of those that wait for a step all are."""
        begun = sum(request.num_tokens - request.computed_tokens for request in self._prompts)
        return begun + sum(request.num_tokens for request in self._queue)

    def add(self, request: SimRequest, now_s: float) -> None:
        """Queue a prompt, before those that are later in order."""
        put_in_order(self._queue, request)
        self._came(request, now_s, is_prompt=True)

    def join(self, request: SimRequest, now_s: float) -> None:
        """Let a sequence decode from the next step that is planned, or once its KV fits.

        Its `token_at_s` is when it had its last token.
        """
        request.context_tokens = request.num_tokens
        request.steps_left = request.tokens_left - 1
        # whose prompt this very engine has just computed is in the next step
        if self._is_between_steps:
            self._known.came(request, 0)
            if self._enter(request, is_new=True):
                return
        self.joining.append(request)
        self._came(request, now_s, is_prompt=False)

    def drop(self, request: SimRequest, now_s: float) -> None:
        """Forget a prompt; the step that computes it ends as it would have. Unknown: no effect."""
        if request in self._queue:
            self._queue.remove(request)
        elif request in self._prompts:
            self._prompts.remove(request)
            self.prompt_tokens -= request.num_tokens
            self.shared.release(request)
            self._chunks = [chunk for chunk in self._chunks if chunk[0] is not request]
            if (steps := self._num_begun(now_s)) < self._steps:
                self._begin(steps)

    def evict_all(self, now_s: float) -> list[SimRequest]:
        """Forget everything: the node died. Return the sequences that decoded; their whole steps count."""
        if self._steps and (whole := self._num_begun(now_s) - 1):
            self._close(whole)
            self._started_at_s = self._ends_at_s(whole)
        everyone = [entry[2] for entry in sorted(self._running, key=_joined)]
        for request in everyone:
            self._leave(request)
        for request in self._prompts:
            self.shared.release(request)
        everyone.extend(self.joining)
        self.joining.clear()
        self._running.clear()
        self._queue.clear()
        self._prompts.clear()
        self._chunks.clear()
        self.prompt_tokens = self._steps = 0
        self._version += 1
        return everyone

    def _num_begun(self, now_s: float) -> int:
        """Return the number of steps of the present segment that had begun."""
        return steps_begun(now_s - self._started_at_s, self._first_s, self._growth_s)

    def _came(self, request: SimRequest, now_s: float, is_prompt: bool) -> None:
        """Let what just came be in the first step that is not planned yet."""
        if self._is_between_steps:
            return
        self._known.came(request, 0)
        if not self._steps:  # what comes at the same moment is in the same step
            self._schedule(now_s, self._begin_again, self._version, now_s)
            return
        steps = begun = self._num_begun(now_s)
        if self._launches_ahead:
            self._learned.until(begun - 1)
            steps += now_s >= self._planned_at_s(begun)
            self._known.came(request, self._num_ended + steps)
        elif self._chunks and is_prompt:
            return  # whole chunks of the first are what they are, whoever waits
        if steps < self._steps:
            self._begin(steps)
        elif self._launches_ahead and steps == self._steps:
            self._look_later()

    def _begin_again(self, version: int, now_s: float) -> None:
        if version == self._version:
            self._plan(now_s, now_s)

    def _begin(self, steps: int) -> None:
        """Let the segment have so many steps, and schedule its end."""
        self._steps = steps
        self._version = version = self._version + 1
        at_s = self._ends_at_s(steps)
        self._schedule(at_s, self._stepped, version, at_s)
        if self._launches_ahead:
            self._look_later()

    def _ends_at_s(self, steps: int) -> float:
        return self._started_at_s + steps * (self._first_s + self._growth_s * (steps - 1) / 2)

    def _planned_at_s(self, step: int) -> float:
        """Return when the step after one of the segment is planned; steps are numbered from 1."""
        return self._ends_at_s(step - 1) + self._learned.planned_after_s(self._growth_s * (step - 1))

    def _look_later(self) -> None:
        """Look at prompts when the step after the last one is planned."""
        if self._queue and self.on_look is not None:
            self._schedule(self._planned_at_s(self._steps), self._look, self._version)

    def _look(self, version: int) -> None:
        """Have what nodes have of the prompts noted that may begin in the step after the present one."""
        assert self.on_look is not None
        tokens = 0
        for request in self._queue if version == self._version else ():
            self.on_look(request, self._chunks)
            tokens += request.num_tokens - request.prefix_tokens
            if request.is_held_up or tokens > self._chunk_tokens:
                break

    def _plan(self, now_s: float, foreseen_s: float) -> None:
        """Begin the steps that go alike from now on, which was foreseen to be then."""
        self._started_at_s = now_s
        if self.batch > 1:
            self._make_room()
        has_passed = False
        if self._prompts or (self._queue and self._known.first(self._queue) is not None):
            has_passed = self._take_chunks(now_s, foreseen_s)
        elif self.joining:
            self._admit()
        self._num_starved = self._num_starved + 1 if has_passed else 0
        if self._chunks:
            self._plan_chunks()
        elif batch := self.batch:
            self._first_s = self._cost.decode_step_s(batch, self.context_tokens) + self._joined_s
            self._growth_s = self._token_s * batch
            self._learned.begins(False, self._first_s - self._joined_s, self._joined_s)
            asks_again = has_passed or self._joined_s or not self._known.are_all
            self._begin(1 if asks_again else self._num_alike())
        self._joined_s = 0.0

    def _num_alike(self) -> int:
        """Return the steps until the first of the batch ends, or its KV has no room."""
        batch = self.batch
        steps = self._running[0][0] - self._step
        left = self.capacity_tokens + self.shared.tokens - self.context_tokens - self.prompt_tokens
        return max(1, left // batch) if steps * batch > left and batch > 1 else steps

    def _plan_chunks(self) -> None:
        """Begin the steps with the chunks that were taken."""
        work = work_of(self._chunks)
        beside_s = self._joined_s + work.beside_s
        batch = self.batch + work.num_single
        context_tokens = self.context_tokens + work.single_context
        self._growth_s, steps = 0.0, 1
        first, tokens = self._chunks[0]
        if not self._chunk_tokens:
            step_s = self._cost.decode_step_s(self.batch, self.context_tokens) if self.batch else 0.0
        elif work.new_tokens:
            step_s = self._cost.step.with_chunks_s(work.new_tokens, work.attended, batch, context_tokens)
        else:
            step_s = self._cost.decode_step_s(batch, context_tokens)
        self._first_s = beside_s + step_s
        self._learned.begins(work.new_tokens > 0, step_s, beside_s)
        waits_for_nobody = not (self.batch or self.joining) or self._budget_cost is None
        is_alone = len(self._chunks) == 1 and not self._launches_ahead
        if is_alone and tokens == self._budget and not beside_s and waits_for_nobody:
            steps = (first.num_tokens - first.computed_tokens) // tokens
            if self.batch:
                steps = min(steps, self._num_alike())
            attention_s = self._cost.step.attention_s(tokens, tokens + self.batch)
            self._growth_s = 2 * attention_s * tokens**2 + self._token_s * self.batch
        self._begin(steps)

    def _take_chunks(self, now_s: float, foreseen_s: float) -> bool:
        """Set what the next step computes of prompts, letting in those that fit.

        Return whether prompts were passed over."""
        if not self._chunk_tokens:
            self._admit()
            request = self._let_in(self._known.first(self._queue) or self._queue[0], now_s)
            self._chunks.append((request, request.num_tokens - request.computed_tokens))
            return False
        step = self._budgeted_step(foreseen_s)
        self._budget = step.tokens_left
        self._share_out(step, now_s)
        if not (self._chunks or self.batch) and self._known.until_step == inf:
            step = BudgetedStep(step.tokens_left)  # nobody decodes after all: who was to has no place
            self._share_out(step, now_s)
        return step.has_passed

    def _share_out(self, step: BudgetedStep, now_s: float) -> None:
        """Let prompts take of a step: those let in, and of others those that fit and get something."""
        for request in self._prompts:
            self._take_chunk(request, step)
        joining = self.joining
        while not step.is_full and self._has_place:
            prompt, first = self._known.first(self._queue), self._known.first(joining)
            if prompt is None or (prompt.is_held_up and self._known.until_step != inf):
                break
            if first is not None and first.order < prompt.order and self._enter(first):
                joining.popleft()
                continue
            if self._known.until_step == inf and self.on_look is not None:
                self.on_look(prompt, [])
            held = self.context_tokens + self.prompt_tokens + sum(map(_context, joining))
            over = held + prompt.num_tokens - self.shared.tokens - self.capacity_tokens
            if held and over > 0 and over > self.shared.found(prompt.chain, prompt.prefix_tokens):
                break
            if (tokens := _share(prompt.num_tokens - prompt.prefix_tokens, prompt.prefix_tokens, step)) == 0:
                break  # it will find what others have computed by then
            self._let_in(prompt, now_s)
            self._chunks.append((prompt, min(tokens, prompt.num_tokens - prompt.computed_tokens)))
        if not self._has_place and self._known.first(self._queue) is not None:
            step.pass_over()
        self._admit()

    def _take_chunk(self, request: SimRequest, step: BudgetedStep) -> None:
        if tokens := _share(request.num_tokens - request.computed_tokens, request.computed_tokens, step):
            self._chunks.append((request, tokens))

    def _budgeted_step(self, now_s: float) -> BudgetedStep:
        """Return the next step as it is before any prompt has taken of it."""
        waiting = self._known.among(self.joining)  # they have their KV, and lack a place
        batch, context_tokens = decoding_with(self.batch, self.context_tokens, self._prompts, waiting)
        most = self._chunk_tokens - min(batch, self._chunk_tokens // 2)
        if self._budget_cost is None:
            return BudgetedStep(most)
        if not batch:
            num_prompts = len(self._prompts) + len(self._known.among(self._queue))
            return BudgetedStep(most, self._budget_cost, num_prompts=num_prompts)
        ratio = self._learned.ratio
        empty_s = self._cost.decode_step_s(batch, context_tokens) * ratio(False)
        left_s = self._slack.left_s(self._step, empty_s, now_s, waiting)
        load = DecodeLoad(batch, context_tokens, *left_s)
        return BudgetedStep(most, self._budget_cost, load, self._num_starved, ratio(True))

    def _let_in(self, request: SimRequest, now_s: float) -> SimRequest:
        self._queue.remove(request)
        if self._known.until_step == inf:
            request.found_blocks = None
        request.started_at_s, request.beside_s = now_s, self._on_start(request, now_s)
        request.computed_tokens = request.prefix_tokens
        self.prompt_tokens += request.num_tokens
        self.shared.hold(request, request.prefix_tokens)
        self._prompts.append(request)
        return request

    def _stepped(self, version: int, now_s: float) -> None:
        if version != self._version:
            return
        steps, self._steps = self._steps, 0
        self._is_between_steps = True
        if self._budget_cost is not None:
            self._slack.stepped()
            # what engines learn from the last of them comes after the next is planned if launched ahead
            self._learned.until(steps - self._launches_ahead)
        if self._chunks:
            self.busy_s += now_s - self._started_at_s
        self._started_at_s = now_s
        self._num_ended += steps
        if self.batch:
            self._close(steps)
            self._finish(now_s)
        if self._chunks:
            chunks, self._chunks = self._chunks, []
            for request, tokens in chunks:
                request.computed_tokens += steps * tokens
                if request.computed_tokens == request.num_tokens:
                    self._prompts.remove(request)
                    self.prompt_tokens -= request.num_tokens
                self._on_computed(request, now_s)
                if request.computed_tokens == request.num_tokens and not request.join_number:
                    self.shared.release(request)
        self._is_between_steps = False
        if self._launches_ahead:
            has_chunks, expected_s, beside_s = ended = self._learned.segment
            last_s = expected_s + self._growth_s * (steps - 1)
            self._known.until_step = self._num_ended
            self._plan(now_s, now_s - beside_s + last_s * (self._learned.ratio(has_chunks) - 1.0))
            self._learned.observe(1, ended)
            self._known.until_step = inf
        if not self._steps:
            self._plan(now_s, now_s)

    def _close(self, steps: int) -> None:
        """Count the tokens that the batch has made in the present segment."""
        growth_s = self._growth_s
        self._segments.add(self._first_s + growth_s * (steps - 1), steps, growth_s)
        self._step += steps
        self.context_tokens += steps * self.batch

    def _finish(self, now_s: float) -> None:
        """Let those go whose last token the segment made."""
        running, step, ended = self._running, self._step, []
        while running and running[0][0] <= step:
            ended.append(heappop(running)[2])
            self._leave(ended[-1])
        # as a step has them: the longest context first
        for request in sorted(ended, key=_context, reverse=True) if len(ended) > 1 else ended:
            self._on_finished(request, now_s)
        if ended and self._segments.is_long:
            self._segments.forget_before(min((entry[2].first_segment for entry in running), default=None))

    @property
    def _has_place(self) -> bool:
        return self.batch + len(self._prompts) < self._max_batch

    def _admit(self) -> None:
        """Let those who wait to decode join, first come first served, as far as places and KV go."""
        joining = self.joining
        while joining and (first := self._known.first(joining)) and self._has_place and self._enter(first):
            joining.popleft()

    def _enter(self, request: SimRequest, is_new: bool = False) -> bool:
        """Let a sequence join if its KV fits; an empty batch takes any. `is_new`: see `BatchSlack.joined`."""
        batch, context_tokens = self.batch, self.context_tokens + request.context_tokens
        chain, shared = request.chain, self.shared
        over = context_tokens + self.prompt_tokens + batch - shared.tokens - self.capacity_tokens
        if batch and over >= 0 and (request.run or over >= shared.found(chain, request.found_tokens)):
            return False
        shared.hold(request, request.found_tokens)
        self.batch = batch + 1
        self.context_tokens = context_tokens
        self._num_joined = request.join_number = self._num_joined + 1
        self._joined_s += request.join_s
        request.finish_step = self._step + request.steps_left
        request.joined_at_s = self._started_at_s
        request.first_segment = self._segments.next_number
        if self._budget_cost is not None:
            self._slack.joined(request, self._step, is_new)
        heappush(self._running, (request.finish_step, request.join_number, request))
        return True

    def _leave(self, request: SimRequest) -> None:
        """Take a sequence out of the batch and note its gaps so far."""
        if self._budget_cost is not None:
            self._slack.left(request)
        request.join_number = 0
        steps_left = request.finish_step - self._step
        steps = request.steps_left - steps_left
        # its first gap began with its last token, before it could join
        waited_s = request.joined_at_s - request.token_at_s
        if gaps := self._segments.gaps_from(request.first_segment, waited_s):
            request.gaps += gaps
            request.token_at_s = self._started_at_s
        request.steps_left = steps_left
        self.context_tokens -= request.context_tokens + steps
        request.context_tokens += steps
        self.batch -= 1
        self.shared.release(request)

    def _make_room(self) -> None:
        """Preempt the newest of the batch while its next step has no room."""
        running, most = self._running, self.capacity_tokens - self.prompt_tokens
        while self.batch > 1 and self.context_tokens + self.batch - self.shared.tokens > most:
            newest = max(running, key=_joined)
            running.remove(newest)
            heapify(running)
            self._leave(newest[2])
            newest[2].found_tokens = newest[2].num_tokens
            self.joining.appendleft(newest[2])
            self.num_preemptions += 1


def _joined(entry: tuple[int, int, SimRequest]) -> int:
    return entry[1]


def _context(request: SimRequest) -> int:
    return request.context_tokens


def _share(wanted: int, computed: int, step: BudgetedStep) -> int:
    """Return what a step computes of a prompt; one token as of a sequence that decodes: beside any chunk."""
    return 1 if wanted == 1 else step.take(wanted, computed)
