import pytest
from prometheus_client.parser import text_string_to_metric_families

from base.messages import PrefillTimes
from base.metrics import TTFT_PARTS, ConductorMetrics, NodeMetrics, exposition, process_registry


def read(registry) -> dict[tuple[str, frozenset], float]:
    """Every sample of an exposition, by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(exposition(registry).decode())
        for sample in family.samples
    }


def value(samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


@pytest.fixture
def metrics() -> ConductorMetrics:
    return ConductorMetrics(process_registry(), "tiny")


def test_parts_of_the_time_to_first_token_add_up(metrics):
    metrics.first_token(1.0, PrefillTimes(queue_s=0.2, compute_s=0.5, exposed_transfer_s=0.1))
    samples = read(metrics.registry)
    parts = {part: value(samples, "conductor_ttft_part_seconds_sum", part=part) for part in TTFT_PARTS}
    assert parts == pytest.approx(
        {"frontend": 0.0, "queue": 0.2, "prefill": 0.5, "exposed_transfer": 0.1, "dispatch": 0.2}
    )


def test_tokens_that_arrive_together_are_no_time_apart(metrics):
    metrics.next_tokens(0.3, 3)
    samples = read(metrics.registry)
    assert value(samples, "conductor_tbt_seconds_count") == 3
    assert value(samples, "conductor_tbt_seconds_sum") == pytest.approx(0.3)
    assert value(samples, "conductor_tbt_seconds_bucket", le="0.01") == 2


def test_vllms_names_show_our_samples(metrics):
    metrics.ttft.observe(0.03)
    metrics.running.set(4)
    metrics.sequences.labels("stop").inc(2)
    metrics.first_token(1.0, PrefillTimes(queue_s=0.25, compute_s=0.5, exposed_transfer_s=0.1))
    samples = read(metrics.registry)
    model = {"model_name": "tiny", "engine": "0"}
    assert value(samples, "vllm:time_to_first_token_seconds_sum", **model) == 0.03
    assert value(samples, "vllm:time_to_first_token_seconds_bucket", le="0.04", **model) == 1
    assert value(samples, "vllm:time_to_first_token_seconds_bucket", le="0.02", **model) == 0
    assert value(samples, "vllm:num_requests_running", **model) == 4
    assert value(samples, "vllm:request_success_total", finished_reason="stop", **model) == 2
    assert value(samples, "vllm:request_queue_time_seconds_sum", **model) == 0.25
    assert value(samples, "vllm:request_prefill_time_seconds_sum", **model) == 0.5


def test_vllms_queue_has_those_who_wait_at_the_conductor_and_on_nodes(metrics):
    metrics.running.set(9)
    metrics.unplaced.set(4)
    metrics.waiting.set(3)
    model = {"model_name": "tiny", "engine": "0"}
    samples = read(metrics.registry)
    assert value(samples, "vllm:num_requests_waiting", **model) == 7
    assert value(samples, "vllm:num_requests_running", **model) == 2
    metrics.running.set(5)  # two have ended since the nodes' heartbeats
    assert value(read(metrics.registry), "vllm:num_requests_running", **model) == 0


def test_every_metric_has_a_unit_and_a_help_text():
    registry = process_registry()
    ConductorMetrics(registry, "tiny")
    NodeMetrics(registry)
    ours = ("conductor_", "prefill_", "decode_", "transfer_", "kvstore_", "expert_")
    units = ("_seconds", "_bytes", "_ratio", "_bytes_per_second", "_info")
    counted = ("_tokens", "_blocks", "_sequences", "_preemptions", "_rejections", "_misses", "_failures")
    for family in text_string_to_metric_families(exposition(registry).decode()):
        # The library notes beside each counter when it was made.
        if family.name.startswith(ours) and not family.name.endswith("_created"):
            assert family.documentation, family.name
            assert family.name.endswith(units + counted), family.name


def test_two_registries_share_nothing(metrics):
    other = ConductorMetrics(process_registry(), "tiny")
    metrics.prompt_tokens.inc(7)
    assert value(read(other.registry), "conductor_prompt_tokens_total") == 0
