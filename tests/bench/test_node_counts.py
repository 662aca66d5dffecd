"""What nodes did of a load, from what they count."""

import pytest

from bench.goodput import plot
from bench.load_report import Goodput
from bench.node_counts import NodeCounts, figures_between, node_counts

METRICS = """
# TYPE prefill_step_seconds histogram
prefill_step_seconds_sum {steps}
# TYPE decode_step_seconds histogram
decode_step_seconds_sum 0.5
# TYPE prefill_exposed_seconds histogram
prefill_exposed_seconds_sum{{what="transfer"}} 0.006
prefill_exposed_seconds_count{{what="transfer"}} 2
prefill_exposed_seconds_sum{{what="load"}} 9
# TYPE prefill_tokens counter
prefill_tokens_total{{source="computed"}} 700
prefill_tokens_total{{source="matched"}} 5000
"""


class FakeCluster:
    def metrics(self) -> dict[str, str]:
        return {"prefill-0": METRICS.format(steps=1.5), "prefill-1": METRICS.format(steps=3.5)}


def test_nodes_stand_apart_for_their_time_and_added_for_all_else():
    counts = node_counts(FakeCluster())
    assert counts == NodeCounts({"prefill-0": 2.0, "prefill-1": 4.0}, 0.012, 4.0, 1400.0)


def test_busy_time_transfers_and_waste_are_of_one_load():
    before = NodeCounts({"prefill-0": 1.0, "decode-0": 2.0}, 0.010, 4, 1_000)
    after = NodeCounts({"prefill-0": 6.0, "prefill-1": 3.0, "decode-0": 10.0}, 0.016, 7, 2_000)
    load = {"duration": 10.0, "total_input_tokens": 1_200, "cached_input_tokens": 300}
    found = figures_between(before, after, load)
    assert found["busy_share"] == {"decode": 0.8, "prefill": 0.4}
    assert found["hit_rate"] == 0.25
    assert found["exposed_transfer_ms"] == pytest.approx(2.0)
    assert found["wasted_prefill_share"] == pytest.approx(0.1)
    assert figures_between(after, after, load)["wasted_prefill_share"] == 0.0


def test_a_plot_has_a_line_for_each_shape():
    results = [
        {"shape": name, "tried": [{"rate": 1.0, "shares": [1.0]}, {"rate": 2.0, "shares": [0.5]}]}
        for name in ("2c", "1p1d")
    ]
    drawn = plot(results, [Goodput(2.0, 0.01)], 0)
    assert drawn.startswith("<svg xmlns=")
    assert drawn.count("<polyline") == 2
    assert "within 2 s and 10 ms" in drawn
