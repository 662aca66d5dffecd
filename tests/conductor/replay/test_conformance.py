"""A live dispatcher's decision log, replayed: what happened and what is simulated are the same.

The live side is the conductor's own dispatcher with stub nodes, in virtual time, so that no
machine's noise is in it. `python -m bench.conformance` does the same over sockets and in real time.
"""

import dataclasses
import itertools
import json
import random
from math import inf

import pytest

from base.config import EngineConfig
from base.errors import ConfigError
from base.request import RequestId, Slo
from bench.conformance import busy_periods
from bench.conformance_virtual import (
    CASES,
    SHIPPED,
    STUB,
    Served,
    Side,
    agents,
    bursts,
    even,
    live_side,
    logged,
    shifting,
    simulated_side,
    with_blocks,
)
from bench.profile_log import profile_from_run
from bench.profile_steps import capacity_tokens, profile_from_steps
from conductor.placing.cost_model import CostModel
from conductor.placing.decision_lines import Shared
from conductor.placing.placement import UNBOUNDED
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.replay.command import main
from conductor.replay.conformance import compared, num_made_alike, read_run, simulated
from conductor.replay.trace_formats import read_trace
from conductor.serving.decision_log import DecisionLog
from node.timeline import Timeline

COST = CostModel(STUB)
SETTINGS = SchedulerSettings(fetches=False)
WHOLE = EngineConfig(chunk_tokens=4_096)
FIXED = Served(settings=SETTINGS, slo=UNBOUNDED, engine=WHOLE)
"""Roles are fixed, nothing is fetched, nobody waits or is refused, and a prompt is one step."""
NUM_REQUESTS = 150


def run_of(path, served, rate, count=NUM_REQUESTS, workload=even):
    """A live run, so many requests a second."""
    return logged(path / "decisions.jsonl", workload(rate, count, random.Random(1)), served)


def sides(path, served, rate, count, workload=even):
    """A live run and its simulation."""
    live = run_of(path, served, rate, count, workload)
    outcomes = simulated(live, served.profile, served.engine).outcomes
    assert outcomes.num_arrived == len(live.served) + len(live.refused) == count
    return live_side(live), simulated_side(outcomes)


@pytest.fixture(scope="module")
def live_log(tmp_path_factory):
    """The decision log of a live run."""
    run_of(folder := tmp_path_factory.mktemp("live"), FIXED, 8.0)
    return folder / "decisions.jsonl"


def num_placed_alike(live):
    """Return how many requests the simulation computes where the live conductor had them computed."""
    outcomes = simulated(live, STUB, WHOLE).outcomes
    ours = dict(zip(outcomes.number, outcomes.prefill_node, strict=True))
    # both name nodes in the order of their slots
    return sum(
        request.placed.prefill_node == f"n{ours[number][1:]}" for number, request in enumerate(live.served)
    )


def test_simulated_run_is_the_live_one(live_log):
    live = read_run(live_log)
    assert len(live.served) == NUM_REQUESTS
    errors = {each.name: each.error for each in compared(live, simulated(live, STUB, WHOLE).outcomes)}
    assert errors["hit tokens"] == 0.0
    assert abs(errors["TTFT mean"]) < 0.01
    assert abs(errors["TBT p50"]) < 0.01
    # of one request in a hundred, for which two others changed places
    assert abs(errors["TBT p99"]) < 0.05


def test_every_live_decision_made_again_is_the_same(live_log):
    live = read_run(live_log)
    assert num_made_alike(live) == len(live.decisions) == NUM_REQUESTS


def test_simulation_places_requests_where_the_live_conductor_did(live_log):
    assert num_placed_alike(read_run(live_log)) >= 0.98 * NUM_REQUESTS


def test_requests_that_waited_are_placed_and_answered_in_simulation_as_they_were_live(tmp_path):
    crowded = dataclasses.replace(FIXED, settings=dataclasses.replace(SETTINGS, ahead_s=0.05))
    live = run_of(tmp_path, crowded, 20.0)
    waits_s = [request.made.decided_at_s - request.made.arrived_at_s for request in live.served]
    assert sum(wait_s > 0.1 for wait_s in waits_s) > NUM_REQUESTS / 2
    assert num_placed_alike(live) >= 0.95 * NUM_REQUESTS
    errors = {each.name: each.error for each in compared(live, simulated(live, STUB, WHOLE).outcomes)}
    assert abs(errors["hit tokens"]) < 0.01
    assert abs(errors["TTFT mean"]) < 0.01
    assert abs(errors["TTFT p99"]) < 0.01


def are_alike(live: Side, ours: Side, count: int) -> bool:
    refused = abs(ours.refused - live.refused) <= max(0.03 * live.refused, 0.005 * count)
    in_time = abs(ours.good - live.good) <= 0.01
    return refused and in_time and abs(ours.ttft_s / live.ttft_s - 1) < 0.03


def test_with_shipped_settings_a_request_goes_as_it_went_live_while_nobody_has_to_wait(tmp_path):
    live, ours = sides(tmp_path, Served(), 8.0, NUM_REQUESTS)
    assert live.alone == ours.alone > 20, "decode nodes compute prompts"
    assert ours.refused == live.refused == 0
    assert ours.ttft_s == pytest.approx(live.ttft_s, rel=1e-3)
    assert ours.ttft_p99_s == pytest.approx(live.ttft_p99_s, rel=1e-3)
    assert ours.tbt_s == pytest.approx(live.tbt_s, rel=1e-3)


@pytest.mark.parametrize("num_blocks", [300, 600])
def test_who_begins_with_the_same_blocks_shares_them_in_simulation_as_live(tmp_path, num_blocks):
    served = Served(0, 0, 1, with_blocks(STUB, num_blocks), slo=UNBOUNDED)
    live = run_of(tmp_path, served, 6.0, workload=agents)
    most = max(node.decode_sequences for made in live.decisions for node in made.seen.nodes)
    assert most > num_blocks // 52 + 1, "as many whole contexts as there is room for, and one"
    outcomes = simulated(live, served.profile, served.engine).outcomes
    theirs, ours = live_side(live), simulated_side(outcomes)
    assert ours.ttft_s == pytest.approx(theirs.ttft_s, rel=0.01)
    assert ours.ttft_p99_s == pytest.approx(theirs.ttft_p99_s, rel=0.01)
    assert ours.tbt_s == pytest.approx(theirs.tbt_s, rel=0.01)


def test_nodes_of_both_roles_refuse_in_simulation_whom_they_refused_live(tmp_path):
    live, ours = sides(tmp_path, Served(0, 0, 3), 30.0, 300)
    assert live.refused > 30
    assert abs(ours.refused - live.refused) <= 3
    assert ours.ttft_s == pytest.approx(live.ttft_s, rel=0.01)


def test_past_capacity_the_same_requests_are_refused_in_simulation_as_were_live(tmp_path):
    # both try those who wait when all that a node says of a moment is known, and at no other time
    live = logged(tmp_path / "decisions.jsonl", even(40.0, 260, random.Random(3)), Served())
    outcomes = simulated(live, STUB).outcomes
    names = [made.asked.request_id for made, _ in live.arrivals()]
    refused = {made.asked.request_id for made in live.refused}
    assert len(refused) > 20
    assert {names[each.number] for each in outcomes.refused} == refused


@pytest.mark.parametrize(
    "name",
    [
        "even, 40 a second",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in (
                "shifting, 24 a second",
                "bursts, 24 a second",
                "mixed bounds, 32 a second",
                "even, 38 a second, 4C",  # at 40 two nodes answer in one moment, live a turn apart
                "even, 250 a second, h200-llama8b",
            )
        ),
    ],
)
def test_every_request_goes_in_simulation_as_it_went_live(tmp_path, name):
    workload, rate, served = CASES[name]
    live = run_of(tmp_path, served, rate, 600, workload)
    outcomes = simulated(live, served.profile, served.engine).outcomes
    assert (outcomes.role_changes > 0) == ("4C" not in name and "h200" not in name)
    names = [made.asked.request_id for made, _ in live.arrivals()]
    rows = zip(outcomes.number, outcomes.ttft_s, outcomes.mean_tbt_s, strict=True)
    found = {names[number]: (ttft_s, gap_s) for number, ttft_s, gap_s in rows}
    assert found.keys() == {request.made.asked.request_id for request in live.served}
    for request in live.served:
        expected = request.actual.ttft_s, request.actual.mean_tbt_s or 0.0
        assert found[request.made.asked.request_id] == pytest.approx(expected, abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("workload", "rate"), [(even, 16.0), (shifting, 16.0), (shifting, 24.0), (bursts, 24.0)]
)
def test_with_shipped_settings_as_many_are_refused_in_simulation_as_were_live(tmp_path, workload, rate):
    # who is tried a moment earlier changes who is before whom: in fewer requests that is not averaged out
    count = 3_000
    live, ours = sides(tmp_path, Served(), rate, count, workload)
    assert are_alike(live, ours, count), (live, ours)


@pytest.mark.full
@pytest.mark.parametrize("rate", [16.0, 20.0, 40.0])
def test_where_roles_are_fixed_as_many_are_refused_in_simulation_as_were_live(tmp_path, rate):
    fixed = Served(settings=dataclasses.replace(SHIPPED, roles_follow=False))
    live, ours = sides(tmp_path, fixed, rate, 3_000)
    assert are_alike(live, ours, 3_000), (live, ours)


def test_a_run_whose_roles_changed_has_as_many_nodes_as_there_were(live_log):
    live = read_run(live_log)
    num_prefill, num_decode, num_both = live.nodes()
    made = live.decisions[-1]
    turned = [node._replace(prefills=True, decodes=False) for node in made.seen.nodes[:-1]]
    later = made.seen._replace(nodes=(*turned, made.seen.nodes[-1]))
    changed = dataclasses.replace(live, decisions=[*live.decisions, made._replace(seen=later)])
    assert len(turned) > num_prefill, "a decode node turned to prompts"
    assert changed.nodes() == (num_prefill, num_decode, num_both) == (2, 2, 0)


@pytest.mark.full
def test_profile_fitted_to_the_log_is_the_one_that_the_nodes_took_their_time_from(tmp_path):
    # so seldom that prompts share no steps
    fitted, taken = CostModel(profile_from_run(run_of(tmp_path, FIXED, 2.0), "fitted")), COST
    for tokens, prefix in ((100, 0), (700, 0), (400, 1_600)):
        assert fitted.prefill_s(tokens, prefix) == pytest.approx(taken.prefill_s(tokens, prefix), rel=0.02)
    for batch in (1, 4, 8):
        expected_s = taken.decode_step_s(batch, batch * 600)
        # means over each answer's life, waits to join included: coarser than a grid of single steps
        assert fitted.decode_step_s(batch, batch * 600) == pytest.approx(expected_s, rel=0.1)


def test_decision_log_is_a_trace_of_what_was_asked(live_log):
    live, trace = read_run(live_log), read_trace(live_log)
    assert trace.num_requests == NUM_REQUESTS
    for row, request in zip(trace.requests, live.served, strict=True):
        asked = request.made.asked
        assert (row.num_tokens, len(row.chain)) == (asked.num_tokens, len(asked.chain))
        assert row.output_tokens == request.actual.num_output_tokens
        assert row.arrival_s == request.made.arrived_at_s - live.served[0].made.arrived_at_s


def test_bounds_that_requests_named_are_those_of_a_log_as_a_trace_and_of_a_request_that_was_lost(tmp_path):
    workload, rate, served = CASES["mixed bounds, 32 a second"]
    live = run_of(tmp_path, served, rate, 40, workload)
    named = [made.asked.slo for made, _ in live.arrivals()]
    usual = Slo(9.0, 9.0, 9.0)
    trace = read_trace(tmp_path / "decisions.jsonl")
    whole = [row.bounds.over(usual) if row.bounds else usual for row in trace.requests]
    assert whole == [Slo(*(9.0 if bound_s == inf else bound_s for bound_s in slo)) for slo in named]
    assert [row.bounds.over(usual) for row in live.trace().requests] == named
    # its first token was out when it was lost: the second attempt names none
    first = live.served[0]
    asked = dataclasses.replace(first.made.asked, request_id=RequestId("r0.2"), slo=Slo())
    again = dataclasses.replace(first, made=first.made._replace(asked=asked))
    other = dataclasses.replace(live, served=[again, *live.served[1:]])
    assert [row.bounds.over(usual) for row in other.trace().requests] == named


def test_who_is_refused_when_the_prompt_is_computed_is_asked_for_in_simulation_too(live_log, tmp_path):
    lines = live_log.read_text().splitlines()
    number = next(number for number, line in enumerate(lines) if '"end":"finished"' in line)
    lines[number] = lines[number].replace('"end":"finished"', '"end":"SloUnreachableError"')
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    live, before = read_run(tmp_path / "log"), read_run(live_log)
    assert len(live.served) == NUM_REQUESTS - 1
    assert [made.asked.request_id for made in live.refused] == [json.loads(lines[number])["request_id"]]
    assert [row.arrival_s for row in live.trace().requests] == [
        row.arrival_s for row in before.trace().requests
    ]


def test_a_log_says_how_many_tokens_of_prompts_its_nodes_steps_had(live_log, tmp_path):
    live = read_run(live_log)
    assert live.chunk_tokens() == WHOLE.chunk_tokens
    said, named = simulated(live, STUB).outcomes, simulated(live, STUB, WHOLE).outcomes
    assert said.ttft_s == named.ttft_s
    older = tmp_path / "log"
    older.write_text(live_log.read_text().replace(f'"chunk_tokens":{WHOLE.chunk_tokens}', '"chunk_tokens":0'))
    silent = read_run(older)
    assert silent.chunk_tokens() == 0
    usual = simulated(live, STUB, EngineConfig(chunk_tokens=512)).outcomes
    assert simulated(silent, STUB).outcomes.ttft_s == usual.ttft_s != named.ttft_s


@pytest.mark.parametrize("tokens", ["0", "15"])
def test_nodes_of_a_live_run_are_simulated_with_chunks_that_engines_have(live_log, capsys, tokens):
    assert main([str(live_log), "--conformance", "--chunk-tokens", tokens]) == 2
    assert "--chunk-tokens: at least 16 with --conformance" in capsys.readouterr().err


def test_command_prints_live_beside_simulated(live_log, capsys):
    assert main([str(live_log), "--conformance"]) == 0
    out = capsys.readouterr().out
    assert "hit tokens" in out
    assert f"{NUM_REQUESTS}" in out


def test_of_a_log_that_began_anew_what_the_file_before_it_decided_is_left_out(live_log, tmp_path):
    lines = live_log.read_text().splitlines()
    first = json.loads(lines[1])["request_id"]
    (tmp_path / "log").write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    served, before = read_run(tmp_path / "log").served, read_run(live_log).served
    assert [each for each in before if each.made.asked.request_id != first] == served
    assert len(served) == len(before) - 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        (b"\x1f\x8b", "can't decode"),
        (b"", "no decision log"),
        (b'{"timestamp":0}', "no decision log: its first line has no 'format'"),
        (b'{"kind":"decis', ":3: neither a decision nor an outcome"),
        (b"[1]", ":3: neither a decision nor an outcome"),
        (b'{"kind":"other"}', ":3: neither a decision nor an outcome"),
    ],
)
def test_log_that_cannot_be_read_is_refused_with_its_line(live_log, tmp_path, capsys, text, reason):
    if text is not None:
        good = b"".join(live_log.read_bytes().splitlines(keepends=True)[:2])
        (tmp_path / "log").write_bytes((good if ":3:" in reason else b"") + text)
    assert main([str(tmp_path / "log"), "--conformance"]) == 2
    error = capsys.readouterr().err
    assert f"conductor replay: {tmp_path / 'log'}" in error
    assert reason in error


def test_log_in_which_nothing_was_served_is_refused(tmp_path):
    log = DecisionLog(tmp_path / "empty", Shared(COST.profile, SETTINGS), 1 << 20)
    log.close()
    with pytest.raises(ConfigError, match="no request"):
        read_run(tmp_path / "empty")


def steps_taken(run, cost, path) -> None:
    """Write what two nodes would have done one step at a time: prompts by chunks, answers in twos."""
    timeline, rng = Timeline("n"), random.Random(3)
    now_s = 0.0

    def took(seconds, shares) -> None:
        nonlocal now_s
        # a busy machine: some steps take twice as long, and the mean is what the cost says
        ended_s = now_s + seconds * rng.choice((0.75, 0.75, 0.75, 0.75, 2.0))
        timeline.span("stage 0", "step 1", now_s, ended_s, **shares)
        timeline.span("transfer", "write", now_s, ended_s, blocks=3)
        now_s = ended_s

    pairs = list(zip(run.served[::2], run.served[1::2], strict=False))
    for request in run.served:
        name = f"{request.made.asked.request_id}.prefill"
        before, total = request.cached_tokens, request.made.asked.num_tokens
        while before < total:
            tokens = min(512, total - before)
            took(cost.step.with_chunks_s(tokens, tokens * (tokens + 2 * before), 0, 0), {name: tokens})
            before += tokens
    for pair in pairs:
        contexts = {item.made.asked.request_id: item.made.asked.num_tokens for item in pair}
        for _ in range(12):
            for names in (list(contexts)[:1], list(contexts)):
                context = sum(contexts[name] for name in names)
                took(cost.decode_step_s(len(names), context), dict.fromkeys(names, 1))
                for name in names:
                    contexts[name] += 1
    path.mkdir(exist_ok=True)
    timeline.write(path / "n.json")


def test_what_steps_cost_is_found_in_nodes_timelines(live_log, tmp_path) -> None:
    live = read_run(live_log)
    known = dataclasses.replace(
        COST.profile,
        prefill_token_s=0.003,
        prefill_token2_s=6e-7,
        decode_fixed_s=0.08,
        decode_sequence_s=0.01,
        decode_context_token_s=3e-5,
        chunk_step_s=0.15,
    )
    steps_taken(live, CostModel(known), tmp_path / "timelines")
    found = profile_from_steps(live, tmp_path / "timelines", "found")
    cost, expected = CostModel(found), CostModel(known)
    for tokens in (100, 512):
        assert cost.step.with_chunks_s(tokens, tokens**2, 0, 0) == pytest.approx(
            expected.step.with_chunks_s(tokens, tokens**2, 0, 0), rel=0.1
        )
    for batch in (1, 2):
        assert cost.decode_step_s(batch, 400 * batch) == pytest.approx(
            expected.decode_step_s(batch, 400 * batch), rel=0.05
        )
    assert found.device_kv_tokens == capacity_tokens(live) > 0


def test_timelines_without_steps_are_refused(live_log, tmp_path) -> None:
    with pytest.raises(ConfigError, match="0 steps with a chunk and 0 without"):
        profile_from_steps(read_run(live_log), tmp_path, "none")
    (tmp_path / "n.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"n\.json: no timeline"):
        profile_from_steps(read_run(live_log), tmp_path, "none")


def test_busy_periods_are_apart_and_every_request_is_in_one_with_its_last_token(live_log) -> None:
    live = read_run(live_log)
    sparse = dataclasses.replace(live, served=live.served[::10])
    for run_ in (live, sparse):
        periods = busy_periods(run_)
        assert all(before[1] < after[0] for before, after in itertools.pairwise(periods))
        for request in run_.served:
            began_s = request.made.arrived_at_s
            ended_s = began_s + request.actual.ttft_s
            ended_s += request.actual.mean_tbt_s * (request.actual.num_output_tokens - 1)
            assert any(first <= began_s and ended_s <= last for first, last in periods)
    assert len(busy_periods(sparse)) > len(busy_periods(live))
