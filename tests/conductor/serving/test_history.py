"""The hour and the day that a conductor keeps: what rows say, what is passed over, how much it takes."""

import base64
import json
import math
import tracemalloc
from array import array
from dataclasses import replace
from itertools import pairwise

import pytest

from base.config import SloConfig
from base.messages import Prefilled, PrefillTimes
from base.request import Role, SampledToken, Slo
from conductor.placing.admission import step_limit_s
from conductor.placing.decisions import Actual, decision
from conductor.placing.explain import Decisions
from conductor.placing.placement import Rejection, RejectReason
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.serving.budgets import Budgets, Limits
from conductor.serving.fullest import Fullest
from conductor.serving.history import (
    CLUSTER_SERIES,
    MAX_NODES,
    MAX_RATES,
    MAX_SAMPLES,
    NODE_SERIES,
    History,
    Rates,
    Samples,
)
from conductor.serving.page_data import NODE_COLUMNS, PageData, PageSettings
from conductor.serving.ring import Ring
from tests.conductor.builders import (
    make_heartbeat,
    make_request,
    require_placement,
)
from tests.conductor.histories import COST, SINCE_1970_S, Line, attach, make_history
from tests.manual_clock import ManualClock

SLO = SloConfig(ttft_s=2.0)
MOST_BYTES = 8 << 20


class Cluster:
    """A history of nodes that beat once."""

    def __init__(self, num_nodes=2):
        self.clock, self.view, self.metrics, self.membership, self.history = make_history(SLO)
        for number in range(num_nodes):
            self.join(f"n{number}", Role.DECODE if number % 2 else Role.PREFILL)

    def join(self, name, role):
        session = attach(self.membership, name, role)
        self.beat(session)
        return session

    def beat(self, session, held=0, **more):
        beat = make_heartbeat(num_free_blocks=2_000 - held, num_held_blocks=held, num_running=3, **more)
        self.membership.heartbeat(session, beat, self.clock.now_s())

    def pass_seconds(self, seconds):
        for _ in range(seconds):
            self.clock.advance(1.0)
            self.history.take(num_waiting=5)

    def serve(self, ttft_s, tbt_s, name="r"):
        request = make_request(name)
        placement = require_placement(place(request, self.view, COST, 0.0))
        prefilled = Prefilled(name, SampledToken(1), None, 0, (), PrefillTimes(0.0, ttft_s, 0.0))
        self.history.first_token(ttft_s, prefilled, request, placement)
        self.history.ended(request.request_id, Actual(1.0, "finished", mean_tbt_s=tbt_s))
        return request, placement


def last_of(ring):
    return dict(zip(ring.names, ring.rows()[1][-1], strict=True))


def test_a_row_says_what_happened_in_its_second():
    cluster = Cluster()
    cluster.pass_seconds(1)
    for number in range(10):
        cluster.serve(ttft_s=0.1 * (number + 1), tbt_s=0.01, name=f"r{number}")
        cluster.metrics.sequences.labels("stop").inc()
        cluster.metrics.prompt_tokens.inc(5_120)
    cluster.metrics.good_sequences.inc(7)
    cluster.metrics.sequences.labels("SloUnreachableError").inc(4)
    cluster.metrics.rejections.labels("slo").inc(4)
    cluster.metrics.sequences.labels("LostError").inc()
    cluster.pass_seconds(1)
    row = last_of(cluster.history.hour)
    told = {name: row[name] for name in ("good", "late", "rejected", "failed", "prompt_tokens", "waiting")}
    assert told == {"good": 7, "late": 3, "rejected": 4, "failed": 1, "prompt_tokens": 51_200, "waiting": 5}
    assert [row[f"ttft_p{share}"] for share in (50, 90, 99)] == pytest.approx([0.5, 0.9, 1.0])
    assert row["tbt_p99"] == pytest.approx(0.01)
    assert row["kv_moved_bytes"] == 10 * 5_120 * COST.profile.kv_token_bytes
    cluster.pass_seconds(1)
    row = last_of(cluster.history.hour)
    assert (row["good"], row["kv_moved_bytes"]) == (0, 0)
    assert math.isnan(row["ttft_p50"]), "nobody's first token came in that second"


def test_a_second_for_which_there_was_no_time_costs_no_row_of_ten_seconds_or_thirty():
    cluster = Cluster()
    for second in range(1, 91):
        cluster.clock.advance(1.0)
        if second not in (20, 40, 59):
            cluster.history.take(num_waiting=5)
    history = cluster.history
    _, days = history.day.rows()
    _, tens = history.nodes["n0"].hour.rows()
    held = NODE_SERIES.index("kv_held")
    assert (len(days), len(tens)) == (3, 9)
    assert not any(math.isnan(row[CLUSTER_SERIES.index("waiting")]) for row in days)
    assert not any(math.isnan(row[held]) for row in tens)
    assert len(history.hour.rows()[1]) == 90


def test_the_day_has_means_of_rates_and_percentiles_of_all_its_requests():
    cluster = Cluster()
    cluster.pass_seconds(30)
    before = cluster.history.day.next_row
    for second in range(30):
        cluster.serve(ttft_s=second + 1.0, tbt_s=0.01, name=f"r{second}")
        cluster.metrics.good_sequences.inc(second % 2 * 2)
        cluster.metrics.sequences.labels("stop").inc(second % 2 * 2)
        cluster.pass_seconds(1)
    assert cluster.history.day.next_row == before + 1
    row = last_of(cluster.history.day)
    assert row["good"] == pytest.approx(1.0, abs=0.1)
    assert row["ttft_p50"] == pytest.approx(15.0, abs=1.0), "of a row's seconds, not of its seconds' medians"


def test_nodes_have_rows_of_their_own_and_a_day_of_means():
    cluster = Cluster()
    cluster.pass_seconds(700)
    track = cluster.history.nodes["n0"]
    row = last_of(track.hour)
    assert (row["queue_s"], row["running"]) == (0.0, 3.0)
    assert math.isnan(row["step_s"]), "it does not decode"
    assert 0.0 <= row["kv_held"] <= 1.0
    assert last_of(track.day)["running"] == 3.0
    assert math.isnan(last_of(cluster.history.nodes["n1"].hour)["queue_s"])


def test_seconds_in_which_the_process_stood_still_say_nothing():
    cluster = Cluster()
    cluster.pass_seconds(2)
    cluster.clock.advance(5.0)
    cluster.pass_seconds(1)
    _, rows = cluster.history.hour.rows()
    assert [math.isnan(row[0]) for row in rows] == [False, False, *[True] * 5, False]


def test_a_ring_keeps_its_last_rows_and_tells_of_those_asked_for():
    ring = Ring(("a", "b"), 1, 10)
    for number in range(100, 125):
        ring.put(number, [number, -number])
    ring.put(110, [0.0, 0.0])
    assert ring.rows() == (115, [(float(at), float(-at)) for at in range(115, 125)])
    assert ring.rows(123) == (123, [(123.0, -123.0), (124.0, -124.0)])
    assert ring.rows(999) == (999, [])
    ring.put(1_000, [1.0, 2.0])
    first, rows = ring.rows()
    assert (first, rows[-1]) == (991, (1.0, 2.0))
    assert all(math.isnan(value) for row in rows[:-1] for value in row)
    assert Ring(("a",), 1, 10).rows() == (0, [])
    packed = ring.to_json(1_000)
    assert (packed["first"], packed["next"]) == (1_000, 1_001)
    assert array("f", base64.b64decode(packed["rows"])).tolist() == [1.0, 2.0]


def test_a_number_past_what_a_ring_holds_is_its_largest():
    ring = Ring(("a",), 1, 10, is_half=True)
    ring.put(1, [1e9])
    assert ring.rows()[1] == [(65_504.0,)]


def test_percentiles_of_too_many_are_of_some_of_them():
    samples = Samples()
    for number in range(100_000):
        samples.add(float(number % 1_000))
    p50, p90, p99 = samples.take()
    assert (p50, p90, p99) == (
        pytest.approx(500, abs=30),
        pytest.approx(900, abs=30),
        pytest.approx(990, abs=15),
    )
    assert all(map(math.isnan, samples.take())), "taken is taken"
    assert MAX_SAMPLES < 10_000


def test_rates_fade_and_those_longest_without_any_go():
    rates = Rates()
    for _ in range(100):
        rates.add("a", 10.0, 0.0)
    [(key, now)] = rates.highest(5, 0.0)
    assert (key, now) == ("a", pytest.approx(100.0))
    [(_, later)] = rates.highest(5, 10.0)
    assert later == pytest.approx(100.0 / math.e)
    for number in range(MAX_RATES):
        rates.add(number, 1.0, 1.0)
    kept = [key for key, _ in rates.highest(10_000, 1.0)]
    assert len(kept) == MAX_RATES
    assert "a" not in kept


@pytest.mark.full
def test_a_thousand_nodes_take_less_than_eight_mb():
    cluster = Cluster(MAX_NODES)
    tracemalloc.start()
    try:
        cluster.history.nodes.clear()
        before, _ = tracemalloc.get_traced_memory()
        kept = History(
            cluster.metrics,
            cluster.membership,
            cluster.view,
            COST,
            cluster.clock,
            lambda: SINCE_1970_S,
            cluster.history.budgets,
        )
        for _ in range(62):
            cluster.clock.advance(10.0)
            kept.take(0)
        for number in range(2 * MAX_SAMPLES):
            cluster.history = kept
            for samples in (*kept._percentiles[0], *kept._percentiles[1]):
                samples.add(number / 7)
            kept.links.add((f"n{number}", "n1"), 1e6, float(number))
            kept.prefixes.add((number.to_bytes(16, "big"), number), 1e6, float(number))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept.nodes) == MAX_NODES
    assert all(track.day.next_row for track in kept.nodes.values()), "every ring has its memory"
    assert 4 << 20 < after - before < MOST_BYTES


def test_a_node_that_comes_when_it_is_full_takes_the_place_of_one_that_left():
    cluster = Cluster(0)
    sessions = [cluster.join(f"n{number}", Role.PREFILL) for number in range(MAX_NODES)]
    cluster.pass_seconds(10)
    cluster.join("late", Role.DECODE)
    cluster.pass_seconds(10)
    assert "late" not in cluster.history.nodes
    cluster.membership.leave([sessions[3]], "it left")
    cluster.pass_seconds(10)
    assert "late" in cluster.history.nodes
    assert "n3" not in cluster.history.nodes
    assert len(cluster.history.nodes) == MAX_NODES


class Idle:
    """A dispatcher without requests."""

    is_ready = True
    num_running = 0
    queue = Line()


def data_of(cluster, clock=None):
    decisions = Decisions(COST, SchedulerSettings())
    settings = PageSettings(SLO)
    return PageData(
        cluster.history, Idle(), cluster.membership, cluster.view, decisions, settings, clock or cluster.clock
    )


async def test_the_page_is_given_all_rows_and_then_those_that_are_new():
    cluster = Cluster()
    data = data_of(cluster)
    cluster.pass_seconds(20)
    whole = await data.answer("hour")
    assert whole["bounds"] == {"ttft_s": 2.0, "tbt_s": None}
    assert whole["next"] - whole["first"] == 20
    assert whole["at_s"] == pytest.approx(SINCE_1970_S + cluster.clock.now_s())
    cluster.pass_seconds(3)
    news = await data.answer(f"hour.{whole['next']}")
    assert (news["first"], news["next"]) == (whole["next"], whole["next"] + 3)
    rows = array("f", base64.b64decode(news["rows"]))
    assert len(rows) == 3 * len(CLUSTER_SERIES)
    assert (await data.answer("node.n0"))["names"] == NODE_SERIES
    assert (await data.answer("node-day.n1"))["step_s"] == 300


@pytest.mark.parametrize(
    "name",
    [
        *("", "x", "hour.x", "hour.-1", "hour.１", "at.１", "hour." + "9" * 400, "node.", "node.n9", "now.1"),
        *("at", "at.", "at.x", "at.-5", "at." + "9" * 400, "fullest.3"),
    ],
)
async def test_other_names_have_no_answer(name):
    cluster = Cluster()
    cluster.pass_seconds(10)
    assert await data_of(cluster).answer(name) is None


async def test_nothing_is_taken_for_kept_on_a_clock_that_begins_below_zero():
    cluster = Cluster()
    data = data_of(cluster, ManualClock(-1_000.0))
    assert await data.answer("x") is None
    assert json.loads(await data.answer("now"))


async def test_what_the_cluster_does_now_is_worked_out_once_for_all_pages():
    cluster = Cluster()
    data = data_of(cluster)
    cluster.serve(1.0, 0.1)
    shared, placement = cluster.serve(1.0, 0.1)
    prefilled = Prefilled("r", SampledToken(1), None, 0, (), PrefillTimes(0.0, 1.0, 0.0))
    fetched = replace(placement, matched_blocks=4, source_node="n1")
    cluster.view.kv_events("n1", 1, shared.chain[:4], ())
    cluster.history.first_token(1.0, prefilled, shared, fetched)
    packed = await data.answer("now")
    assert await data.answer("now") is packed
    now = json.loads(packed)
    assert now["links"][0][:2] == ["n0", "n1"]
    assert now["links"][1][:2] == ["n1", "n0"]
    assert all(before[2] >= after[2] for before, after in pairwise(now["links"]))
    [(_, depth, rate, copies, holders)] = now["prefixes"]
    assert (depth, copies, holders) == (4, 1, ["n1"])
    assert rate > 0
    first = dict(zip(NODE_COLUMNS, now["nodes"][0], strict=True))
    assert (first["id"], first["roles"], first["running"], first["queue_s"]) == ("n0", "prefill", 3, 0.0)
    assert first["step_s"] is None
    cluster.clock.advance(1.0)
    assert await data.answer("now") is not packed


def at(cluster, seconds_ago):
    return f"at.{int(cluster.history.now_s - seconds_ago)}"


def by_name(told):
    return {row[0]: dict(zip(told["columns"], row, strict=True)) for row in told["nodes"]}


async def test_the_node_that_was_fullest_is_known_when_another_one_is_or_it_has_left():
    cluster = Cluster(2)
    data = data_of(cluster)
    prefill, decode = cluster.membership.sessions
    cluster.beat(decode, held=1_800)
    cluster.pass_seconds(30)
    cluster.beat(decode)
    cluster.beat(prefill, held=1_000)
    cluster.pass_seconds(30)
    cluster.membership.leave([decode], "it left")
    cluster.pass_seconds(30)
    told = json.loads(await data.answer("fullest"))
    rows = array("f", base64.b64decode(told["rows"]))
    fullest = [told["nodes"][-at] for at in (9, 6, 1)]
    assert fullest == ["n1", "n0", "n0"]
    width = len(told["names"])
    assert {told["budgets"][int(budget)] for budget in rows[::width]} == {"kv"}
    assert rows[-9 * width + 1] == pytest.approx(0.9)
    assert rows[-width + 1] == pytest.approx(0.5)
    before, now = by_name(await data.answer(at(cluster, 80))), by_name(await data.answer(at(cluster, 5)))
    assert before["n1"]["kv_held"] == pytest.approx(0.9, abs=1e-3)
    assert (before["n1"]["host"], before["n0"]["host"]) == (None, "here"), "of one that left no host is known"
    assert set(now) == {"n0"}
    assert now["n0"]["step_s"] is None


async def test_who_waits_to_be_placed_is_in_the_queue_of_each_node_that_prefills():
    cluster = Cluster(2)
    data = data_of(cluster)
    cluster.pass_seconds(9)
    Idle.queue.line_s = 1.5
    try:
        cluster.clock.advance(1.0)
        cluster.history.take(3, Idle.queue.line_s)
        now = by_name(json.loads(await data.answer("now")))
    finally:
        Idle.queue.line_s = 0.0
    assert (now["n0"]["queue_s"], now["n1"]["queue_s"]) == (1.5, None)
    told = json.loads(await data.answer("fullest"))
    rows = array("f", base64.b64decode(told["rows"]))
    share = rows[-len(told["names"]) + 1]
    assert (told["nodes"][-1], share) == ("n0", pytest.approx(0.075)), "of 2 s, in the mean of ten seconds"


async def test_requests_that_were_rejected_say_whose_budget_is_the_bottleneck():
    cluster = Cluster(2)
    data = data_of(cluster)
    cluster.beat(cluster.membership.sessions[1], held=1_000)
    cluster.pass_seconds(10)
    asked = make_request(slo=Slo(ttft_slo_s=0.01))
    for reason in (RejectReason.TTFT, RejectReason.WAITED, RejectReason.TBT):
        result = Rejection(asked.request_id, reason, 1.0)
        cluster.history.decided(decision(asked, cluster.view, result, 0.0, 0.0))
    cluster.serve(0.1, 0.01)
    cluster.pass_seconds(10)
    cluster.pass_seconds(10)
    told = json.loads(await data.answer("fullest"))
    rows = array("f", base64.b64decode(told["rows"]))
    names = told["names"]
    column = {name: rows[at :: len(names)].tolist()[-3:] for at, name in enumerate(names)}
    assert told["nodes"][-3:] == ["n1", "n0", "n1"], "the node that prefills, though another one is fuller"
    assert [told["budgets"][int(budget)] for budget in column["budget"]] == ["kv", "queue", "kv"]
    # of 10 blocks of 512 tokens the prompt takes longer than its bound on any node
    now = json.loads(await data.answer("now"))
    assert now["lacked"] == {"came": 3, "prefill": 1, "decode": 1, "speed": 1}, "in the last minute"
    lacked = {name: column[name][1] for name in ("came", "prefill", "decode", "speed")}
    assert lacked == {"came": 3.0, "prefill": 1.0, "decode": 1.0, "speed": 1.0}
    assert column["came"][2] == 0.0


async def test_what_a_node_may_use_up_leaves_a_prompt_the_time_to_be_computed():
    cluster = Cluster(2)
    data = data_of(cluster)
    unbounded = json.loads(await data.answer("now"))["limits"]
    cluster.serve(0.5, 0.01)
    cluster.clock.advance(2.0)
    told = json.loads(await data.answer("now"))
    assert (unbounded["queue_s"], unbounded["step_s"]) == (2.0, None), "nothing bounds steps here"
    assert told["limits"]["queue_s"] == pytest.approx(1.5)
    assert by_name(told)["n0"]["pace"] == 1.0
    bounded = Budgets(SloConfig(0.1, 0.08), COST, SchedulerSettings(ttft_headroom=0.85))
    for _ in range(3):
        bounded.computed(1.0)
    limits = bounded.limits
    assert limits.queue_s == pytest.approx(0.2 * 0.085), "however long prompts take"
    assert (limits.step_least_s, limits.step_s) == (COST.decode_step_s(1, 0), step_limit_s(0.08, COST))
    middle_s = (limits.step_least_s + limits.step_s) / 2
    assert limits.shares((math.nan, middle_s, 0.3))[1:] == [pytest.approx(0.5), 0.3]
    assert limits.shares((0.0, 0.0, 0.3))[:2] == [0.0, 0.0], "a step faster than the profile's is none"


async def test_a_moment_before_the_last_hour_is_of_the_day_and_one_before_all_is_empty():
    cluster = Cluster(1)
    data = data_of(cluster)
    cluster.pass_seconds(30)
    early = await data.answer(at(cluster, 4_000))
    assert (early["step_s"], early["nodes"]) == (300, [])
    cluster.beat(cluster.membership.sessions[0], held=1_000)
    cluster.pass_seconds(600)
    cluster.pass_seconds(3_700)
    of_day = await data.answer(at(cluster, 3_900))
    assert of_day["step_s"] == 300
    assert of_day["moment_s"] % 300 == 0
    assert by_name(of_day)["n0"]["kv_held"] == pytest.approx(0.5)
    told = json.loads(await data.answer("fullest-day"))
    assert told["step_s"] == 300
    assert told["nodes"][-2] == "n0"


def test_a_queue_and_a_step_are_shares_of_their_bounds_and_no_bound_is_no_budget():
    fullest, limits = Fullest(10, 100), Limits(4.0, 0.0, math.inf)
    fullest.put(0, {"p": (3.0, math.nan, 0.5, 1.0), "d": (math.nan, 9.0, 0.7, 1.0)}, limits)
    fullest.put(1, {"p": (math.nan, math.nan, math.nan, math.nan)}, limits)
    fullest.put(2, {"p": (0.0, math.nan, 0.2, 0.0), "d": (math.nan, 9.0, 0.1, 1.0)}, limits)
    fullest.put(2, {"late": (9.0, math.nan, 0.2, 0.0)}, limits)
    told = fullest.to_json()
    rows = array("f", base64.b64decode(told["rows"]))
    assert rows[:2].tolist() == [0.0, 0.75]
    assert (told["nodes"][0], told["nodes"][2]) == ("p", "p")
    assert math.isnan(rows[len(told["names"]) + 1]), "nothing is known of that row"
    assert rows[2 * len(told["names"]) + 1] == pytest.approx(0.2)


async def test_a_thousand_nodes_are_told_of_in_few_bytes():
    cluster = Cluster(MAX_NODES)
    assert len(await data_of(cluster).answer("now")) < 100 * MAX_NODES
    cluster.pass_seconds(10)
    assert len(json.dumps(await data_of(cluster).answer(at(cluster, 1)))) < 100 * MAX_NODES
