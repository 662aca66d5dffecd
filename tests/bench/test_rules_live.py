"""Rules that are compared on real nodes: they get the same loads in turn, and each is what its name says."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

import pytest

from bench.rules_conductor import OnePace, uncharged
from bench.rules_live import (
    LOADS,
    LONG_PROMPT,
    SHORT_PROMPT,
    cluster_config,
    in_turns,
    prompts,
    sessions,
    summary,
)
from bench.workload import LoadRequest
from conductor.placing import cluster_view
from conductor.placing.cost_model import CostModel
from conductor.placing.prefill_policies import least_cost
from conductor.placing.scheduler_settings import DEFAULT_SETTINGS
from conductor.profiles.reader import load_profile
from tests.conductor.builders import make_request, make_view


def turns(first: LoadRequest) -> list[list[int]]:
    found: list[list[int]] = []
    turn: LoadRequest | None = first
    while turn is not None:
        found.append(list(turn.token_ids))
        turn = turn.next_turn
    return found


def test_each_rule_is_first_and_last_as_often_as_any_other() -> None:
    rules = ["global", "alike", "dynamo"]
    orders = [in_turns(rules, number) for number in range(3)]
    for place in zip(*orders, strict=True):
        assert sorted(place) == sorted(rules)


def test_a_round_is_the_same_for_every_rule_and_shares_no_prompt_with_another_round() -> None:
    first, again, other = (list(prompts(30, 1.0, number)) for number in (1, 1, 2))
    assert first == again
    assert all(SHORT_PROMPT <= len(each.token_ids) <= LONG_PROMPT for each in first)
    heads = [{tuple(each.token_ids[:32]) for each in load} for load in (first, other)]
    assert heads[0].isdisjoint(heads[1])


def test_an_agents_prompts_grow_and_are_short_enough_for_the_cache() -> None:
    load = LOADS["short"]
    longest = 0
    for first in sessions(load.requests, load.rate, 1):
        said = turns(first)
        for before, after in pairwise(said):
            whole = len(before) // 32 * 32
            assert after[:whole] == before[:whole]
            assert len(after) > len(before)
        longest = max(longest, len(said[-1]))
    token_bytes = load_profile("cpu-smollm2").kv_token_bytes
    assert longest * token_bytes < load.kv_cache_gib * 2**30


@pytest.mark.parametrize("rule", ["global", "local", "uncharged", "alike", "dynamo"])
def test_a_rule_is_the_policy_of_its_clusters_conductor(rule: str) -> None:
    config = cluster_config(LOADS["short"], rule).scheduler
    assert config.policy == ("global" if rule == "local" else rule)
    assert config.fetch == (rule != "local")


def test_with_one_pace_what_is_measured_of_a_node_is_believed_of_all() -> None:
    with patch.object(cluster_view, "Corrections", OnePace):
        view = make_view(2, 1)
    view.corrections.observe("p0", "prefill", 1.0, 3.0)
    assert view.corrections.ratio("p1", "prefill") == pytest.approx(3.0)
    for name in ("p0", "p1"):
        assert view.node(name).learned.prefill.corrected_s(2.0) == pytest.approx(6.0)
    assert view.node("p1").learned.decode.ratio == 1.0


def test_a_copy_costs_nothing_by_the_uncharged_rule() -> None:
    cost, view = CostModel(load_profile("cpu-smollm2")), make_view(2, 1)
    view.copy_price.block_s = 5.0
    asked = make_request("r", 4)
    found = uncharged(asked, view.index.match(asked.chain), view, cost, DEFAULT_SETTINGS, 0.0)
    assert view.copy_price.block_s == 0.0
    again = least_cost(asked, view.index.match(asked.chain), view, cost, DEFAULT_SETTINGS, 0.0)
    assert (found.node, found.cost_s) == (again.node, again.cost_s)


def test_a_summary_is_of_all_rounds_and_of_rounds_beside_ours() -> None:
    def came(*ttft_s: float) -> dict[str, object]:
        return {"ttft_s": list(ttft_s), "cached_tokens": 5, "prompt_tokens": 10, "failed": 0}

    rounds = [{"global": came(1.0, 1.0), "other": came(2.0, 4.0)}, {"global": came(2.0), "other": came(2.0)}]
    ours, other = summary(rounds)
    assert ours["mean_to_ours"] == 1.0
    assert other["mean_to_ours_by_round"] == [3.0, 1.0]
    assert other["ttft_mean_s"] == pytest.approx(8 / 3)
    assert other["hit_rate"] == 0.5
    assert other["served"] == 3
