"""Regimes: rules meet the same requests, seeds are apart, and losses come first."""

import itertools
import json

import pytest

from bench.papers.peers import RULES
from bench.regimes.command import SEEDS, Compared, Score, compare, main, rows_of
from bench.regimes.sessions import AgentKind, MixKind, agents, mix
from bench.regimes.table import Regime, regimes
from conductor.placing.scheduler_settings import RejectPolicy
from conductor.replay.trace import turns
from tests.conductor.replay.builders import SHARED_TRACE

ALL = regimes(SHARED_TRACE.parent)


def test_there_are_forty_regimes_or_more_and_each_has_a_name_of_its_own() -> None:
    assert len({each.name for each in ALL}) == len(ALL) >= 40


def test_seeds_that_the_rule_is_tuned_on_are_not_those_that_it_is_tested_on() -> None:
    assert not set(SEEDS["tune"]) & set(SEEDS["test"])
    assert len(SEEDS["tune"]) == 2


@pytest.mark.parametrize("is_closed", [True, False])
def test_an_agents_prompt_begins_with_the_whole_blocks_of_the_one_before(is_closed: bool) -> None:
    trace = agents(AgentKind(), 60, 1.0, 3, is_closed)
    rows = [turn for first in trace.requests for turn in turns(first)]
    assert len(rows) >= 60
    for row in rows:
        assert len(row.chain) == -(-row.num_tokens // trace.block_size)
    if is_closed:
        for first in trace.requests:
            session = turns(first)
            for before, after in itertools.pairwise(session):
                whole = before.num_tokens // trace.block_size
                assert list(after.chain[:whole]) == list(before.chain[:whole])
                assert after.num_tokens > before.num_tokens + before.output_tokens
    else:
        moments = [row.arrival_s for row in trace.requests]
        assert moments == sorted(moments)


def test_a_seed_makes_one_trace_and_another_seed_another() -> None:
    kind = MixKind(200, 100, shared_share=0.5)
    first, again, other = (mix(kind, 50, 5.0, seed).requests for seed in (1, 1, 2))
    assert first == again != other
    for row in first:
        assert len(row.chain) == -(-row.num_tokens // 512)


def test_a_slow_node_is_slow_and_what_the_conductor_believes_is_another_profile() -> None:
    regime = Regime(
        "slow", lambda requests, seed: mix(MixKind(900, 50), requests, 2.0, seed), (2, 2), slow=3.0
    )
    plan = regime.plan(regime.make(10, 1), "global", 1)
    slow, fast = plan.options.nodes(plan.cost.profile)[:2]
    assert slow.profile.prefill_token_s == pytest.approx(3 * fast.profile.prefill_token_s)
    assert slow.profile.transfer_bytes_per_s == fast.profile.transfer_bytes_per_s
    assert plan.options.believed is None
    assert plan.options.node_profile(plan.cost.profile) is plan.cost.profile
    wrong = Regime("wrong", regime.make, (2, 2), believed=2.0).plan(regime.make(10, 1), "dynamo", 1)
    believed = wrong.options.believed
    assert believed.decode_fixed_s == pytest.approx(2 * wrong.cost.profile.decode_fixed_s)


def test_every_rule_meets_all_requests_of_a_regime() -> None:
    regime = Regime("small", lambda requests, seed: mix(MixKind(900, 50), requests, 2.0, seed), (2, 2))
    compared = compare(regime, 40, (1, 2))
    assert {each.rule for each in compared.others} == {*RULES, "local", "load"}
    for each in (*compared.others, compared.ours):
        assert each.goodput == 1.0
        assert each.rejected == 0.0


def test_another_kind_of_rejection_is_a_rival_of_ours() -> None:
    regime = Regime(
        "reject", lambda *_: mix(MixKind(900, 50), 9, 2.0, 1), (2, 2), reject=RejectPolicy.PREDICT
    )
    plans = {rule: regime.plan(regime.make(9, 1), rule, 1).options for rule in ("global", "late", "early")}
    assert {plan.policy for plan in plans.values()} == {"global"}
    assert [plan.settings.reject.value for plan in plans.values()] == ["predict", "late", "early"]


def test_the_regime_that_we_lose_by_most_is_the_first_row() -> None:
    def scored(goodput: float) -> Score:
        return Score("x", goodput, 1.0, 2.0, 0.0, 0.0, goodput)

    won = Compared("won", scored(0.9), (scored(0.5), scored(0.4)))
    lost = Compared("lost", scored(0.2), (scored(0.7),))
    rows = rows_of([won, lost])
    assert [row[0] for row in rows[1:]] == ["lost", "won"]
    assert [row[-1] for row in rows[1:]] == ["-50.0%", "+40.0%"]


def test_the_command_writes_its_result(tmp_path, capsys) -> None:
    out = tmp_path / "out.json"
    arguments = ["--smoke", "--only", "short prompts", "--traces", str(tmp_path), "--out", str(out)]
    assert main(arguments) == 0
    result = json.loads(out.read_text())
    assert result["seeds"] == list(SEEDS["test"])
    assert {"goodput", "ttft_mean_s", "ttft_p99_s"} < set(result["regimes"][0]["ours"])
    assert "regimes where another rule" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--only", "no such regime"])
