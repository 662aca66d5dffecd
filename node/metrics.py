"""What a node's engine and its transports do, as metrics. Gauges are read when they are scraped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from base.clock import Clock
from base.errors import TransferFailedError
from base.grants import Grant, PeerDescriptor
from base.messages import PrefillTimes
from base.metrics import NodeMetrics
from engine.build import Engine
from engine.step import StepPlan
from transfer.batch import Pieces, Priority, TransferBatch
from transfer.transport import MEASURED_FROM_BYTES, Opening, Passage, Transport


def observe_prefill(metrics: NodeMetrics, times: PrefillTimes) -> None:
    """Count where the seconds of one request went that nothing hid."""
    exposed = {"load": times.exposed_load_s, "transfer": times.exposed_transfer_s, "bubble": times.bubble_s}
    for what, seconds in exposed.items():
        metrics.prefill_exposed.labels(what).observe(seconds)


def observe(metrics: NodeMetrics, engine: Engine) -> None:
    """Feed `metrics` from the engine for as long as it runs."""
    pool, scheduler = engine.pool, engine.scheduler
    metrics.kvstore_blocks.labels("held").set_function(lambda: pool.num_held)
    metrics.kvstore_blocks.labels("free").set_function(lambda: pool.num_available - pool.num_cached)
    metrics.kvstore_blocks.labels("cached").set_function(lambda: pool.num_cached)
    computed = metrics.prefill_tokens.labels("computed")
    matched = metrics.prefill_tokens.labels("matched")
    num_preemptions = num_swaps = 0

    def on_step(plan: StepPlan, seconds: float) -> None:
        nonlocal num_preemptions, num_swaps
        metrics.decode_preemptions.inc(scheduler.num_preemptions - num_preemptions)
        metrics.decode_swapped_sequences.inc(scheduler.num_swaps - num_swaps)
        num_preemptions, num_swaps = scheduler.num_preemptions, scheduler.num_swaps
        if not plan.entries:
            return
        chunks = [entry for entry in plan.entries if entry.num_tokens > 1]
        (metrics.prefill_step if chunks else metrics.decode_step).observe(seconds)
        computed.inc(sum(entry.num_tokens for entry in chunks))
        for entry in chunks:
            # The first chunk after admission begins where the matched prefix ends.
            if entry.start and entry.start == entry.sequence.num_matched_tokens:
                matched.inc(entry.start)
        metrics.decode_tokens.inc(sum(entry.samples for entry in plan.entries))

    engine.loop.on_step(on_step)


class CountedTransport:
    """A transport whose batches are counted: bytes and seconds of those that arrived, and the others."""

    def __init__(self, inner: Transport, metrics: NodeMetrics, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock
        self._link = metrics.transfer_link
        self._bytes = metrics.transfer_bytes.labels(inner.name)
        self._seconds = metrics.transfer_seconds.labels(inner.name)
        self._failures = metrics.transfer_failures.labels(inner.name)

    @property
    def name(self) -> str:
        return self._inner.name

    def refusal_or_none(self, peer: PeerDescriptor, segment_id: int, device: int | None) -> str | None:
        return self._inner.refusal_or_none(peer, segment_id, device)

    def way(self, device: int | None) -> str:
        return self._inner.way(device)

    @property
    def now_bytes(self) -> int:
        return self._inner.now_bytes

    def open_now(self, wanted: Opening) -> Passage | None:
        try:
            passage = self._inner.open_now(wanted)
        except TransferFailedError:
            self._failures.inc()
            raise
        return (
            None if passage is None else _Observed(passage, partial(self._arrived, wanted.peer), self._clock)
        )

    async def move(self, peer: PeerDescriptor, grant: Grant, pieces: Pieces, priority: Priority) -> None:
        begun_s = self._clock.now_s()
        try:
            await self._inner.move(peer, grant, pieces, priority)
        except TransferFailedError:
            self._failures.inc()
            raise
        self._arrived(peer, pieces.num_bytes, self._clock.now_s() - begun_s)

    def _arrived(self, peer: PeerDescriptor, num_bytes: int, seconds: float) -> None:
        self._bytes.inc(num_bytes)
        self._seconds.observe(seconds)
        if num_bytes >= MEASURED_FROM_BYTES and seconds > 0:
            self._link.labels(peer.node_id, self._inner.name).set(num_bytes / seconds)

    async def close(self) -> None:
        await self._inner.close()


class _Observed:
    """A passage that tells of each batch that went through."""

    def __init__(self, inner: Passage, arrived: Callable[[int, float], None], clock: Clock) -> None:
        self._inner = inner
        self._arrived = arrived
        self._clock = clock

    def carried(self, batch: TransferBatch) -> bool:
        begun_s = self._clock.now_s()
        is_over = self._inner.carried(batch)
        if is_over and batch.only is not None:
            self._arrived(batch.only[1], self._clock.now_s() - begun_s)
        return is_over
