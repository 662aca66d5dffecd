"""Several conductors on the same nodes: what is simulated holds together, and is as it is live."""

import asyncio
import dataclasses
import random
from statistics import fmean

import pytest

from base.request import NodeId
from bench.conformance_virtual import NUM_BLOCKS, STUB, even, offer
from bench.virtual_cluster import MODEL_ID, node_infos, virtual_conductors
from bench.virtual_loop import run as run_virtually
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.decision_lines import Shared
from conductor.placing.placement import UNBOUNDED
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.profiles.reader import load_profile
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.conformance import SHIPPED_ENGINE, read_run
from conductor.replay.faults import NodeFault
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import Trace, TraceRequest
from conductor.serving.decision_log import DecisionLog
from tests.conductor.replay.builders import run, small_trace

SETTINGS = SchedulerSettings(fetches=False, ahead_s=0.5)
SERVICE = SchedulerSettings(ttft_headroom=0.85, ahead_s=0.5, roles_follow=True)
COUNT = 1_200


def check_ends(cluster, count: int) -> None:
    """Every request ended once, and no conductor believes that anything is left."""
    outcomes = cluster.outcomes
    assert outcomes.num_arrived == count == outcomes.num_completed + outcomes.num_rejected
    for view in cluster.views:
        assert (view.num_in_flight, view.num_queued, view.running_sequences) == (0, 0, 0)
        view.prefill_order.check()
        view.index.check()
        for node in view.nodes():
            assert (node.foreign_sequences, node.foreign_queue_s) == (0, 0.0)
            assert view.index.num_blocks(node.slot) == len(cluster._nodes[node.info.node_id].cache)


@pytest.mark.parametrize("settings", [SchedulerSettings(reject=RejectPolicy.NONE), SERVICE])
def test_every_request_ends_once_and_all_conductors_know_it(settings) -> None:
    cluster = run(small_trace(300, 6.0), "3P3D", settings=settings, conductors=3, learns=True)
    check_ends(cluster, 300)
    kinds = [{node.info.node_id: node.info.roles for node in view.nodes()} for view in cluster.views]
    assert kinds[0] == kinds[1] == kinds[2], "they hear of roles by reports"


def test_a_node_that_dies_is_lost_to_every_conductor_and_comes_back_to_each() -> None:
    faults = (NodeFault(10.0, NodeId("p0"), 20.0), NodeFault(15.0, NodeId("d1"), 20.0))
    cluster = run(small_trace(300, 5.0), "3P3D", conductors=2, faults=faults)
    check_ends(cluster, 300)
    assert cluster.outcomes.num_retried > 0
    assert [len(view.nodes()) for view in cluster.views] == [6, 6]


def test_conductors_that_hear_of_each_other_are_little_later_than_one() -> None:
    trace = small_trace(600, 1.6)
    one, two, four = (fmean(run(trace, "4P4D", conductors=count).outcomes.ttft_s) for count in (1, 2, 4))
    assert one < two
    assert max(two, four) < 1.35 * one


def test_conductors_that_choose_at_random_do_not_choose_alike() -> None:
    ours = run(small_trace(200, 2.0), "4P4D", conductors=2, policy="random").outcomes
    chosen = dict(zip(ours.number, ours.prefill_node, strict=True))
    alike = [chosen[number] == chosen[number + 1] for number in range(0, 200, 2)]
    assert sum(alike) < 50


def test_a_prompt_that_decodes_where_it_is_computed_is_reported_once(monkeypatch) -> None:
    beats = []
    monkeypatch.setattr(ClusterView, "heartbeat", lambda view, node_id, beat, now_s: beats.append(beat))
    trace = Trace("one", 512, small_trace(2).requests[:1])
    cluster = run(trace, "1P0D", conductors=2)
    held = max(beat.num_held_blocks for beat in beats)
    asked = trace.requests[0].num_tokens + trace.requests[0].output_tokens
    assert cluster.outcomes.num_completed == 1
    assert 0 < held <= asked // 512 + 1


def test_who_waits_for_a_place_in_a_full_batch_is_reported_to_the_other_conductors(monkeypatch) -> None:
    beats = []
    monkeypatch.setattr(ClusterView, "heartbeat", lambda view, node_id, beat, now_s: beats.append(beat))
    trace = Trace("burst", 512, [row._replace(arrival_s=0.0) for row in small_trace(8).requests])
    run(trace, "4P1D", conductors=2, max_batch=2)
    decoding = [beat for beat in beats if beat.num_step_rows > 2]
    assert decoding, "nobody waited for a place"
    least = min(row.num_tokens for row in trace.requests)
    assert all(beat.num_context_tokens >= beat.num_step_rows * least for beat in decoding)
    assert all(beat.num_held_blocks >= beat.num_context_tokens // 512 for beat in decoding)


def test_a_node_reports_no_more_kv_than_it_has_room_for_when_it_preempts(monkeypatch) -> None:
    beats, capacity = [], 60_000
    taken_in = ClusterView.heartbeat

    def heartbeat(view, node_id, beat, now_s):
        beats.append(beat)
        return taken_in(view, node_id, beat, now_s)

    monkeypatch.setattr(ClusterView, "heartbeat", heartbeat)
    profile = dataclasses.replace(load_profile("a800-llama70b"), device_kv_tokens=capacity)
    rows = [row for row in small_trace(60, 4.0).requests if row.num_tokens < 8_000][:40]
    trace = Trace("growing", 512, [row._replace(output_tokens=1_500) for row in rows])
    settings = SchedulerSettings(reject=RejectPolicy.NONE)
    options = ClusterOptions(4, 1, 512, settings=settings, conductors=2)
    cluster = simulate(Plan(trace, CostModel(profile), options, 1.0))
    assert sum(node.engine.num_preemptions for node in cluster.nodes), "nobody was preempted"
    # whole contexts, of which shared blocks are in room that is taken once
    assert max(beat.num_context_tokens - 512 * beat.num_shared_blocks for beat in beats) <= capacity
    assert max(beat.num_held_blocks for beat in beats) <= capacity // 512


def test_the_others_hear_of_prompts_that_a_step_leaves_half_computed(monkeypatch) -> None:
    queued: list[int] = []
    taken_in = ClusterView.heartbeat

    def heartbeat(view, node_id, beat, now_s):
        queued.append(beat.num_queued_tokens)
        return taken_in(view, node_id, beat, now_s)

    monkeypatch.setattr(ClusterView, "heartbeat", heartbeat)
    rows = [TraceRequest(0.0, 1_500, 2, range(3 * at, 3 * at + 3)) for at in range(3)]
    settings = SchedulerSettings(reject=RejectPolicy.NONE)
    options = ClusterOptions(1, 1, 512, settings=settings, conductors=2, chunk_tokens=1_000)
    simulate(Plan(Trace("three", 512, rows), CostModel(load_profile("h200-llama8b")), options))
    assert list(dict.fromkeys(filter(None, queued))) == [4_500, 3_500, 2_500, 1_500, 500]


def live_logs(folder, rate: float):
    """Write the decision logs of two conductors that share two nodes of each role and take turns."""
    logs = [DecisionLog(folder / name, Shared(STUB, SETTINGS, MODEL_ID), 1 << 30) for name in "ab"]
    nodes = node_infos(2, 2, num_blocks=NUM_BLOCKS)

    async def scenario(clock) -> None:
        async with (
            virtual_conductors(clock, SETTINGS, nodes, logs, CostModel(STUB)) as conductors,
            asyncio.TaskGroup() as group,
        ):
            dispatchers = [dispatcher for dispatcher, _ in conductors]
            await offer(even(rate, COUNT, random.Random(1)), dispatchers, UNBOUNDED, clock, group)

    run_virtually(scenario)
    for log in logs:
        log.close()
    return [read_run(folder / name) for name in "ab"]


def simulated_s(trace: Trace, conductors: int) -> float:
    """The mean TTFT of a trace on the nodes of `live_logs`."""
    options = ClusterOptions(
        2,
        2,
        trace.block_size,
        "local",
        settings=SETTINGS,
        learns=True,
        conductors=conductors,
        chunk_tokens=SHIPPED_ENGINE.prompt_tokens(on_gpu=False),
        max_batch=SHIPPED_ENGINE.sequences(on_gpu=False),
        decode_caches=True,
    )
    return fmean(simulate(Plan(trace, CostModel(STUB), options)).outcomes.ttft_s)


@pytest.mark.full
@pytest.mark.parametrize(("rate", "error", "cost"), [(10.0, 0.1, 1.0), (16.0, 0.1, 1.1)])
def test_two_live_dispatchers_on_shared_nodes_answer_as_simulated(tmp_path, rate, error, cost) -> None:
    runs = live_logs(tmp_path, rate)
    served = sorted((each for run_ in runs for each in run_.served), key=lambda each: each.made.arrived_at_s)
    assert len(served) == COUNT
    trace = dataclasses.replace(runs[0], served=served).trace()
    live_s = fmean(each.actual.ttft_s for each in served)
    one_s, two_s = simulated_s(trace, 1), simulated_s(trace, 2)
    assert abs(two_s / live_s - 1) < error
    # what two conductors cost is seen in both
    assert min(live_s, two_s) > cost * one_s
