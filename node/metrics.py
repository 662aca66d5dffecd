"""Metrics of a node's engine, prefills and transports. Gauges are read when they are scraped."""

from __future__ import annotations

from functools import partial

from base.errors import TransferFailedError
from base.messages import PrefillTimes
from base.metrics import NodeMetrics
from base.request import RequestId
from engine.build import Engine
from engine.step import StepEntry, StepPlan
from prefill_node.sender import PrefillObserver
from transfer.transport import MEASURED_FROM_BYTES, TransferFacts, TransferObserver


class PrefillMetrics(PrefillObserver):
    """Counts where the seconds of each request went that nothing hid."""

    def __init__(self, metrics: NodeMetrics) -> None:
        self._metrics = metrics

    def prefilled(self, request_id: RequestId, times: PrefillTimes) -> None:
        exposed = (("load", times.exposed_load_s), ("transfer", times.exposed_transfer_s))
        for what, seconds in (*exposed, ("bubble", times.bubble_s)):
            self._metrics.prefill_exposed.labels(what).observe(seconds)


def observe(metrics: NodeMetrics, engine: Engine) -> None:
    """Feed `metrics` from the engine for as long as it runs."""
    pool, scheduler = engine.pool, engine.scheduler
    metrics.kvstore_blocks.labels("held").set_function(lambda: pool.num_held)
    metrics.kvstore_blocks.labels("free").set_function(lambda: pool.num_available - pool.num_cached)
    metrics.kvstore_blocks.labels("cached").set_function(lambda: pool.num_cached)
    computed = metrics.prefill_tokens.labels("computed")
    matched = metrics.prefill_tokens.labels("matched")
    num_preemptions = num_swaps = 0
    metrics.expert_load.values = partial(_expert_loads, engine)

    def on_step(plan: StepPlan, seconds: float, ended_at_s: float) -> None:
        nonlocal num_preemptions, num_swaps
        metrics.decode_preemptions.inc(scheduler.num_preemptions - num_preemptions)
        metrics.decode_swapped_sequences.inc(scheduler.num_swaps - num_swaps)
        num_preemptions, num_swaps = scheduler.num_preemptions, scheduler.num_swaps
        if not plan.entries:
            return
        (metrics.prefill_step if plan.has_chunks else metrics.decode_step).observe(seconds)
        chunks = [entry for entry in plan.entries if _is_of_prompt(entry)]
        computed.inc(sum(entry.num_tokens for entry in chunks))
        for entry in chunks:
            # The first chunk after admission begins where the matched prefix ends.
            if entry.start and entry.start == entry.sequence.num_matched_tokens:
                matched.inc(entry.start)
        metrics.decode_tokens.inc(sum(entry.samples for entry in plan.entries))

    engine.loop.on_step(on_step)


def _is_of_prompt(entry: StepEntry) -> bool:
    """Return whether tokens are computed that were not sampled here, the last one alone too."""
    return entry.num_tokens > 1 or entry.start < entry.sequence.num_prompt_tokens


def _expert_loads(engine: Engine) -> dict[tuple[str, ...], float]:
    """Return how evenly tokens went to experts, by what is compared; nothing, if there are none."""
    load = engine.experts.load() if engine.experts is not None else None
    if load is None:
        return {}
    values = {"busiest_expert": load.busiest, "busiest_rank": load.busiest_rank}
    values |= {f"rank_{rank}": share for rank, share in enumerate(load.ranks)}
    return {(name,): value for name, value in values.items()}


class TransferMetrics(TransferObserver):
    """Counts batches: bytes and seconds of those that arrived, and the others."""

    def __init__(self, metrics: NodeMetrics) -> None:
        self._metrics = metrics

    def ended(self, batch: TransferFacts, seconds: float, error: BaseException | None) -> None:
        metrics, transport = self._metrics, batch.transport
        # All three, so that what has not happened yet is shown as zero.
        num_bytes, took = metrics.transfer_bytes.labels(transport), metrics.transfer_seconds.labels(transport)
        failures = metrics.transfer_failures.labels(transport)
        if error is None:
            num_bytes.inc(batch.num_bytes)
            took.observe(seconds)
            if batch.num_bytes >= MEASURED_FROM_BYTES and seconds > 0:
                metrics.transfer_link.labels(batch.peer, transport).set(batch.num_bytes / seconds)
        elif isinstance(error, TransferFailedError):
            failures.inc()
