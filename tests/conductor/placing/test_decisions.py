"""Recorded decisions replay to the same decisions, also from a file; an explanation is of those."""

import json
import random
from dataclasses import replace

import pytest

from base.errors import ConfigError
from base.request import NodeId, RequestId, Role, Slo
from conductor.placing.decision_lines import Shared, decision_to, item_from
from conductor.placing.decisions import MAX_NODES, Actual, Decision, decide_again, decision
from conductor.placing.decode_projection import FEWEST_LENGTHS
from conductor.placing.explain import MAX_LISTED, Decisions
from conductor.placing.placement import Placement, Rejection, RejectReason
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.replay.decision_log import read_log
from conductor.serving.decision_log import DecisionLog
from tests.conductor.builders import make_cost, make_heartbeat, make_info, make_request, make_view

COST = make_cost()


def history(seed, settings, num_requests=80):
    """Decisions of a small busy cluster, with corrections, fetches, drains and rejections."""
    rng = random.Random(seed)
    view, now_s, running, made = make_view(3, 1, COST), 0.0, [], []
    view.add_node(make_info("d1", Role.DECODE, max_batch=10 * seed, chunk_tokens=256 * seed), 0.0)
    view.add_node(make_info("d2", Role.DECODE, max_batch=2 * seed), 0.0)
    if settings.roles_follow:
        for slot in range(3):
            view.prefill_order.set(slot, 20.0)
    for number in range(num_requests):
        now_s += rng.random() * 0.8
        slo = Slo(rng.choice([1.0, 5.0, float("inf")]), rng.choice([0.02, 0.05, float("inf")]))
        request = make_request(f"r{number}", rng.randrange(1, 30), rng.randrange(3), slo=slo)
        if number % 7 == 0:
            request = replace(request, max_tokens=0)
        if number % 3 == 0:
            request = replace(request, avoid=(f"p{number % 4}", f"d{number % 5}")[: 1 + number % 2])
        result = place(request, view, COST, now_s, settings)
        made.append(decision(request, view, result, now_s, now_s))
        if isinstance(result, Placement):
            view.placed(request, result, now_s)
            running.append((request, result, False))
        for term in ("prefill", "handoff", "decode"):
            node_id = f"{rng.choice('pd')}{rng.randrange(3)}"
            view.corrections.observe(node_id, term, 1.0, rng.uniform(0.5, 2.0))
            view.corrections.observe_added(node_id, rng.random() / 100)
        if rng.random() < 0.1:
            name, drains = NodeId(f"p{rng.randrange(2)}"), rng.random() < 0.5
            view.heartbeat(name, make_heartbeat(is_draining=drains), now_s)
        if rng.random() < 0.2:
            beat = make_heartbeat(num_queued_tokens=rng.randrange(50_000), num_context_tokens=9_000)
            view.heartbeat(NodeId(f"{rng.choice('pd')}0"), beat, now_s)
        if running and rng.random() < 0.7:
            request, placement, is_decoding = running.pop(rng.randrange(len(running)))
            if is_decoding:
                view.finished(request.request_id, now_s, rng.randrange(1, 400))
            else:
                view.prefill_done(request.request_id, now_s)
                running.append((request, placement, True))
                slot = view.node(placement.prefill_node).slot
                view.index.store(slot, request.chain)
    return made


SETTINGS = [
    *(SchedulerSettings(reject=policy) for policy in RejectPolicy),
    SchedulerSettings(kvcache_balancing_threshold=1.5),
    SchedulerSettings(fetches=False),
    SchedulerSettings(roles_follow=True),
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_recorded_decision_made_again_is_the_same(seed, settings):
    made = history(seed, settings)
    assert {type(each.result).__name__ for each in made} >= {"Placement"}
    for each in made:
        assert decide_again(each, COST, settings) == each.result


def test_a_refusal_for_want_of_room_made_again_is_the_same():
    view = make_view(0, 0, COST)
    view.add_node(make_info("n0", Role.PREFILL, Role.DECODE, num_blocks=9), 0.0)
    request = make_request(blocks=10, max_tokens=1)
    made = decision(request, view, place(request, view, COST, 0.0), 0.0, 0.0)
    assert made.result.reason is RejectReason.NO_FREE_BLOCKS
    assert decide_again(made, COST, SchedulerSettings()) == made.result


def test_a_decision_made_beside_another_conductors_sequences_is_the_same_where_answers_are_short():
    view = make_view(2, 2, COST)
    for _ in range(FEWEST_LENGTHS):
        view.projection.observe(0.01, 1)
    view.heartbeat(NodeId("d0"), make_heartbeat(num_step_rows=40, num_context_tokens=400_000), 1.0)
    results = set()
    for tbt_ms in range(20, 80):
        request = make_request(slo=Slo(tbt_slo_s=tbt_ms / 1e3))
        made = decision(request, view, place(request, view, COST, 1.0), 1.0, 1.0)
        assert decide_again(made, COST, SchedulerSettings()) == made.result
        results.add(type(made.result))
    assert results == {Placement, Rejection}


def test_a_decision_where_more_decode_than_have_places_is_the_same_when_made_again():
    view = make_view(2, 0, COST)
    view.add_node(make_info("d0", Role.DECODE, max_batch=30), 0.0)
    for number in range(100):
        view.projection.observe(0.01, 1 + number)
    view.heartbeat(NodeId("d0"), make_heartbeat(num_step_rows=40, num_context_tokens=400_000), 1.0)
    results = set()
    for tbt_ms in range(20, 2_000, 20):
        request = make_request(slo=Slo(tbt_slo_s=tbt_ms / 1e3))
        made = decision(request, view, place(request, view, COST, 1.0), 1.0, 1.0)
        assert decide_again(made, COST, SchedulerSettings()) == made.result
        results.add(type(made.result))
    assert results == {Placement, Rejection}


def test_histories_hold_fetches_and_both_kinds_of_rejection():
    results = [each.result for seed in range(4) for each in history(seed, SchedulerSettings())]
    assert any(isinstance(result, Placement) and result.source_node for result in results)
    inline = SchedulerSettings(roles_follow=True)
    assert any(getattr(each.result, "is_inline", False) for each in history(0, inline))
    reasons = {result.reason for result in results if not isinstance(result, Placement)}
    assert reasons >= {RejectReason.TTFT, RejectReason.TBT}


def test_a_decision_read_from_a_log_is_the_one_that_was_written(tmp_path):
    settings = SchedulerSettings(reject=RejectPolicy.EARLY, kvcache_balancing_threshold=1.5)
    log = DecisionLog(tmp_path / "log", Shared(COST.profile, settings, "m"), 1 << 30)
    made = history(1, settings)
    with_hashes = made[0]._replace(asked=replace(made[0].asked, chain=(b"\x01" * 16, b"\xff" * 16)))
    actual = Actual(9.5, "finished", ttft_s=0.1 + 0.2, num_output_tokens=3)
    for each in (*made, with_hashes):
        log.decision(each)
    log.outcome(RequestId("r0"), actual)
    log.close()
    shared, items = read_log(tmp_path / "log")
    assert shared == Shared(COST.profile, settings, "m")
    *read, outcome = items
    assert outcome == ("r0", actual)
    assert [each.result for each in read] == [each.result for each in (*made, with_hashes)]
    assert read[-1].asked.chain == with_hashes.asked.chain
    assert [each.asked.avoid for each in read] == [each.asked.avoid for each in (*made, with_hashes)]
    for each in read[:-1]:
        assert decide_again(each, COST, shared.settings) == each.result


def test_nobody_else_reads_a_decision_log_even_one_that_was_there_before(tmp_path):
    path = tmp_path / "log"
    path.touch(0o644)
    for _ in range(2):
        DecisionLog(path, Shared(COST.profile, SchedulerSettings()), 20_000).close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "log.1").stat().st_mode & 0o777 == 0o600


def test_a_log_takes_twice_its_bound_at_most_and_each_file_can_be_read(tmp_path):
    made = history(0, SchedulerSettings())
    log = DecisionLog(tmp_path / "log", Shared(COST.profile, SchedulerSettings()), 20_000)
    longest = 0
    for each in made * 3:
        log.decision(each)
        sizes = [path.stat().st_size for path in tmp_path.iterdir()]
        longest = max(longest, *sizes)
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1"]
    assert longest < 20_000 + 10_000, "more than one line past the bound"
    # the one that is written to may just have been begun
    for name, fewest in (("log", 1), ("log.1", 2)):
        assert len(list(read_log(tmp_path / name)[1])) >= fewest


def test_a_log_of_another_format_or_none_is_refused(tmp_path):
    (tmp_path / "log").write_text(json.dumps({"kind": "conductor", "format": 99}) + "\n")
    with pytest.raises(ConfigError, match="format 99"):
        read_log(tmp_path / "log")
    with pytest.raises(ConfigError, match="decision_log"):
        DecisionLog(tmp_path / "no" / "log", Shared(COST.profile, SchedulerSettings()), 1)


def test_an_explanation_names_the_terms_the_choice_and_the_runner_up():
    view = make_view(2, 2, COST)
    view.prefill_order.set(0, 3.0)
    view.index.store(0, range(4))
    request = make_request("chat-1f.1", 10)
    result = place(request, view, COST, 1.0)
    kept = Decisions(COST, SchedulerSettings())
    kept.decided(decision(request, view, result, 0.5, 1.0))
    kept.ended(request.request_id, Actual(9.0, "finished", ttft_s=2 * (0.5 + result.predicted_ttft_s)))
    shown = [kept.explain(f"{prefix}chat") for prefix in ("", "chatcmpl-", "cmpl-", "msg_", "resp_")]
    assert all(one == shown[0] for one in shown)
    (told,) = shown[0]["attempts"]
    assert told["placed"]["prefill_node"] == result.prefill_node == "p1"
    assert told["runner_up"] == "p0"
    busy = next(row for row in told["prefill_candidates"] if row["node"] == "p0")
    assert (busy["queue_s"], busy["local_blocks"]) == (2.0, 4)
    assert busy["ready_s"] == max(busy["queue_s"], busy["fetch_s"]) + busy["prefill_s"]
    assert told["predicted_over_actual"]["ttft"] == pytest.approx(0.5)
    assert told["decided_again_alike"] is True
    assert [row["node"] for row in told["decode_candidates"]] == ["d0", "d1"]
    assert not any(row["is_avoided"] for row in told["prefill_candidates"] + told["decode_candidates"])
    assert json.loads(json.dumps(told)) == told
    assert kept.explain("cha") is None


def test_no_name_is_no_beginning_of_a_request_whose_name_begins_with_a_dash():
    view, request = make_view(1, 1, COST), make_request("-1f.1", 10)
    kept = Decisions(COST, SchedulerSettings())
    kept.decided(decision(request, view, place(request, view, COST, 1.0), 0.5, 1.0))
    assert kept.explain("-1f") is not None
    assert kept.explain("") is None
    assert kept.explain("cmpl-") is None


@pytest.mark.parametrize("is_on", [False, True])
def test_an_explanation_says_when_a_decode_node_would_have_computed_the_prompt(is_on):
    settings = SchedulerSettings(roles_follow=is_on)
    view = make_view(1, 2, COST)
    view.prefill_order.set(0, 60.0)
    view.node(NodeId("d1")).reported_free_tokens = 0.0
    request = make_request("chat-1f.1", 10)
    result = place(request, view, COST, 1.0, settings)
    kept = Decisions(COST, settings)
    kept.decided(decision(request, view, result, 0.5, 1.0))
    (told,) = kept.explain("chat-1f")["attempts"]
    seconds = {row["node"]: row["beside_s"] for row in told["decode_candidates"]}
    alone_s = COST.prefill_s(request.num_tokens, 0)
    assert seconds == {"d0": pytest.approx(alone_s) if is_on else None, "d1": None}
    assert (result.predicted_ttft_s == seconds["d0"]) is result.is_inline is is_on
    assert told["decided_again_alike"] is True


def test_an_explanation_has_the_prefill_node_that_decodes_for_want_of_room():
    settings = SchedulerSettings(RejectPolicy.NONE, roles_follow=True)
    view = make_view(1, 1, COST)
    view.heartbeat(NodeId("d0"), make_heartbeat(num_free_blocks=0), 0.0)
    request = make_request("chat-1f.1", 10)
    result = place(request, view, COST, 1.0, settings)
    assert result.decode_node == "p0"
    kept = Decisions(COST, settings)
    kept.decided(decision(request, view, result, 0.5, 1.0))
    (told,) = kept.explain("chat-1f")["attempts"]
    rows = [(row["node"], row["fits"]) for row in told["decode_candidates"]]
    assert rows == [("d0", False), ("p0", True)]


def test_an_explanation_says_which_nodes_were_avoided():
    view = make_view(2, 2, COST)
    request = replace(make_request("chat-1f.2", 10), avoid=(NodeId("p0"), NodeId("d0"), NodeId("gone")))
    result = place(request, view, COST, 1.0)
    assert (result.prefill_node, result.decode_node) == ("p1", "d1")
    kept = Decisions(COST, SchedulerSettings())
    kept.decided(decision(request, view, result, 0.5, 1.0))
    (told,) = kept.explain("chat-1f")["attempts"]
    assert [(row["node"], row["is_avoided"]) for row in told["prefill_candidates"]] == [
        ("p1", False),
        ("p0", True),
    ]
    assert {row["node"] for row in told["decode_candidates"] if row["is_avoided"]} == {"d0"}
    assert told["decided_again_alike"] is True


def test_the_oldest_decision_is_forgotten_first():
    view = make_view(1, 1, COST)
    kept = Decisions(COST, SchedulerSettings(), max_kept=2)
    for number in range(3):
        request = make_request(f"r{number}.1")
        kept.decided(decision(request, view, place(request, view, COST, 0.0), 0.0, 0.0))
    assert kept.explain("r0") is not None, "how it ends is not known yet"
    kept.ended(RequestId("r0.1"), Actual(1.0, "finished"))
    assert kept.explain("r0") is None
    assert kept.explain("r1") is not None
    assert kept.explain("r2") is not None


def test_slow_late_and_rejected_ones_outlive_the_others_for_an_hour():
    view, kept = make_view(1, 1, COST), Decisions(COST, SchedulerSettings(), max_kept=2)
    bounds = Slo(ttft_slo_s=50.0)

    def ask(number, ttft_s=None, slo=bounds, at_s=0.0):
        request = make_request(f"r{number}.1", slo=slo)
        kept.decided(decision(request, view, place(request, view, COST, at_s), at_s, at_s))
        if ttft_s is not None:
            kept.ended(request.request_id, Actual(at_s + 60.0, "finished", ttft_s=ttft_s))

    ask("late", 51.0)
    ask("rejected", slo=Slo(ttft_slo_s=1e-6))
    for number in range(300):
        ask(number, ttft_s=number / 10, at_s=1.0 + number)

    def names(kind, now_s=400.0):
        return [row["request_id"].removesuffix(".1") for row in kept.recent(now_s, kind)]

    assert names("latest") == ["r299", "r298"]
    assert names("missed") == ["rlate"]
    assert names("rejected") == ["rrejected"]
    assert names("slowest")[:3] == ["rlate", "r299", "r298"]
    assert len(names("slowest")) == MAX_LISTED
    assert kept.explain("rlate")["attempts"][0]["decided_again_alike"] is True
    assert names("missed", now_s=4_000.0) == []
    ask("much later", 52.0, at_s=5_000.0)
    ask("x", 1.0, at_s=5_001.0)
    ask("y", 1.0, at_s=5_002.0)
    assert names("missed", now_s=5_002.0) == ["rmuch later"]
    assert kept.explain("rlate") is None


def test_attempts_of_one_request_follow_each_other():
    view, kept = make_view(2, 2, COST), Decisions(COST, SchedulerSettings())
    for number, (decided_at_s, ended_at_s) in enumerate([(1.0, 3.0), (3.5, 9.0)], 1):
        request = make_request(f"chat-1f.{number}", 10)
        result = place(request, view, COST, decided_at_s)
        kept.decided(decision(request, view, result, 0.5, decided_at_s))
        actual = Actual(ended_at_s, "LostError", 2.5, 0.2, 1.0, 0.3, 0.04, 0, 11, 0.05, 0.1, 0.1, 0.9, 3)
        kept.ended(request.request_id, actual)
    first, second = kept.explain("chat-1f")["attempts"]
    assert (first["begun_s"], second["begun_s"]) == (0.0, 2.5)
    parts = {part["name"]: part for part in first["parts"]}
    assert [*parts] == [
        *("received", "waited", "dispatched", "queued", "loaded", "prefilled", "written", "handed over"),
        "decoded",
    ]
    own = {name: part["actual_s"] for name, part in parts.items() if not part["beneath"]}
    assert own.pop("decoded") == pytest.approx(0.4)
    assert own.pop("received") == 0.05
    assert sum(own.values()) == pytest.approx(2.5), "the parts of a TTFT are all of it"
    assert parts["waited"]["predicted_s"] == 0.5
    assert [parts[name]["beneath"] for name in ("loaded", "written")] == ["queued", "handed over"]
    waited = {part["name"]: part["actual_s"] for part in second["parts"]}["waited"]
    assert waited == pytest.approx(0.5)


def test_a_rejected_and_a_running_one_have_the_parts_that_are_known():
    view, kept = make_view(1, 1, COST), Decisions(COST, SchedulerSettings())
    for name, slo in (("no", Slo(ttft_slo_s=1e-6)), ("yes", Slo())):
        request = make_request(f"{name}.1", slo=slo)
        kept.decided(decision(request, view, place(request, view, COST, 2.0), 1.0, 2.0))
    rejected, running = (kept.explain(name)["attempts"][0]["parts"] for name in ("no", "yes"))
    refused = [*("received", "waited", "ahead", "dispatched", "queued", "prefilled", "handed over")]
    assert [part["name"] for part in rejected] == refused
    assert [part["name"] for part in rejected if part["actual_s"] is not None] == ["waited"]
    assert sum(part["predicted_s"] or 0.0 for part in rejected[2:]) > 1e-6, "it is over its bound"
    assert [part["actual_s"] for part in running if part["actual_s"] is not None] == [1.0]
    assert {part["name"] for part in running if part["predicted_s"] is not None} == {
        *("waited", "dispatched", "queued", "loaded", "prefilled", "handed over")
    }


def test_a_cluster_too_large_to_record_is_explained_without_candidates():
    view = make_view(MAX_NODES, 1, COST)
    request = make_request()
    made = decision(request, view, place(request, view, COST, 0.0), 0.0, 0.0)
    with pytest.raises(ValueError, match="without its nodes"):
        decide_again(made, COST, SchedulerSettings())
    kept = Decisions(COST, SchedulerSettings())
    kept.decided(made)
    assert "prefill_candidates" not in kept.explain("r")["attempts"][0]


def test_a_decision_without_any_node_is_made_again_too():
    view = make_view(0, 0, COST)
    request = make_request()
    made = decision(request, view, place(request, view, COST, 0.0), 0.0, 0.0)
    assert decide_again(made, COST, SchedulerSettings()) == made.result


def test_a_prompt_that_is_longer_than_usual_goes_by_what_was_measured_when_decided_again() -> None:
    view, settings = make_view(2, 1), SchedulerSettings(reject=RejectPolicy.NONE)
    request = make_request("long", 20)
    seconds = COST.prefill_s(request.num_tokens, 0)
    for _ in range(10):
        view.corrections.observe("p0", "prefill", seconds / 2, 1.5 * seconds)
        view.corrections.observe("p1", "prefill", seconds / 2, 0.5 * seconds)
    view.corrections.doubt("p0", "p1", "prefill")
    view.prefill_order.set(view.node(NodeId("p1")).slot, 1.2 * seconds)
    result = place(request, view, COST, 0.0, settings)
    assert isinstance(result, Placement)
    assert result.prefill_node == "p1", "p0 would be chosen for a shorter one"
    assert decide_again(decision(request, view, result, 0.0, 0.0), COST, settings) == result


def test_a_log_of_nodes_with_one_ratio_and_one_pace_class_is_read_and_decided_again() -> None:
    made = next(each for each in history(3, SchedulerSettings()) if isinstance(each.result, Placement))
    line = json.loads(json.dumps(decision_to(made)))
    for node in line["seen"]["nodes"]:
        assert node.pop("longer_pace_class") == node["pace_class"]
        assert node.pop("prefill_measured_ratio") == node["prefill_ratio"]
    read = item_from(line)
    assert isinstance(read, Decision)
    assert decide_again(read, COST, SchedulerSettings()) == made.result
