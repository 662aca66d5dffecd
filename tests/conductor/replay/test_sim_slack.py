"""Bounds of a simulated batch."""

from base.step_budget import GapBounds
from conductor.replay.sim_request import SimRequest
from conductor.replay.sim_slack import BatchSlack
from conductor.replay.trace import TraceRequest


def test_bounds_of_those_who_left_are_forgotten_however_many_kinds_there_were() -> None:
    slack = BatchSlack()
    for number in range(1, 50):
        request = SimRequest(TraceRequest(0.0, 10, 5, range(1)), number)
        request.gap_bounds = GapBounds(0.01 + number * 1e-4)
        request.steps_left, request.join_number, request.finish_step = 4, number, number + 5
        slack.joined(request, number, is_new=False)
        assert slack.left_s(number, 0.001, 0.0, ())[0] < 1.0
        request.join_number = 0
        slack.left(request)
        slack.left_s(number, 0.001, 0.0, ())
        assert not slack._heaps
