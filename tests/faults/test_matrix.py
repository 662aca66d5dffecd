"""Each row of the fault matrix, with a few faults: `python -m bench.faults` injects hundreds."""

import pytest

from bench.faults.kills import decode_killed, decode_stopped, prefill_killed
from bench.faults.leaving import clients_leave
from bench.faults.published import rolling_restart

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.mark.parametrize("row", [prefill_killed, decode_killed, decode_stopped])
def test_nodes_that_are_killed_or_stopped_cost_nothing_but_time(row):
    counted = row(3)
    assert counted["injected"] == 3
    missed = ("failed", "wrong_tokens", "repeated_tokens", "leaked_blocks")
    assert {name: counted[name] for name in missed} == dict.fromkeys(missed, 0)


def test_clients_that_leave_leave_no_block():
    counted = clients_leave(8)
    assert (counted["later_than_1_s"], counted["leaked_blocks"]) == (0, 0)


def test_nodes_restarted_in_turn_fail_no_request():
    (counted,) = rolling_restart(1)["runs"]
    assert (counted["failed"], counted["wrong_tokens"], counted["leaked_blocks"]) == (0, 0, 0)
