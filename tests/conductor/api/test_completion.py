"""The books of a sequence: what the metrics say must be what a client saw."""

import random
from contextlib import aclosing, nullcontext

import pytest
from prometheus_client.parser import text_string_to_metric_families

from base.errors import CapacityError, LostError, SloUnreachableError, UnavailableError
from base.messages import PrefillTimes
from base.metrics import ConductorMetrics, exposition, process_registry
from base.request import FinishReason, RequestId, Slo
from conductor.api.access import Client
from conductor.api.completion import Completions
from conductor.api.headers import Caller
from conductor.api.options import Options, make_request
from tests.conductor.fakes import MODEL, spoken
from tests.manual_clock import ManualClock

UNBOUNDED = Slo()
OPTIONS = Options()
TIMES = PrefillTimes(queue_s=0.25, compute_s=0.5, exposed_transfer_s=0.125)


class TimedDispatcher:
    """Says two tokens: the first after 1 s, of which it tells the parts, the second after `gap_s`."""

    is_ready = True

    def __init__(self, model, metrics, clock, gap_s, failure=None):
        self.model, self.metrics, self.clock = model, metrics, clock
        self.gap_s, self.failure = gap_s, failure

    async def generate(self, request):
        first, second = spoken(self.model, "hi", finish=FinishReason.LENGTH, num_cached_tokens=2)
        self.clock.advance(1.0)
        if self.failure is not None:
            raise self.failure
        self.metrics.first_token(1.0, TIMES)
        yield first
        self.clock.advance(self.gap_s)
        yield second


async def run(model, slo=UNBOUNDED, gap_s=0.25, failure=None, limit=None, options=OPTIONS):
    """Run one request that arrived 0.0625 s before it was dispatched; return the metrics' samples."""
    clock = ManualClock()
    metrics = ConductorMetrics(process_registry(), MODEL)
    dispatcher = TimedDispatcher(model, metrics, clock, gap_s, failure)
    completions = Completions(model, dispatcher, metrics, clock, max_calls=1)
    with completions.call(Client()) as call:
        clock.advance(0.0625)
        request = make_request(
            RequestId("r"), (5, 6, 7), options, Caller(call.arrived_at_s, slo), model, random.Random(1)
        )
        with pytest.raises(type(failure)) if failure else nullcontext():
            async with aclosing(completions.generate(request)) as pieces:
                async for _ in pieces:
                    if limit is not None:
                        break
    families = text_string_to_metric_families(exposition(metrics.registry).decode())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("conductor_")
    }


async def test_parts_add_up_to_the_time_to_first_token_that_the_client_saw(model):
    samples = await run(model)
    parts = {key[1]: value for key, value in samples.items() if key[0] == "conductor_ttft_part_seconds_sum"}
    assert parts["frontend"] == 0.0625
    assert sum(parts.values()) == samples[("conductor_ttft_seconds_sum",)] == 1.0625


async def test_tokens_are_counted_once_and_with_the_first_token(model):
    samples = await run(model)
    assert samples[("conductor_prompt_tokens_total",)] == 3
    assert samples[("conductor_cached_tokens_total",)] == 2
    assert samples[("conductor_generation_tokens_total",)] == 2
    assert samples[("conductor_request_seconds_sum",)] == 1.3125
    assert samples[("conductor_request_tbt_seconds_sum",)] == 0.25
    assert samples[("conductor_request_tbt_seconds_count",)] == 1
    assert samples[("conductor_sequences_total", "length")] == 1


async def test_a_prompt_that_is_shown_alone_has_no_token_that_was_sent(model):
    samples = await run(model, options=Options(max_tokens=1, is_prompt_alone=True))
    assert samples[("conductor_generation_tokens_total",)] == 0
    assert samples[("conductor_request_generation_tokens_sum",)] == 0
    assert samples[("conductor_request_prompt_tokens_count",)] == 1
    assert samples[("conductor_prompt_tokens_total",)] == 3
    assert samples[("conductor_cached_tokens_total",)] == 2
    assert samples[("conductor_ttft_seconds_sum",)] == 1.0625
    assert samples[("conductor_sequences_total", "length")] == 1


@pytest.mark.parametrize(
    ("slo", "missed"),
    [
        (Slo(), None),
        (Slo(ttft_slo_s=1.0), "ttft"),
        (Slo(ttft_slo_s=1.0625, tbt_slo_s=0.25), None),
        (Slo(tbt_slo_s=0.2), "tbt"),
    ],
)
async def test_bound_that_was_missed_is_counted_by_its_cause(model, slo, missed):
    samples = await run(model, slo=slo)
    counted = [key[1] for key in samples if key[0] == "conductor_slo_misses_total"]
    assert counted == ([] if missed is None else [missed])
    assert samples[("conductor_good_sequences_total",)] == (missed is None)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (SloUnreachableError("late"), "slo"),
        (CapacityError("full"), "capacity"),
        (LostError("gone"), None),
        (UnavailableError("none"), None),
    ],
)
async def test_failure_is_counted_by_its_name_and_a_rejection_by_its_reason(model, failure, reason):
    samples = await run(model, failure=failure)
    assert samples[("conductor_sequences_total", type(failure).__name__)] == 1
    rejections = [key[1] for key in samples if key[0] == "conductor_rejections_total"]
    assert rejections == ([] if reason is None else [reason])
    assert samples[("conductor_prompt_tokens_total",)] == 0


async def test_sequence_that_is_left_is_counted_as_cancelled(model):
    samples = await run(model, limit=1)
    assert samples[("conductor_sequences_total", "cancelled")] == 1
    assert samples[("conductor_running_sequences",)] == 0
    assert samples[("conductor_request_seconds_count",)] == 0
