"""What requests teach: predictions come true, and their error can be scraped."""

import pytest

from base.messages import Prefilled, PrefillTimes
from base.metrics import ConductorMetrics, exposition, process_registry
from base.request import Role, SampledToken
from conductor.placing.decisions import Actual, decision
from conductor.placing.explain import Decisions
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.serving.observer import Observer
from tests.conductor.builders import make_cost, make_info, make_request, make_view, require_placement
from tests.manual_clock import ManualClock

COST = make_cost()


def placed(observer, view, name, now_s=0.0):
    """Place one request, and notify `observer`; return it and its placement."""
    request = make_request(name)
    placement = require_placement(place(request, view, COST, now_s))
    observer.decided(decision(request, view, placement, now_s, now_s))
    return request, placement


def prefilled(times):
    return Prefilled("r", SampledToken(1), None, 0, (), times)


def serve(observer, view, number, slower, clock):
    """Place one request and let every term of it take `slower` times what the profile says."""
    request, placement = placed(observer, view, f"r{number}", clock.now_s())
    profile_s = COST.prefill_s(request.num_tokens, 0)
    handoff_s = COST.handoff_s(request.num_tokens, placement.prefill_s)
    step_s = COST.decode_step_s(1, request.num_tokens)
    times = PrefillTimes(0.0, profile_s * slower, handoff_s * slower)
    ttft_s = times.compute_s + times.exposed_transfer_s + 0.005
    view.placed(request, placement, clock.now_s())
    view.prefill_done(request.request_id, clock.now_s())
    observer.first_token(ttft_s, prefilled(times), request, placement)
    clock.advance(20 * step_s * slower)
    view.finished(request.request_id, clock.now_s(), 20)
    observer.ended(
        request.request_id, Actual(9.0, "finished", mean_tbt_s=step_s * slower, mean_step_s=step_s * slower)
    )
    return placement, ttft_s, step_s * slower


def test_predictions_of_a_node_that_is_not_as_its_profile_come_true():
    view = make_view(1, 1, COST)
    metrics = ConductorMetrics(process_registry(), "m")
    clock = ManualClock()
    observer = Observer(metrics, view, COST, Decisions(COST, SchedulerSettings()), clock)
    for number in range(60):
        placement, ttft_s, tbt_s = serve(observer, view, number, 2.5, clock)
    assert placement.predicted_ttft_s == pytest.approx(ttft_s, rel=0.02)
    assert placement.predicted_tbt_s == pytest.approx(tbt_s, rel=0.02)

    def sample(name, **labels):
        return metrics.registry.get_sample_value(name, labels)

    assert sample("conductor_prediction_correction_ratio", node="p0", term="prefill") == pytest.approx(2.5)
    for term in ("ttft", "prefill", "tbt"):
        assert sample("conductor_prediction_error_ratio_count", term=term) == 60
        assert sample("conductor_prediction_error_ratio_bucket", term=term, le="0.02") > 50


def test_a_prompt_that_went_on_elsewhere_is_done_when_it_is_prefilled_and_idle_time_is_not_learned():
    view, clock = make_view(1, 1, COST), ManualClock()
    metrics = ConductorMetrics(process_registry(), "m")
    observer = Observer(metrics, view, COST, Decisions(COST, SchedulerSettings()), clock)
    again, placement = placed(observer, view, "begun.2")
    alone_s = COST.prefill_s(again.num_tokens, 0)
    observer.first_token(None, prefilled(PrefillTimes(0.0, alone_s, 0.0)), again, placement)
    for number in range(20):
        clock.advance(60.0)
        serve(observer, view, number, 1.0, clock)
    assert view.corrections.ratio(placement.prefill_node, "prefill") == pytest.approx(1.0)
    ttfts = {"term": "ttft"}
    assert metrics.registry.get_sample_value("conductor_prediction_error_ratio_count", ttfts) == 20


def test_of_a_node_that_left_nothing_is_kept_or_shown_though_its_requests_end_after_it():
    view, metrics = make_view(1, 0, COST), ConductorMetrics(process_registry(), "m")
    clock = ManualClock()
    observer = Observer(metrics, view, COST, Decisions(COST, SchedulerSettings()), clock)
    for number in range(3):
        view.add_node(make_info(f"d{number}", Role.DECODE), 0.0)
        serve(observer, view, number, 2.0, clock)
        request, placement = placed(observer, view, f"lost{number}")
        view.remove_node(placement.decode_node)
        observer.ended(request.request_id, Actual(9.0, "LostError", mean_tbt_s=1.0, mean_step_s=1.0))
    assert {node_id for node_id, _ in view.corrections.ratios()} == {"p0"}
    told = exposition(metrics.registry).decode()
    assert 'node="p0"' in told
    assert 'node="d' not in told
