"""Several conductors on the same nodes: what is simulated holds together, and is as it is live."""

import asyncio
import contextlib
import dataclasses
import random
from statistics import fmean

import pytest

from base.attach import STATE_GAP_S, WAKE_DELAY_S
from base.metrics import ConductorMetrics, process_registry
from base.request import NodeId, Request, RequestId, Role, SamplingParams, StopParams
from bench.stub_cluster import BLOCK_SIZE, stub_info
from bench.stub_node import StubNode
from bench.virtual_cluster import COST
from bench.virtual_loop import run as run_virtually
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.decision_lines import Shared
from conductor.placing.explain import Decisions
from conductor.placing.placement import UNBOUNDED
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.conformance import read_run
from conductor.replay.faults import NodeFault
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import Trace
from conductor.serving.decision_log import DecisionLog
from conductor.serving.dispatch import Dispatcher
from conductor.serving.membership import Membership
from conductor.serving.nodes import NodeSession
from conductor.serving.observer import Observer
from tests.conductor.replay.builders import run, small_trace

SETTINGS = SchedulerSettings(fetches=False, ahead_s=0.5)
SERVICE = SchedulerSettings(ttft_headroom=0.85, ahead_s=0.5, roles_follow=True)
COUNT = 1_200
# a stub's blocks are 10,000, it forgets none that it told of, and what it hands over takes no time
PROFILE = dataclasses.replace(
    COST.profile, device_kv_tokens=320_000, host_kv_tokens=1 << 30, transfer_bytes_per_s=1e15
)


def prompts(rng, count):
    """Half of them go on from an earlier one."""
    made = []
    for _ in range(count):
        tokens = tuple(rng.randrange(20_000) for _ in range(rng.randrange(40, 800)))
        made.append((rng.choice(made) + tokens)[:3_000] if made and rng.random() < 0.5 else tokens)
    return made


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


async def attached(memberships, sessions, said, node, clock) -> None:
    """Be the streams between a stub node and its conductors, each of which hears what it is told."""
    loop, stated_at_s = asyncio.get_running_loop(), [0.0] * len(sessions)

    def state(number: int) -> None:
        if clock.now_s() >= stated_at_s[number] + STATE_GAP_S:
            stated_at_s[number] = clock.now_s()
            memberships[number].heartbeat(sessions[number], node.heartbeat(), clock.now_s())

    def deliver(item) -> None:
        events = node.kv_events()
        for number, (membership, session) in enumerate(zip(memberships, sessions, strict=True)):
            if events:
                membership.kv_events(session, events)
            session.deliver([item])  # of a request that is another's: it goes nowhere
            state(number)

    node.send = lambda item: loop.call_soon(deliver, item)
    for membership, session in zip(memberships, sessions, strict=True):
        membership.join(session)
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await said.wait()
        said.clear()
        for session in sessions:
            node.receive(session.take_outgoing())
        for number in range(len(sessions)):
            loop.call_later(WAKE_DELAY_S, state, number)


def live_logs(folder, rate: float):
    """Write the decision logs of two conductors that share two nodes of each role and take turns."""
    logs = [DecisionLog(folder / f"{name}", Shared(COST.profile, SETTINGS, "m"), 1 << 30) for name in "ab"]

    async def answer(dispatcher, number, tokens, max_tokens) -> None:
        stop = StopParams(max_tokens)
        asked = Request(RequestId(f"r{number}"), tokens, SamplingParams(), stop, None, UNBOUNDED, 0)
        async for _ in dispatcher.generate(asked):
            pass

    async def scenario(clock) -> None:
        views = [ClusterView(COST, BLOCK_SIZE) for _ in logs]
        memberships = [Membership("m", view, clock) for view in views]
        async with asyncio.TaskGroup() as nodes:
            tasks = []
            for number in range(4):
                roles = frozenset({Role.PREFILL if number < 2 else Role.DECODE})
                node, said = StubNode(COST, 10_000, BLOCK_SIZE), asyncio.Event()
                sessions = [
                    NodeSession(stub_info(f"n{number}", roles, "m"), lambda *_, said=said: said.set())
                    for _ in logs
                ]
                tasks += [attached(memberships, sessions, said, node, clock), node.run()]
            tasks = [nodes.create_task(task) for task in tasks]
            dispatchers = []
            for membership, view, log in zip(memberships, views, logs, strict=True):
                metrics = ConductorMetrics(process_registry(), "m")
                observer = Observer(metrics, view, COST, Decisions(COST, SETTINGS, log), clock)
                dispatchers.append(Dispatcher(membership, view, COST, [observer], clock, SETTINGS))
            rng, due_s = random.Random(1), clock.now_s()
            async with asyncio.TaskGroup() as group:
                for number, tokens in enumerate(prompts(rng, COUNT)):
                    dispatcher = dispatchers[number % len(dispatchers)]
                    group.create_task(answer(dispatcher, number, tokens, rng.randrange(4, 60)))
                    due_s += rng.expovariate(rate)
                    await asyncio.sleep(due_s - clock.now_s())
            for task in tasks:
                task.cancel()

    run_virtually(scenario)
    for log in logs:
        log.close()
    return [read_run(folder / name) for name in "ab"]


def simulated_s(trace: Trace, conductors: int) -> float:
    """The mean TTFT of a trace on the nodes of `live_logs`."""
    options = ClusterOptions(
        2, 2, trace.block_size, "local", settings=SETTINGS, learns=True, conductors=conductors
    )
    return fmean(simulate(Plan(trace, CostModel(PROFILE), options)).outcomes.ttft_s)


@pytest.mark.parametrize(("rate", "error", "cost"), [(10.0, 0.15, 1.0), (16.0, 0.25, 1.1)])
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
