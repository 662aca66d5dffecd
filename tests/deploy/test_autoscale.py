"""A cluster is resized to what would have served its last hour: the smallest that does, a step at a time."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from base.config import ClusterConfig, SloConfig
from base.errors import ConfigError
from base.request import Slo
from conductor.placing.decision_lines import Shared
from conductor.placing.decisions import Actual, decision
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.serving.decision_log import DecisionLog
from deploy import cli
from deploy.autoscale import MOVES, STEPS, Bounds, Sizes, advised, last_of_log, replayed_share
from tests.conductor.builders import make_cost, make_request, make_view

POOL = st.integers(1, 9)
SIZES = st.builds(Sizes, POOL, POOL)


def needing(prefill, decode):
    """The share served of a load that needs so much: falls with what is missing."""
    return lambda sizes: min(1.0, sizes.prefill / prefill) * min(1.0, sizes.decode / decode)


@given(now=SIZES, need=SIZES)
def test_step_by_step_it_comes_to_the_smallest_cluster_that_serves(now, need):
    bounds = Bounds(2, 18, 1.0)
    for _ in range(20):
        wanted = advised(now, bounds, needing(need.prefill, need.decode), False).wanted
        if wanted == now:
            break
        assert (wanted.prefill - now.prefill, wanted.decode - now.decode) in (*STEPS, *MOVES)
        now = wanted
    assert now == need


@given(now=SIZES, need=st.integers(2, 18))
def test_where_roles_follow_it_comes_to_the_fewest_nodes_and_moves_none(now, need):
    bounds = Bounds(2, 18, 1.0)
    for _ in range(20):
        advice = advised(now, bounds, lambda sizes: min(1.0, sizes.nodes / need), True)
        assert {(at.prefill - now.prefill, at.decode - now.decode) for at in advice.served} <= {*STEPS}
        if advice.wanted == now:
            break
        now = advice.wanted
    assert now.nodes == need


@given(now=SIZES, need=SIZES, least=st.integers(2, 9), more=st.integers(0, 9))
def test_no_step_leaves_what_is_allowed(now, need, least, more):
    bounds = Bounds(least, least + more, 0.9)
    wanted = advised(now, bounds, needing(need.prefill, need.decode), False).wanted
    assert min(wanted.prefill, wanted.decode) >= 1
    assert bounds.min_nodes <= wanted.nodes <= bounds.max_nodes or wanted == now


def test_where_nothing_is_enough_the_best_is_taken_and_among_equals_what_there_is():
    bounds = Bounds(2, 4, 0.99)
    for follows in (True, False):
        assert advised(Sizes(2, 2), bounds, needing(8, 2), follows).wanted == Sizes(2, 2)
        assert advised(Sizes(1, 2), bounds, needing(8, 2), follows).wanted == Sizes(2, 2)
        assert advised(Sizes(1, 1), bounds, lambda _: 0.0, follows).wanted == Sizes(1, 1)


def write_log(path, arrivals_s, max_bytes=1 << 30):
    """A log of requests that arrive at these moments, each with a prompt of its own."""
    cost, settings = make_cost(), SchedulerSettings()
    log = DecisionLog(path, Shared(cost.profile, settings, "m"), max_bytes)
    for number, at_s in enumerate(arrivals_s):
        view = make_view(1, 1, cost)
        asked = make_request(f"r{number}.1", 10, 100 * number, slo=Slo())
        log.decision(decision(asked, view, place(asked, view, cost, at_s, settings), at_s, at_s))
        log.outcome(asked.request_id, Actual(at_s + 5, "finished", num_output_tokens=50))
    log.close()


def kept(path, last_s):
    rows = [json.loads(line) for line in last_of_log(path, last_s)]
    return [row["request_id"] for row in rows if row["kind"] == "decision"], rows


def test_the_last_hour_is_what_arrived_in_it_with_its_outcomes(tmp_path):
    write_log(tmp_path / "log", [0.0, 100.0, 3000.0, 3650.0])
    asked, rows = kept(tmp_path / "log", 3600.0)
    assert asked == ["r1.1", "r2.1", "r3.1"]
    assert [row["kind"] for row in rows] == ["conductor", *["decision", "outcome"] * 3]


def test_the_hour_may_have_begun_in_the_file_before(tmp_path):
    write_log(tmp_path / "two", [0.0, 100.0])
    two_requests = (tmp_path / "two").stat().st_size
    write_log(tmp_path / "log", [0.0, 100.0, 200.0], max_bytes=two_requests)
    assert (tmp_path / "log.1").exists()
    assert len(kept(tmp_path / "log", 3600.0)[0]) > len(kept(tmp_path / "log", 1.0)[0])


@pytest.mark.parametrize("num_rows", range(2, 8))
def test_a_request_may_end_in_the_file_after_the_one_where_it_was_decided(tmp_path, num_rows):
    write_log(tmp_path / "whole", [0.0, 100.0, 200.0])
    header, *rows = (tmp_path / "whole").read_text().splitlines()
    (tmp_path / "log.1").write_text("\n".join([header, *rows[: num_rows - 1]]))
    (tmp_path / "log").write_text("\n".join([header, *rows[num_rows - 1 :]]))
    assert kept(tmp_path / "log", 3600.0) == kept(tmp_path / "whole", 3600.0)


def test_a_file_of_another_start_is_left_out(tmp_path):
    write_log(tmp_path / "log", [9000.0, 9001.0])
    write_log(tmp_path / "log", [10.0, 11.0])
    assert (tmp_path / "log.1").exists()
    assert len(kept(tmp_path / "log", 3600.0)[0]) == 2


@pytest.mark.parametrize("content", [None, "", "{", "{}\n", '{"kind": "conductor"}\n', "[]\n[]\n"])
def test_a_log_that_is_none_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "log").write_text(content)
    with pytest.raises(ConfigError, match="decision_log"):
        list(last_of_log(tmp_path / "log", 60.0))


@pytest.mark.full
def test_a_replay_says_what_more_nodes_would_have_served(tmp_path):
    write_log(tmp_path / "log.jsonl", [0.1 * number for number in range(60)])
    config = ClusterConfig(profile="a800-llama70b", slo=SloConfig(ttft_s=3.0, tbt_s=1.0))
    few, many = (replayed_share(tmp_path / "log.jsonl", config, Sizes(n, 2)) for n in (1, 8))
    assert 0 <= few < many <= 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("slo: {ttft_s: 1.0}", "scheduler.decision_log"),
        ("scheduler: {decision_log: /tmp/x}", "slo"),
        ("slo: {ttft_s: 1.0}\nscheduler: {decision_log: /tmp/x}\nhosts: together", "together"),
        ("slo: {ttft_s: 1.0}\nscheduler: {decision_log: /tmp/x}\nserver: {conductors: 2}", "conductors"),
    ],
)
def test_a_cluster_that_cannot_be_judged_is_refused(tmp_path, capsys, text, told):
    (tmp_path / "c.yaml").write_text(text + "\n")
    with pytest.raises(SystemExit) as caught:
        cli.main(["autoscale", "-c", str(tmp_path / "c.yaml")])
    assert caught.value.code == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        "--share=2",
        "--share=-1",
        "--min=1",
        "--max=0",
        "--last=-1",
        "--every=-1",
        "--every=1e10",
        "--min=9 --max=2",
    ],
)
def test_limits_that_cannot_be_are_refused_with_their_option(tmp_path, capsys, wrong):
    with pytest.raises(SystemExit) as caught:
        cli.main(["autoscale", "-c", str(tmp_path / "c.yaml"), *wrong.split()])
    assert caught.value.code in (1, 2)
    assert wrong.partition("=")[0] in capsys.readouterr().err
