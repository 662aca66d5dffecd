"""What requests teach: predictions come true, and their error can be scraped."""

import pytest

from base.clock import ManualClock
from base.messages import PrefillTimes
from base.metrics import ConductorMetrics, process_registry
from conductor.decisions import Actual, decision
from conductor.explain import Decisions
from conductor.observer import Observer
from conductor.scheduler import place
from conductor.scheduler_settings import SchedulerSettings
from tests.conductor.builders import make_cost, make_request, make_view, require_placement

COST = make_cost()


def serve(observer, view, number, slower):
    """Place one request and let every term of it take `slower` times what the profile says."""
    request = make_request(f"r{number}")
    placement = require_placement(place(request, view, COST, 0.0))
    observer.decided(decision(request, view, placement, 0.0, 0.0))
    profile_s = COST.prefill_s(request.num_tokens, 0)
    handoff_s = COST.handoff_s(request.num_tokens, placement.prefill_s)
    step_s = COST.decode_step_s(1, request.num_tokens)
    times = PrefillTimes(0.0, profile_s * slower, handoff_s * slower)
    ttft_s = times.compute_s + times.exposed_transfer_s + 0.005
    observer.first_token(ttft_s, times, request, placement)
    observer.ended(request.request_id, Actual(9.0, "finished", mean_tbt_s=step_s * slower))
    return placement, ttft_s, step_s * slower


def test_predictions_of_a_node_that_is_not_as_its_profile_come_true():
    view = make_view(1, 1, COST)
    metrics = ConductorMetrics(process_registry(), "m")
    observer = Observer(metrics, view, COST, Decisions(COST, SchedulerSettings()), ManualClock())
    for number in range(60):
        placement, ttft_s, tbt_s = serve(observer, view, number, slower=2.5)
    assert placement.predicted_ttft_s == pytest.approx(ttft_s, rel=0.02)
    assert placement.predicted_tbt_s == pytest.approx(tbt_s, rel=0.02)

    def sample(name, **labels):
        return metrics.registry.get_sample_value(name, labels)

    assert sample("conductor_prediction_correction_ratio", node="p0", term="prefill") == pytest.approx(2.5)
    for term in ("ttft", "prefill", "tbt"):
        assert sample("conductor_prediction_error_ratio_count", term=term) == 60
        assert sample("conductor_prediction_error_ratio_bucket", term=term, le="0.02") > 50
