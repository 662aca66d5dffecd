"""Every metric of the cluster: name, unit, labels, and vLLM's name for it.

Seconds and bytes. Each process makes one registry and hands it in; nothing here is
global. Buckets are vLLM's, so that a query written for it reads ours.

vLLM's names are no second set of books: a collector copies our samples under those names
when /metrics is read, so existing dashboards, autoscaling rules and gateways work and the two can
never disagree. Who waits there waits here at the conductor or on a node; the others run.

    conductor_ttft_seconds       arrival at the conductor to the first token out of it
    conductor_ttft_part_seconds  the same seconds by where they went:
        frontend           parsing and tokenising
        queue              waiting on the prefill node
        prefill            computing
        exposed_transfer   writing KV after the last layer was computed
        dispatch           the rest: placing, reserving, messages
    conductor_tbt_seconds        between two tokens of one request; tokens that arrive
                                 together are 0 apart
    conductor_request_tbt_seconds   the mean of these over a request, one for each: what
                                 /ui calls TBT, and what a bound on TBT is on
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from base.clock import wall_clock_s
from base.lifetime import Lifetime
from base.messages import PrefillTimes

CONTENT_TYPE = CONTENT_TYPE_LATEST

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TBT_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
REJECTION_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
TOKEN_BUCKETS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))  # 1 to 500,000

ERROR_BUCKETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
PREDICTED_TERMS = ("ttft", "queue", "prefill", "handoff", "tbt")
SHORTEST_PREDICTED_S = 0.001
"""The relative error of less says nothing."""

PACKAGES = {
    "version": "conductor-cluster",
    "torch": "torch",
    "transformers": "transformers",
    "grpc": "grpcio",
}
"""Packages whose versions the processes of one cluster must agree on, or had better."""

TTFT_PARTS = ("frontend", "queue", "prefill", "exposed_transfer", "dispatch")


def process_registry() -> CollectorRegistry:
    """Return a registry that holds this process's memory, CPU time, open files, versions and clock."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    help_text = {name: _version(package) for name, package in PACKAGES.items()}
    build = Gauge("conductor_build_info", "1; what this process runs", [*help_text], registry=registry)
    build.labels(**help_text).set(1)
    clock = Gauge("conductor_wall_clock_seconds", "Since 1970, on this host", registry=registry)
    clock.set_function(wall_clock_s)
    return registry


def export_supervised(registry: CollectorRegistry, lifetime: Lifetime) -> None:
    """Let it be read whether somebody starts this process again when it has ended."""
    help_text = "1: a supervisor starts this process again when it has ended; 0: Ray is gone, or its actor"
    supervised = Gauge("conductor_process_supervised", help_text, registry=registry)
    supervised.set_function(lambda: lifetime.is_supervised)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def samples_of(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of every sample of an exposition; raises ValueError."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def exposition(registry: CollectorRegistry) -> bytes:
    """Return all metrics in the text format of CONTENT_TYPE."""
    return generate_latest(registry)


class FastCounter(Collector):
    """A counter for what happens with each request or token. One thread may increase it: it takes no lock,
    and a tenth of the library's 0.4 us."""

    def __init__(
        self, name: str, help_text: str, registry: CollectorRegistry | None = None, label: str = ""
    ) -> None:
        """Begin. `label`: what the `series` differ in, each of which is a counter without a registry."""
        self._name = name
        self._help_text = help_text
        self._labelnames = [label] if label else []
        self.total = 0
        self.series: dict[str, FastCounter] = defaultdict(partial(FastCounter, name, help_text))
        if registry is not None:
            registry.register(self)

    def labels(self, value: str) -> FastCounter:
        return self.series[value]

    def inc(self, amount: int = 1) -> None:
        self.total += amount

    def collect(self) -> Iterable[Metric]:
        if not self._labelnames:
            yield CounterMetricFamily(self._name, self._help_text, value=self.total)
            return
        family = CounterMetricFamily(self._name, self._help_text, labels=self._labelnames)
        for value, counter in self.series.items():
            family.add_metric([value], counter.total)
        yield family


class FastHistogram(Collector):
    """A histogram for what happens with each request or token. One thread may observe: it takes no lock, and
    a fifth of the library's 1.3 us."""

    def __init__(
        self,
        name: str,
        help_text: str,
        buckets: Sequence[float],
        registry: CollectorRegistry | None = None,
        label: str = "",
        values: Sequence[str] = (),
    ) -> None:
        """Begin. `values` of `label`: what the `series` differ in, each a histogram without a registry."""
        self._name = name
        self._help_text = help_text
        self._labelnames = [label] if label else []
        self.series = {value: FastHistogram(name, help_text, buckets) for value in values}
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        if registry is not None:
            registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help_text, labels=self._labelnames)
        for value, each in self.series.items() or [("", self)]:
            bounds = (*map(floatToGoString, each._bounds), "+Inf")
            buckets = [*zip(bounds, accumulate(each._counts), strict=True)]
            family.add_metric([value] * len(self._labelnames), buckets, each._sum)
        yield family


class Totals(NamedTuple):
    """Sequences and tokens since a conductor's start."""

    good: float
    """Served to the end within their bounds."""
    late: float
    """Served to the end, and past a bound."""
    rejected: float
    failed: float
    cancelled: float
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float


class ConductorMetrics:
    """The metrics of a conductor. Owned by its event loop."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.registry = registry
        fast_histogram = partial(FastHistogram, registry=registry)
        fast_counter = partial(FastCounter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        self.ttft = fast_histogram("conductor_ttft_seconds", "Arrival to first token", TTFT_BUCKETS)
        help_text = "Where the seconds to the first token went"
        part = fast_histogram(
            "conductor_ttft_part_seconds", help_text, TTFT_BUCKETS, label="part", values=TTFT_PARTS
        )
        self.ttft_part = part.series
        self.tbt = fast_histogram("conductor_tbt_seconds", "Between two tokens", TBT_BUCKETS)
        help_text = "Between two tokens of one sequence, in the mean: what its bound is on"
        self.request_tbt = fast_histogram("conductor_request_tbt_seconds", help_text, TBT_BUCKETS)
        self.request_seconds = fast_histogram(
            "conductor_request_seconds", "Arrival to last token", REQUEST_BUCKETS
        )
        self.embedding_seconds = fast_histogram(
            "conductor_embedding_seconds",
            "Arrival of a call to the vector of one of its inputs",
            TTFT_BUCKETS,
        )
        self.request_prompt_tokens = fast_histogram(
            "conductor_request_prompt_tokens", "Of one sequence", TOKEN_BUCKETS
        )
        self.request_generation_tokens = fast_histogram(
            "conductor_request_generation_tokens", "Of one sequence", TOKEN_BUCKETS
        )
        self.prompt_tokens = fast_counter(
            "conductor_prompt_tokens", "Of sequences that got a token, or a vector"
        )
        self.cached_tokens = fast_counter("conductor_cached_tokens", "Prompt tokens matched, not computed")
        self.generation_tokens = fast_counter("conductor_generation_tokens", "Sent to clients")
        help_text = "Ended, by outcome: stop, length, cancelled or an error's name"
        self.sequences = fast_counter("conductor_sequences", help_text, label="outcome")
        help_text = "Sequences not taken, by reason"
        self.rejections = fast_counter("conductor_rejections", help_text, label="reason")
        self.rejection_seconds = fast_histogram(
            "conductor_rejection_seconds", "Arrival to the rejection", REJECTION_BUCKETS
        )
        self.good_sequences = fast_counter(
            "conductor_good_sequences", "Served to the end within their bounds"
        )
        help_text = "Sequences served past their bound on ttft, or on tbt in the mean"
        self.slo_misses = fast_counter("conductor_slo_misses", help_text, label="cause")
        self.running = gauge("conductor_running_sequences", "Begun and not ended")
        self.unplaced = gauge("conductor_unplaced_sequences", "Waiting at the conductor to be placed")
        self.waiting = gauge("conductor_waiting_sequences", "Waiting on a node")
        self.kv_usage = gauge("conductor_kv_usage_ratio", "Held share of all KV blocks")
        help_text = "Since the attached node longest silent was heard"
        self.view_age = gauge("conductor_view_age_seconds", help_text)
        self._predictions(registry)
        registry.register(_VllmNames(self._own_metrics(part), model_name))

    def _predictions(self, registry: CollectorRegistry) -> None:
        self.prediction_error = FastHistogram(
            "conductor_prediction_error_ratio",
            "Of placements: |predicted / actual - 1|, by term",
            ERROR_BUCKETS,
            registry,
            "term",
            PREDICTED_TERMS,
        ).series
        self.corrections = FunctionGauge(
            "conductor_prediction_correction_ratio",
            "What a node's predictions are multiplied with, as learned",
            ("node", "term"),
            registry,
        )

    def _own_metrics(self, part: FastHistogram) -> tuple[_Alias | _Sum, ...]:
        return (
            _Alias("vllm:time_to_first_token_seconds", self.ttft),
            _Alias("vllm:inter_token_latency_seconds", self.tbt),
            _Alias("vllm:request_time_per_output_token_seconds", self.request_tbt),
            _Alias("vllm:e2e_request_latency_seconds", self.request_seconds),
            _Alias("vllm:request_queue_time_seconds", part, {"part": "queue"}),
            _Alias("vllm:request_prefill_time_seconds", part, {"part": "prefill"}),
            _Alias("vllm:request_prompt_tokens", self.request_prompt_tokens),
            _Alias("vllm:request_generation_tokens", self.request_generation_tokens),
            _Alias("vllm:prompt_tokens", self.prompt_tokens),
            _Alias("vllm:prompt_tokens_cached", self.cached_tokens),
            _Alias("vllm:prefix_cache_queries", self.prompt_tokens),
            _Alias("vllm:prefix_cache_hits", self.cached_tokens),
            _Alias("vllm:generation_tokens", self.generation_tokens),
            _Alias("vllm:request_success", self.sequences, rename={"outcome": "finished_reason"}),
            _Alias("vllm:admission_rejections", self.rejections),
            _Sum("vllm:num_requests_running", "On nodes", (self.running,), (self.unplaced, self.waiting)),
            _Sum("vllm:num_requests_waiting", "To be placed, and on nodes", (self.unplaced, self.waiting)),
            _Alias("vllm:kv_cache_usage_perc", self.kv_usage),
        )

    def totals(self) -> Totals:
        """Return what was counted since the start."""
        ended = {outcome: counter.total for outcome, counter in self.sequences.series.items()}
        served = ended.pop("stop", 0) + ended.pop("length", 0)
        cancelled = ended.pop("cancelled", 0)
        rejected = sum(counter.total for counter in self.rejections.series.values())
        return Totals(
            good=self.good_sequences.total,
            late=served - self.good_sequences.total,
            rejected=rejected,
            failed=sum(ended.values()) - rejected,
            cancelled=cancelled,
            prompt_tokens=self.prompt_tokens.total,
            cached_tokens=self.cached_tokens.total,
            output_tokens=self.generation_tokens.total,
        )

    def first_token(self, ttft_s: float, times: PrefillTimes) -> None:
        """Observe where the dispatcher's `ttft_s` went."""
        known_s = times.queue_s + times.compute_s + times.exposed_transfer_s
        part = self.ttft_part
        part["queue"].observe(times.queue_s)
        part["prefill"].observe(times.compute_s)
        part["exposed_transfer"].observe(times.exposed_transfer_s)
        part["dispatch"].observe(max(0.0, ttft_s - known_s))

    def predicted(self, term: str, predicted_s: float, actual_s: float) -> None:
        """Observe how well a term was predicted."""
        if actual_s >= SHORTEST_PREDICTED_S:
            self.prediction_error[term].observe(abs(predicted_s / actual_s - 1))

    def next_tokens(self, gap_s: float, num_tokens: int) -> None:
        """Observe tokens that arrived together, `gap_s` after the one before them."""
        self.tbt.observe(gap_s)
        if num_tokens > 1:
            self.tbt.observe(0.0, num_tokens - 1)


class NodeMetrics:
    """The metrics of a node. Owned by its event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.prefill_tokens = counter(
            "prefill_tokens", "Prompt tokens by where their KV came from", ["source"]
        )
        self.prefill_step = histogram(
            "prefill_step_seconds", "One step with a chunk in it", buckets=TBT_BUCKETS
        )
        self.prefill_exposed = histogram(
            "prefill_exposed_seconds",
            "Of a request, hidden by nothing: load (prefix), transfer (KV), bubble (last stage idle)",
            ["what"],
            buckets=TTFT_BUCKETS,
        )
        self.decode_step = histogram("decode_step_seconds", "One step of decode alone", buckets=TBT_BUCKETS)
        self.decode_tokens = counter("decode_tokens", "Sampled")
        self.decode_preemptions = counter("decode_preemptions", "Sequences that lost their blocks to others")
        self.decode_swapped_sequences = counter(
            "decode_swapped_sequences", "Of these, whose KV moved to host memory and was not recomputed"
        )
        self.transfer_bytes = counter("transfer_bytes", "Written to peers", ["transport"])
        self.transfer_seconds = histogram(
            "transfer_seconds", "One transfer batch", ["transport"], buckets=TTFT_BUCKETS
        )
        self.transfer_failures = counter("transfer_failures", "Transfer batches that failed", ["transport"])
        self.transfer_link = gauge(
            "transfer_link_bytes_per_second",
            "Of the last batch of a MiB or more, by the peer it went to or came from",
            ["peer", "transport"],
        )
        self.kvstore_blocks = gauge("kvstore_blocks", "KV blocks by place: free, cached, held", ["place"])
        about = "Choices over the mean, of the last minutes: busiest_expert, busiest_rank, rank_0, ..."
        self.expert_load = FunctionGauge("expert_load_ratio", about, ["of"], registry)


class StoreMetrics:
    """The metrics of a store of the block cache. Owned by its event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, registry=registry)
        self.blocks = gauge(
            "kvstore_tier_blocks",
            "Blocks by tier (host, disk) and place: free, in_transfer, cached, held, bad",
            ["tier", "place"],
        )
        self.unaccounted = gauge("kvstore_unaccounted_blocks", "Total less all places; 0, or a bug", ["tier"])
        self.engine_blocks = gauge(
            "kvstore_engine_blocks",
            "Since the start: saved from the engine's cache, loaded into it, dropped unsaved",
            ["what"],
        )
        self.disk_growth = gauge(
            "kvstore_disk_growth",
            "1 at the state of the disk tier's file: growing, or resting (the disk is full)",
            ["state"],
        )
        self.damaged = gauge("kvstore_damaged_blocks", "Blocks found to be other than stored", ["tier"])


@dataclass(frozen=True, slots=True)
class _Alias:
    """One of our metrics under another name."""

    name: str
    source: Collector
    only: Mapping[str, str] = field(default_factory=dict)
    """Samples with these labels alone; the labels go."""
    rename: Mapping[str, str] = field(default_factory=dict)

    def copy(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        for metric in self.source.collect():
            copied = Metric(self.name, metric.documentation, metric.type)
            copied.samples = [
                Sample(
                    self.name + sample.name[len(metric.name) :],
                    self._labels(sample) | dict(labels),
                    sample.value,
                )
                for sample in metric.samples
                if self.only.items() <= sample.labels.items() and not sample.name.endswith("_created")
            ]
            yield copied

    def _labels(self, sample: Sample) -> dict[str, str]:
        return {
            self.rename.get(name, name): value
            for name, value in sample.labels.items()
            if name not in self.only
        }


@dataclass(frozen=True, slots=True)
class _Sum:
    """Gauges of ours under another name, not below 0: what nodes say is as old as their heartbeats."""

    name: str
    help_text: str
    plus: tuple[Gauge, ...]
    minus: tuple[Gauge, ...] = ()

    def copy(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        total = max(0.0, sum(map(_value, self.plus)) - sum(map(_value, self.minus)))
        family = GaugeMetricFamily(self.name, self.help_text, labels=[*labels])
        family.add_metric([*labels.values()], total)
        yield family


def _value(gauge: Gauge) -> float:
    return sum(sample.value for metric in gauge.collect() for sample in metric.samples)


class FunctionGauge(Collector):
    """A gauge that is read where its values are kept: what is gone there is not shown."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name, self._help_text, self._labelnames = name, help_text, labels
        self.values: Callable[[], Mapping[tuple[str, ...], float]] = dict
        """Returns the gauge's values by those of its labels; set by who keeps them."""
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self._name, self._help_text, labels=self._labelnames)
        for labels, value in self.values().items():
            family.add_metric(labels, value)
        yield family


class _VllmNames(Collector):
    """Shows our samples under vLLM's names and with its labels."""

    def __init__(self, aliases: tuple[_Alias | _Sum, ...], model_name: str) -> None:
        self._aliases = aliases
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterable[Metric]:
        for alias in self._aliases:
            yield from alias.copy(self._labels)
