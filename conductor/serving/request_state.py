"""The state of one request over all attempts to run it, and the account of each attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf

from base.block_hash import BlockHash, hash_chain
from base.clock import Clock
from base.errors import DeadlineError, ServeError, TransferFailedError
from base.messages import Failed, Prefilled, Work
from base.prompt_logprobs import PromptLogprobs
from base.request import FinishReason, Pooling, Request, RequestId, SampledToken, Slo
from base.step_budget import GapBounds
from conductor.placing.decisions import Actual
from conductor.placing.fair_queue import Waiting, waiting
from conductor.placing.placement import Placement, PlacementRequest
from conductor.placing.retries import Retries
from conductor.serving.generated import Generated
from conductor.serving.nodes import Mailbox


class RequestState:
    """The state of one request over all attempts to run it. Belongs to the event loop."""

    def __init__(self, request: Request, timeout_s: float, clock: Clock) -> None:
        self.request = request
        self.generated: list[int] = []
        self.retries = Retries()
        self.traceparent = request.traceparent
        """The span that spans of its nodes are part of; empty: nobody traces the request."""
        self.is_complete = False
        self.outcome = "cancelled"
        """How the request ended: the finish reason, the class of the error, or cancelled."""
        self.reason = ""
        """The words of the error of a request that failed."""
        self.arrived_at_s = now_s = clock.now_s()
        self._frontend_s = now_s - (request.arrived_at_s or now_s)
        """Seconds that it took to be read and tokenised."""
        self.decodes = request.pooling is None
        """Whether it needs a decode node: tokens are wanted, and no vector."""
        self._clock = clock
        if request.deadline_s is not None:
            timeout_s = min(timeout_s, request.deadline_s)
        self.give_up_at_s = self.arrived_at_s + timeout_s
        """When the request's time is up, on the clock."""
        self._num_cached_tokens: int | None = None
        """Prompt tokens that were matched when the request first ran."""
        self._hashed: tuple[int, BlockHash] | None = None
        self._chain: list[BlockHash] = []
        self._placed_at_s = 0.0
        self._first_at_s = self._last_at_s = 0.0
        self._came_at_s = 0.0  # the last that was read, from its node

    def begin_attempt(self) -> None:
        """Begin the first attempt, or start afresh."""
        self.retries.num_attempts += 1
        self.attempt_id = RequestId(f"{self.request.request_id}.{self.retries.num_attempts}")
        """The attempt's name on the nodes: a late message of the one before must not be taken for ours."""
        self.prefill_id = RequestId(f"{self.attempt_id}.prefill")
        """The attempt's name on the prefill node: another one, because one node may have both roles."""
        self.is_promised = False
        """Whether it was let wait: see `PlacementRequest`."""
        self.mailbox = Mailbox()
        self._num_tokens_before = len(self.generated)
        self._prefilled: Prefilled | None = None
        self._ttft_s: float | None = None
        self._reserved_s: float | None = None

    def placed(self) -> None:
        """Note that the attempt was placed."""
        self._placed_at_s = self._clock.now_s()

    def reserved(self) -> None:
        """Note that the decode node has set blocks aside for the attempt."""
        self._reserved_s = self._clock.now_s() - self._placed_at_s

    def failed_at(self, placement: Placement, error: ServeError) -> None:
        """Note which node failed the attempt, so that the next one is placed elsewhere if it can be.

        What a node says of a transfer is said of its peer, unless that was to be avoided already.
        """
        retries = self.retries
        retries.num_idle += not self.mailbox.has_heard
        failed, decode, prefill = self.mailbox.failed, placement.decode_node, placement.prefill_node
        if failed is None:
            return
        is_prefill = failed.request_id == self.prefill_id
        if is_prefill and isinstance(error, TransferFailedError) and decode not in retries.avoid:
            is_prefill = False
        retries.failed_at(prefill if is_prefill else decode)

    def prefilled(self, prefilled: Prefilled) -> float | None:
        """Note the attempt's first token; return the request's TTFT if it is its first too."""
        self._first_at_s = self._last_at_s = self._clock.now_s()
        self._prefilled = prefilled
        if self._num_cached_tokens is None:
            self._num_cached_tokens = prefilled.num_cached_tokens
        if not self.generated:
            self._ttft_s = self._first_at_s - self.arrived_at_s
        return self._ttft_s

    @property
    def since_last_s(self) -> float:
        """Seconds since tokens last came."""
        return self._clock.now_s() - self._last_at_s

    def decoded(self) -> float:
        """Note that all tokens that came were read; return the seconds since those before."""
        before_s, self._last_at_s = self._last_at_s, self._clock.now_s()
        self._came_at_s = self.mailbox.tokens_at_s
        return self._last_at_s - before_s

    def actual(self, end: str) -> Actual:
        """Return the account of the attempt, which is over."""
        prefilled, ended_at_s = self._prefilled, self._clock.now_s()
        frontend_s, reserved_s, trace_id = self._frontend_s, self._reserved_s, self.traceparent[3:35]
        if prefilled is None:
            return Actual(ended_at_s, end, frontend_s=frontend_s, reserved_s=reserved_s, trace_id=trace_id)
        times, joined = prefilled.times, self.mailbox
        num_tokens = len(self.generated) - self._num_tokens_before
        num_gaps, num_steps = num_tokens - 1, num_tokens - 1 - joined.num_joined
        has_steps = joined.num_joined and num_steps > 0
        return Actual(
            ended_at_s=ended_at_s,
            end=end,
            ttft_s=self._ttft_s,
            queue_s=times.queue_s,
            compute_s=times.compute_s,
            exposed_transfer_s=times.exposed_transfer_s,
            mean_tbt_s=(self._last_at_s - self._first_at_s) / num_gaps if num_gaps > 0 else None,
            num_cached_tokens=prefilled.num_cached_tokens,
            num_output_tokens=num_tokens,
            frontend_s=frontend_s,
            reserved_s=reserved_s,
            load_s=times.exposed_load_s,
            transfer_s=times.transfer_s,
            num_chunks=times.num_chunks,
            trace_id=trace_id,
            mean_step_s=(self._came_at_s - joined.joined_at_s) / num_steps if has_steps else None,
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.request.token_ids, *self.generated) if self.generated else self.request.token_ids

    def chain(self, block_size: int, root: BlockHash) -> list[BlockHash]:
        """Return the hashes of the full blocks of all tokens so far."""
        if self._hashed != (len(self.generated), root):
            self._hashed = (len(self.generated), root)
            self._chain = hash_chain(self.token_ids, block_size, root)
        return self._chain

    def sparing_chain(self, block_size: int, root: BlockHash) -> list[BlockHash]:
        """Return the hashes of the blocks that need not be computed where they are found.

        None, where log probabilities of the prompt are wanted, or the mean of its states: what is cached has
        K and V, and neither of these."""
        is_whole = self.num_prompt_logprobs is not None or self.request.pooling not in (None, Pooling.LAST)
        return [] if is_whole else self.chain(block_size, root)

    def asked(self, chain: Sequence[BlockHash], waited_s: float) -> PlacementRequest:
        """Return what `place` is asked for the attempt, whose TTFT has lost so many seconds."""
        return PlacementRequest(
            request_id=self.attempt_id,
            chain=chain,
            num_tokens=len(self.token_ids),
            max_tokens=self.request.stop.max_tokens - len(self.generated) if self.decodes else 0,
            slo=self.slo,
            priority=self.request.priority,
            waited_s=waited_s,
            is_promised=self.is_promised,
            avoid=self.retries.avoid,
        )

    def work(self, name: RequestId, root: BlockHash, evict_first: bool = False) -> Work:
        """Return what a node that calls the attempt `name` is to do."""
        request = self.request
        return Work(
            name,
            self.token_ids,
            len(request.token_ids),
            root,
            request.sampling,
            request.stop,
            request.num_logprobs,
            request.priority,
            self._remaining_s(),
            self.traceparent,
            GapBounds(request.slo.tbt_slo_s, request.slo.longest_gap_slo_s),
            evict_first,
        )

    @property
    def slo(self) -> Slo:
        """Unbounded once a token is out: what was begun is not rejected."""
        return Slo() if self.generated else self.request.slo

    def first_token_by_s(self, patience_s: float) -> float:
        """Return when the first token is due, by its SLO or by patience; infinity: it is out already."""
        if self.generated:
            return inf
        return self.arrived_at_s + min(self.slo.ttft_slo_s, patience_s)

    def waiting(self, cost_s: float, whole_s: float) -> Waiting:
        """Return the attempt as one that waits to be placed. What lost its node goes first."""
        request, is_retry = self.request, self.retries.num_attempts > 1
        return waiting(
            self.attempt_id,
            request.priority,
            request.tenant,
            self.arrived_at_s,
            request.slo.ttft_slo_s,
            cost_s,
            whole_s,
            is_retry,
        )._replace(decodes=self.decodes)

    def deadline(self) -> asyncio.TimerHandle:
        """Let the attempt's mailbox raise DeadlineError when the request's time is up.

        One timer for the attempt: one for each message is a quarter of what a token costs.
        """
        return asyncio.get_running_loop().call_later(self._remaining_s(), self._run_out, self.mailbox)

    def _run_out(self, mailbox: Mailbox) -> None:
        limits = "server.request_timeout_s, or its own deadline; max_tokens bounds an answer"
        reason = f"request {self.request.request_id} ran out of time: {limits}"
        mailbox.put(Failed(self.attempt_id, DeadlineError.__name__, reason))

    def finish_of_first(self, prefilled: Prefilled, max_model_len: int) -> FinishReason | None:
        """Return why the sequence is over with the token that prefill sampled, if it is.

        `max_model_len`: the decode node's, by which it makes no token after the last that it takes."""
        if prefilled.finish_reason is not None:
            return prefilled.finish_reason
        num_tokens = len(self.generated) + 1
        is_full = len(self.request.token_ids) + num_tokens >= max_model_len
        return FinishReason.LENGTH if is_full or num_tokens >= self.request.stop.max_tokens else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The wish for log probabilities of the prompt, until they have come: with its first token."""
        return None if self.generated else self.request.num_prompt_logprobs

    def add_first(self, prefilled: Prefilled, finish_reason: FinishReason | None) -> Generated:
        """Take in what an attempt's prefill came to, as `add` does."""
        tokens = () if prefilled.first_token is None else (prefilled.first_token,)
        return self.add(tokens, finish_reason, prefilled.prompt_logprobs, prefilled.embedding)

    def add(
        self,
        tokens: tuple[SampledToken, ...],
        finish_reason: FinishReason | None,
        prompt_logprobs: PromptLogprobs | None = None,
        embedding: bytes | None = None,
    ) -> Generated:
        """Take in tokens, and return them as the APIs take them; with a reason they are the last."""
        assert self._num_cached_tokens is not None
        self.generated += [token.token_id for token in tokens]
        if finish_reason is not None:
            self.is_complete, self.outcome = True, finish_reason.value
        return Generated(tokens, finish_reason, self._num_cached_tokens, prompt_logprobs, embedding)

    def stopped(self) -> None:
        """Note that the tokens so far are all that is wanted, as where their text has a stop string."""
        self.is_complete, self.outcome = True, FinishReason.STOP.value

    def _remaining_s(self) -> float:
        return max(0.0, self.give_up_at_s - self._clock.now_s())
