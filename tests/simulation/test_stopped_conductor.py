"""A conductor that stood still loses no stream, however long it stood and whatever nodes did meanwhile."""

import dataclasses

import pytest

from base.request import Request, RequestId, Role, SamplingParams, StopParams
from conductor.placing.scheduler_settings import SchedulerSettings
from tests.simulation.device import VOCAB
from tests.simulation.plan import Deed, plan_of
from tests.simulation.world import run_seed

NUM_STREAMS = 100
STOPPED_AT_S = 2.0


def stopped_plan(stopped_s, seed):
    """Return a plan of streams that are in progress when their conductor is stopped for so long."""
    plan = plan_of(seed)
    nodes = [
        dataclasses.replace(
            plan.nodes[0],
            name=f"n{number}",
            roles=frozenset({Role.PREFILL} if number < 2 else {Role.DECODE}),
            num_blocks=2_000,
            store_blocks=0,
            disk_slots=0,
        )
        for number in range(4)
    ]
    requests = [
        (
            STOPPED_AT_S - number / NUM_STREAMS,
            Request(
                RequestId(f"r{number}"),
                tuple((number + at) % VOCAB for at in range(30)),
                SamplingParams(temperature=0),
                StopParams(24, stop_token_ids=(number % VOCAB,)),
            ),
            None,
        )
        for number in range(NUM_STREAMS)
    ]
    return dataclasses.replace(
        plan,
        conductors=("c0",),
        nodes=tuple(nodes),
        requests=tuple(requests),
        deeds=(Deed(STOPPED_AT_S, "stop conductor", ("c0",), stopped_s),),
        chances={},
        transfer_faults=(),
        is_tight=False,
        scheduler=SchedulerSettings(ahead_s=float("inf")),
        step_s=0.02,
    )


@pytest.mark.parametrize(
    "stopped_s",
    [10.0, 11.0, 30.0, *(pytest.param(each, marks=pytest.mark.full) for each in (9.0, 15.0, 45.0))],
)
def test_no_stream_is_lost_by_a_conductor_that_stood(stopped_s):
    outcome = run_seed(1, stopped_plan(stopped_s, 1))
    assert outcome.violation is None, outcome.report
    ended = [line for line in outcome.lines if line[1] == "ended"]
    assert len(ended) == NUM_STREAMS
    assert {line[3] for line in ended} <= {"length", "stop"}
