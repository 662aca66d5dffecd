"""Replay's requests are queued, corrected and tried again as the service's are."""

import dataclasses

import pytest

from base.config import SchedulerConfig
from base.request import NodeId, Slo
from conductor.placing.cost_model import CostModel
from conductor.placing.prefill_policies import scheduler_settings
from conductor.placing.retries import MAX_ATTEMPTS
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.profiles.reader import load_profile
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.faults import NodeFault
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import Trace, TraceRequest
from tests.conductor.replay.builders import run, small_trace
from tests.conductor.replay.test_cluster import check_ends

COST = CostModel(load_profile("a800-llama70b"))
FOLLOWING = scheduler_settings(SchedulerConfig())
SHIPPED = dataclasses.replace(FOLLOWING, roles_follow=False)


def burst(count: int, tokens: int = 5_120, output: int = 2) -> Trace:
    blocks = tokens // 512
    rows = [
        TraceRequest(0.1 * at, tokens, output, range(blocks * at, blocks * (at + 1))) for at in range(count)
    ]
    return Trace("burst", 512, rows)


@pytest.mark.parametrize("nodes", ["3P2D", "4P0D"])
@pytest.mark.parametrize("slo", [Slo(), Slo(8.0, 0.06)])
@pytest.mark.parametrize("settings", [FOLLOWING, SHIPPED])
def test_every_request_ends_once_with_the_settings_of_the_service(
    nodes: str, slo: Slo, settings: SchedulerSettings
) -> None:
    cluster = run(small_trace(), nodes, speed=2.0, settings=settings, learns=True, slo=slo)
    check_ends(cluster, 300)
    # who names no bound is refused for want of room alone, where prefill nodes are not what lacks
    reasons = {*cluster.outcomes.rejections} - ({"no_free_blocks"} if settings is FOLLOWING else set())
    assert bool(reasons) == (slo != Slo())
    assert cluster.view.corrections.ratios()


def test_no_more_is_queued_on_a_node_than_is_asked_for_and_nobody_is_later_for_it() -> None:
    queued_s, ttft_s = [], []
    for settings in (SHIPPED, dataclasses.replace(SHIPPED, ahead_s=float("inf"))):
        cluster = run(burst(12), "2P1D", settings=settings, sample_every_s=0.2)
        queued_s.append(max(sample[1] for sample in cluster.samples))
        ttft_s.append(sum(cluster.outcomes.ttft_s))
    prefill_s = COST.prefill_s(5_120, 0)
    assert queued_s[0] <= 2.01 * prefill_s
    assert queued_s[1] > 3 * prefill_s
    assert ttft_s[0] == pytest.approx(ttft_s[1], rel=0.02)


def test_one_too_many_that_waits_is_let_go() -> None:
    cluster = run(burst(12), "1P1D", settings=SHIPPED, max_waiting=4)
    check_ends(cluster, 12)
    # until the last of them comes the node has time for three, half a second of the third ahead
    assert (
        2 * COST.prefill_s(5_120, 0) - SHIPPED.ahead_s < 1.1 < 3 * COST.prefill_s(5_120, 0) - SHIPPED.ahead_s
    )
    assert cluster.outcomes.rejections == {"max_waiting": 12 - 3 - 4}


def test_a_request_waits_for_a_role_and_no_longer_than_it_may() -> None:
    trace = burst(1)
    back, gone = (
        run(trace, "1P1D", faults=(NodeFault(0.0, NodeId("d0"), for_s),)).outcomes for for_s in (4.0, 60.0)
    )
    assert back.num_completed == 1
    assert back.ttft_s[0] >= 4.0
    assert gone.rejections == {"no_decode_node": 1}


def test_a_request_is_lost_as_often_as_it_may_be_and_not_where_it_was_lost_before() -> None:
    trace = burst(1, output=20_000)
    die = tuple(NodeFault(20.0 * at, NodeId(f"d{at - 1}"), 5.0) for at in range(1, MAX_ATTEMPTS + 1))
    lost = run(trace, "1P4D", faults=die).outcomes
    assert lost.rejections == {"lost": 1}
    assert lost.num_retried == MAX_ATTEMPTS
    served = run(trace, "1P4D", faults=die[1:]).outcomes
    assert (served.num_completed, served.num_retried) == (1, 0)


def test_what_is_not_predicted_is_learned() -> None:
    # what fills and empties a pipeline is in no prediction
    trace = Trace(
        "apart", 512, [row._replace(arrival_s=60.0 * at) for at, row in enumerate(burst(20, 20_480).requests)]
    )
    learned, taken = [], []
    for learns in (False, True):
        cluster = run(trace, "4P1D", stages=4, learns=learns)
        learned.append(cluster.view.corrections.ratio("p0", "prefill"))
        taken.append(cluster.outcomes.ttft_s[-1])
    assert learned[0] == 1.0
    assert learned[1] > 1.05
    assert taken[0] == taken[1]


def test_a_short_prompt_that_passes_a_line_is_not_taken_to_have_waited_for_it() -> None:
    """What is in no term is what a request takes beyond the rest: a wait that was none left nothing of it."""
    sizes = [512 if at % 3 else 15_360 for at in range(120)]
    rows = [
        TraceRequest(0.4 * at, tokens, 20, range(100 * at, 100 * at + tokens // 512))
        for at, tokens in enumerate(sizes)
    ]
    cluster = run(Trace("mixed", 512, rows), "1P1D", settings=FOLLOWING, learns=True)
    outcomes = cluster.outcomes
    queue_s = dict(zip(outcomes.number, outcomes.queue_s, strict=True))
    inline = {at for at, node in zip(outcomes.number, outcomes.prefill_node, strict=True) if node == "d0"}
    assert any(at in inline and not queue_s[at] and queue_s[at - 1] > 0.4 for at in range(1, 120))
    added_s = cluster.view.corrections.of(NodeId("d0")).added_s
    assert added_s == pytest.approx(COST.profile.dispatch_s, rel=0.01)


def test_bounds_of_requests_that_wait_are_kept_or_refused_in_time() -> None:
    settings = dataclasses.replace(SHIPPED, reject=RejectPolicy.PREDICT)
    slo = Slo(ttft_slo_s=5.0)
    options = ClusterOptions(1, 1, 512, settings=settings, learns=True, slo=slo)
    cluster = simulate(Plan(burst(20), COST, options))
    check_ends(cluster, 20)
    assert cluster.outcomes.rejections["ttft"] == cluster.outcomes.num_rejected > 5
    assert max(cluster.outcomes.ttft_s) <= slo.ttft_slo_s * 1.02


def test_a_critical_request_goes_before_those_that_wait_and_a_sheddable_one_after() -> None:
    rows = [
        row._replace(priority=1 if at == 9 else -1 if at == 2 else 0)
        for at, row in enumerate(burst(10).requests)
    ]
    outcomes = run(Trace("classes", 512, rows), "1P1D", settings=SHIPPED).outcomes
    began = sorted(
        (arrival_s + queue_s, number)
        for arrival_s, queue_s, number in zip(
            outcomes.arrival_s, outcomes.queue_s, outcomes.number, strict=True
        )
    )
    places = [number for _, number in began]
    assert places[-1] == 2
    assert places.index(9) < 5


def test_a_tenant_with_few_requests_does_not_wait_for_one_with_many() -> None:
    rows = [
        row._replace(tenant="few" if at in (10, 11) else "many") for at, row in enumerate(burst(12).requests)
    ]
    outcomes = run(Trace("tenants", 512, rows), "1P1D", settings=SHIPPED).outcomes
    waited_s = dict(zip(outcomes.number, outcomes.queue_s, strict=True))
    assert max(waited_s[10], waited_s[11]) < min(waited_s[number] for number in (7, 8, 9))


def test_short_answers_do_not_teach_that_steps_are_slow() -> None:
    # a fiftieth of the seconds of such an answer is steps: the rest is messages until it joins
    profile = dataclasses.replace(COST.profile, start_s=0.5, join_s=0.1)
    rows = [TraceRequest(1.0 * at, 1_024, 3 + at % 3, range(2 * at, 2 * at + 2)) for at in range(60)]
    options = ClusterOptions(1, 1, 512, settings=SHIPPED, learns=True)
    cluster = simulate(Plan(Trace("short", 512, rows), CostModel(profile), options))
    assert cluster.outcomes.num_completed == 60
    assert min(cluster.outcomes.mean_tbt_s) > 3 * COST.decode_step_s(2, 4_096)
    assert cluster.view.corrections.ratio(NodeId("d0"), "decode") == pytest.approx(1.0, rel=0.05)


def test_without_a_fair_queue_those_who_wait_are_placed_as_they_came() -> None:
    rows = [
        row._replace(priority=number % 3 - 1, tenant=str(number % 2))
        for number, row in enumerate(burst(12).requests)
    ]
    trace = dataclasses.replace(burst(12), requests=rows)
    begun = []
    for is_fair in (True, False):
        outcomes = run(trace, "1P1D", settings=SHIPPED, is_fair=is_fair).outcomes
        assert outcomes.num_completed == 12
        first_s = [arrival + ttft for arrival, ttft in zip(outcomes.arrival_s, outcomes.ttft_s, strict=True)]
        begun.append([number for _, number in sorted(zip(first_s, outcomes.number, strict=True))])
    assert begun[0] != list(range(12)) == begun[1]


def test_attempts_are_as_many_as_are_asked_for() -> None:
    die = (NodeFault(20.0, NodeId("d0"), 5.0),)
    once, twice = (
        run(burst(1, output=20_000), "1P2D", faults=die, max_attempts=count).outcomes for count in (1, 2)
    )
    assert once.rejections == {"lost": 1}
    assert (twice.num_completed, twice.num_retried) == (1, 1)
