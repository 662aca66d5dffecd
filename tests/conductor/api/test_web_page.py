"""The page at /ui: what is served, what its functions make of that, and what a browser shows."""

import json
import re
import shutil
import subprocess

import httpx
import pytest

from conductor.api.web_page import FOLDER, MODULES
from tests.conductor.api.shown import ShownCluster
from tests.conductor.fakes import serving, spoken

FILES = {
    "/ui": ("index.html", "text/html"),
    "/ui/style.css": ("style.css", "text/css"),
    **{f"/ui/{name}.js": (f"{name}.js", "text/javascript") for name in MODULES},
}
MOST_BYTES = 150_000


async def test_the_page_is_whole_and_allows_no_script_but_its_own(model):
    async with serving(model, lambda _: spoken(model, "hi")) as api, httpx.AsyncClient() as client:
        for path, (file, media_type) in FILES.items():
            answer = await client.get(api.url + path)
            assert answer.content == (FOLDER / file).read_bytes()
            assert answer.headers["content-type"].startswith(media_type)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy


def test_all_files_of_the_page_are_served_and_they_are_few_bytes():
    assert {path.name for path in FOLDER.iterdir()} == {file for file, _ in FILES.values()}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MOST_BYTES


def test_the_page_asks_nobody_else_and_writes_no_markup():
    for file, _ in FILES.values():
        text = (FOLDER / file).read_text()
        assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|style=|\.style\b", text
        )


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed here")


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """The page's modules where node takes them as such."""
    folder = tmp_path_factory.mktemp("modules")
    for name in MODULES:
        shutil.copy(FOLDER / f"{name}.js", folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def in_node(folder, module, expression, value):
    """What an expression makes of `value` with the functions of a module."""
    script = (
        f"import * as page from {str(folder / module)!r}; import fs from 'node:fs';"
        "const value = JSON.parse(fs.readFileSync(0));"
        f"console.log(JSON.stringify({expression}) ?? 'null');"
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script],
        input=json.dumps(value),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_numbers_are_told_as_people_read_them(modules):
    told = in_node(
        modules,
        "draw.js",
        "[[0.25, 3, 119, 2460, null].map(page.seconds), [5, 59, 61, 2460, 7300, 1e6].map(page.age),"
        " [0, 0.5, 0.999].map(page.percent), [0.1234, 12345, 2.5e6].map(page.count),"
        " [0, 2.5e9].map(page.bytes), [0, 1, 2, 12345].map((value) => page.counted(value, 'new token')),"
        " [0, 0.3, 1, 7, 230].map(page.niceTop)]",
        None,
    )
    assert told == [
        ["250 ms", "3 s", "119 s", "41 min", "–"],
        ["5 s", "59 s", "1 min 1 s", "41 min", "2 h 1 min", "11 days"],
        ["0.0 %", "50 %", "99.9 %"],
        ["0.123", "12,345", "2.5 M"],
        ["0 B", "2.5 GB"],
        ["0 new tokens", "1 new token", "2 new tokens", "12,345 new tokens"],
        [1, 0.5, 1, 10, 250],
    ]


@needs_node
def test_a_column_is_drawn_in_bins_and_gaps_stay_gaps(modules):
    told = in_node(
        modules,
        "draw.js",
        "[page.binned([1, 3, NaN, NaN, 5, 7], 3, 'mean'), page.binned([1, 3, 5, 7], 2, 'max'),"
        " page.path([[0, 1], [1, 2], [2, null], [3, 4]], (x) => x, (y) => y)]",
        None,
    )
    assert [each[1] for each in told[0]] == [2, None, 6]
    assert [each[1] for each in told[1]] == [3, 7]
    assert told[2] == "M0.0 1.0L1.0 2.0M2.0 4.0h2"


@needs_node
async def test_the_history_is_unpacked_and_only_what_is_new_is_added(modules):
    cluster = ShownCluster(seconds=30)
    whole = await cluster.data.answer("hour")
    for second in range(30, 35):
        cluster.second(second)
    news = await cluster.data.answer(f"hour.{whole['next']}")
    again = await cluster.data.answer(f"hour.{news['next']}")
    told = in_node(
        modules,
        "data.js",
        "(() => { const series = new page.Series('hour', 32); value.forEach((each) => series.take(each));"
        " const {running, kv_held} = series.columns;"
        " return [series.length, series.fromS, [...running], [...kv_held]]; })()",
        [whole, news, again],
    )
    first, rows = cluster.history.hour.rows()
    column = dict(zip(cluster.history.hour.names, zip(*rows[-32:], strict=True), strict=True))
    assert told[:2] == [32, first + len(rows) - 32]
    assert told[2] == list(column["running"])
    assert told[3] == pytest.approx(list(column["kv_held"]))


@needs_node
def test_every_kind_of_attempt_has_a_sentence_and_bars_that_add_up(modules):
    cluster = ShownCluster(seconds=600)
    rows = [row for kind in ("latest", "missed", "rejected") for row in cluster.decisions.recent(600.0, kind)]
    attempts = [cluster.decisions.explain(row["request_id"])["attempts"][0] for row in rows]
    running = {**attempts[0]} | {"actual": None}
    rejected = attempts[0] | {
        "placed": None,
        "rejected": {"reason": "waited", "predicted_ttft_s": 0.0, "predicted_tbt_s": 0.0, "retry_after_s": 2},
    }
    value = json.loads(json.dumps([*attempts, running, rejected]))
    told = in_node(
        modules, "requests.js", "value.map((each) => [page.sentence(each), page.placed(each.parts)])", value
    )
    assert told[-1][0].startswith("Rejected: it waited to be placed as long as it may")
    assert told[-1][0].endswith("Its client was sent a time to ask again: 2 s.")
    assert told[-2][0].startswith("It runs: prefill on")
    vector = attempts[0] | {"asked": attempts[0]["asked"] | {"max_tokens": 0}}
    [said] = in_node(modules, "requests.js", "value.map(page.sentence)", json.loads(json.dumps([vector])))
    assert said.startswith("Finished, its vector after ")
    assert "Most of the time to its vector: " in said
    for (sentence, bars), attempt in zip(told[:-2], attempts, strict=True):
        actual = attempt["actual"]
        assert " Most of the time to its first token: " in sentence
        assert f"{actual['num_output_tokens']} tokens" in sentence
        is_late = actual["ttft_s"] > attempt["asked"]["slo"][0]
        assert ("late by" in sentence) == is_late
        whole = (
            actual["ttft_s"] + actual["frontend_s"] + actual["mean_tbt_s"] * (actual["num_output_tokens"] - 1)
        )
        assert bars["actual_s"] == pytest.approx(whole)
        [written] = [bar for bar in bars["actual"] if bar["part"]["name"] == "written"]
        [handed] = [bar for bar in bars["actual"] if bar["part"]["name"] == "handed over"]
        assert written["from"] + written["long"] == pytest.approx(handed["from"] + handed["long"])


@needs_node
def test_a_request_says_why_one_node_computes_its_prompt_and_decodes(modules):
    def attempt(prefill, decode, is_inline=False, max_tokens=9):
        placed = {"prefill_node": prefill, "decode_node": decode, "is_inline": is_inline}
        return {"placed": placed, "asked": {"max_tokens": max_tokens}}

    cases = [
        attempt("p0", "d0"),
        attempt("d0", "d0", True),
        attempt("p0", "p0"),
        attempt("p0", "p0", max_tokens=0),
    ]
    assert in_node(modules, "requests.js", "value.map((each) => page.where(each).join(''))", cases) == [
        "Prefill on p0, decode on d0",
        "Prefill and decode on d0, which computes its prompt beside what decodes there: "
        "that costs less than a prefill node and a hand-off",
        "Prefill and decode on p0, so that its KV goes nowhere",
        "Computed on p0, and nothing decodes: a vector was asked for",
    ]


@needs_node
def test_the_fullest_budget_is_the_bottleneck(modules):
    node = {"roles": "decode", "held": 10, "blocks": 100, "queue_s": None, "step_s": 0.05, "draining": False}
    nodes = [
        {**node, "id": "d0"},
        {**node, "id": "p0", "roles": "prefill", "step_s": None, "queue_s": 3.2},
        {**node, "id": "s0", "roles": "", "step_s": None, "held": None},
    ]
    limits = {"queue_s": 4.0, "step_least_s": 0.03, "step_s": 0.08}
    expression = (
        "[page.bottleneck(value.nodes, value.limits, null, value.lack),"
        " page.groups(value.nodes).map(({name}) => name)]"
    )
    told = in_node(modules, "cluster.js", expression, {"nodes": nodes, "limits": limits})
    assert told[0] == "The bottleneck now is p0: 80 % of its queue, 3.2 s of 4 s."
    assert told[1] == ["Prefill", "Decode", "Storage"]
    told = in_node(modules, "cluster.js", expression, {"nodes": nodes[:1], "limits": {}})
    assert told[0].startswith("Nothing is tight: the fullest is d0, 10 % of its KV blocks, 10 of 100.")
    lack = {"came": 100, "prefill": 0, "decode": 12, "speed": 4}
    told = in_node(modules, "cluster.js", expression, {"nodes": nodes, "limits": limits, "lack": lack})
    assert told[0].startswith(
        "The bottleneck now is decode. 12 % of the requests of the last minute were rejected"
    )
    assert "4.0 % of the requests of the last minute were rejected that not even an idle node" in told[0]
    assert told[0].endswith("is d0: 40 % of its step, 50 ms where 30 ms is the least and 80 ms the most.")


@needs_node
def test_a_node_that_is_slower_than_the_others_of_its_role_is_named(modules):
    nodes = [
        {"id": name, "roles": name[:-1], "host": "h", "pace": pace}
        for name, pace in (("prefill0", 1.1), ("prefill1", 3.04), ("prefill2", 1.0), ("decode0", 2.0))
    ]
    told = in_node(modules, "cluster.js", "[page.slower(value), page.slower(value.slice(2))]", nodes)
    assert told[0].startswith(
        "Slower than the others of its role: prefill1 takes 3.0 times what its profile says"
    )
    assert "decode0" not in told[0], "alone of its role it is slower than nobody"
    assert told[1] == ""


@needs_node
def test_a_rejection_says_which_numbers_were_compared_and_what_was_lacking(modules):
    judged = {
        "lacks": "prefill",
        "ahead_s": 1.5,
        "ttft_s": 3.2,
        "ttft_limit_s": 3.0,
        "tbt_s": 0.055,
        "tbt_limit_s": 0.051,
        "displaced_s": 0.004,
    }
    parts = [
        {"name": name, "predicted_s": 0.8, "actual_s": None, "beneath": ""} for name in ("ahead", "prefilled")
    ]
    attempts = [
        {
            "rejected": {"reason": reason, "retry_after_s": 2.0},
            "judged": judged | {"lacks": lacks},
            "asked": {"slo": [3.0, 0.06]},
            "parts": parts,
        }
        for reason, lacks in (("ttft", "prefill"), ("ttft", "speed"), ("tbt", "decode"))
    ]
    told = in_node(
        modules, "requests.js", "value.map((each) => [page.sentence(each), page.longest(each)])", attempts
    )
    [(late, longest), (slow, _), (dense, _)] = told
    assert longest == "ahead"
    assert (
        "predicted after 3.2 s, and admitted are 3 s. Of that 800 ms behind others who waited, 800 ms" in late
    )
    assert "It lacked a prefill node." in late
    assert "not even an idle node would have been in time" in slow
    assert "would have come to 55 ms, 4 ms of it because it takes the room of several" in dense
    assert (
        "admitted are 51 ms (85 % of its bound: predictions are not exact). It lacked a decode node." in dense
    )


@needs_node
def test_an_hour_ago_is_told_by_what_was_recorded_then(modules):
    def then(kv_held):
        return {"id": "d0", "queue_s": None, "step_s": 0.03, "kv_held": kv_held, "running": 2}

    expression = "value.map((node) => page.bottleneck([node], {step_s: 0.1, step_least_s: 0}, 1790000000))"
    told = in_node(modules, "cluster.js", expression, [then(0.93), then(0.4)])
    assert re.fullmatch(r"The bottleneck at ..:..:20 was d0: 93 % of its KV blocks\.", told[0])
    assert re.fullmatch(r"Nothing was tight at ..:..:20: the fullest was d0, 40 % of .*", told[1])


@needs_node
async def test_bottlenecks_of_the_hour_are_by_how_far_and_how_long_and_lead_to_their_worst_moment(modules):
    rows = {
        "first": 100,
        "step_s": 10,
        "budgets": ["queue", "step", "kv"],
        "nodes": ["d0", "d0", "p0", None, "p0", "p0", "p0", "d0", "d0"],
        "budget": [2, 2, 0, 0, 0, 0, 0, 2, 2],
        "share": [0.7, 0.95, 0.65, None, 1.5, 0.61, 0.59, 0.6, 0.61],
        "came": [10] * 9,
        "prefill": [0, 0, 0, None, 0, 0, 2, 0, 0],
        "decode": [0] * 9,
    }
    told = in_node(modules, "cluster.js", "page.bottlenecks(value)", rows)
    beyond = [one.pop("beyond") for one in told]
    assert beyond == [pytest.approx(11.6), pytest.approx(4.6)]
    assert told == [
        {"node": "p0", "budget": "queue", "seconds": 40, "worst": 1.5, "rejected": 2, "atS": 1040},
        {"node": "d0", "budget": "kv", "seconds": 40, "worst": 0.95, "rejected": 0, "atS": 1010},
    ]


@needs_node
def test_the_rates_of_links_lie_over_no_node_and_no_other_rate(modules):
    boxes = [
        {"left": 0, "top": top, "right": 200, "bottom": top + 100, "width": 200, "height": 100}
        for top in (0, 120)
    ]
    boxes += [{**box, "left": 700, "right": 900} for box in boxes]
    expression = (
        "(() => { const frame = {left: 0, top: 0};"
        " const all = [[0, 2], [1, 3], [0, 3], [1, 2]]"
        ".map(([a, b]) => page.curve(value[a], value[b], frame));"
        " return [page.labelled(all, value), page.labelled([all[0], all[0], all[0]],"
        " [{left: 0, top: 0, width: 900, height: 300}])]; })()"
    )
    [places, hidden] = in_node(modules, "flows.js", expression, boxes)
    assert all(places)
    apart = [abs(a[0] - b[0]) >= 74 or abs(a[1] - b[1]) >= 17 for a in places for b in places if a != b]
    assert all(apart)
    assert all(x - 37 > 200 and x + 37 < 700 for x, _ in places)
    assert hidden == [None, None, None]


@needs_node
def test_the_slow_part_of_a_start_is_named_before_a_long_answer(modules):
    def attempt(prefill_s, bound_s=None):
        parts = [("prefill", 1.2, prefill_s), ("decoded", 9.0, 9.5)]
        return {
            "parts": [{"name": name, "predicted_s": far, "actual_s": took} for name, far, took in parts],
            "asked": {"slo": [bound_s, None]},
            "actual": {"ttft_s": prefill_s},
        }

    cases = [attempt(1.3), attempt(3.8), attempt(1.3, bound_s=1.0)]
    assert in_node(modules, "requests.js", "value.map(page.longest)", cases) == [
        "decoded",
        "prefill",
        "prefill",
    ]


@needs_node
def test_the_worst_moment_of_a_minute_is_shown_not_its_mean(modules):
    told = in_node(
        modules,
        "overview.js",
        "page.numbers({ stepS: 20, columns: { ttft_p99: [9, NaN, value, 2] }, mean: () => 1 })",
        3.5,
    )
    assert dict(told)["TTFT p99, worst"] == "3.5 s"
    assert dict(told)["TBT p99, worst"] == "–"


@needs_node
def test_a_node_says_what_its_last_step_was_made_of(modules):
    steps = [
        {"step_rows": 12, "step_prompt_tokens": 512, "step_budget": 2048},
        {"step_rows": 0, "step_prompt_tokens": 0, "step_budget": 2048},
        {"step_rows": None, "step_prompt_tokens": None, "step_budget": None},
    ]
    told = in_node(modules, "cluster.js", "value.map(page.made)", steps)
    assert told == ["12 rows + 512 of 2,048 tokens", "no step now", ""]


@needs_node
def test_of_a_trace_that_is_too_long_for_a_call_its_first_lines_are_taken(modules):
    expression = "value.map(([text, most]) => Object.values(page.fitting(text, most)))"
    rows = '{"a": 1}\n' * 10
    cases = [
        [rows, 1_000],
        [rows, 30],
        ["x" * 100, 50],
        ["", 50],
        ["\u20ac\n\u20ac\n", 8],
        [rows.rstrip(), 1_000],
    ]
    told = in_node(modules, "replay.js", expression, cases)
    assert told[0] == [rows, 10]
    assert told[1] == [rows[:18], 2], "a quote and an end of line take two bytes of a call"
    assert told[2:4] == [["", 0], ["", 0]]
    assert told[4] == ["\u20ac\n", 1], "bytes and not characters"
    assert told[5] == [rows.rstrip(), 10]


@needs_node
def test_what_if_names_the_clusters_a_step_away_and_answers_the_question(modules):
    nodes = [{"roles": roles, "draining": False} for roles in ("prefill", "prefill", "decode")]
    [steps, following, both] = in_node(
        modules,
        "replay.js",
        "value.map(([nodes, follow]) => page.steps(nodes, follow))",
        [[nodes, False], [nodes, True], [[{"roles": "decode+prefill"}], True]],
    )
    assert [name for name, _ in steps] == ["2P1D", "3P1D", "2P2D", "1P2D"]
    assert following == [["2P1D", "as it is"], ["3P1D", "one more node"], ["1P1D", "one less"]]
    assert [name for name, _ in both] == ["1C", "2C"]

    def run(name, share, p99_s):
        return {"nodes": name, "report": {"served_within": share, "ttft_s": {"p99": p99_s}}}

    called = dict(steps)
    cases = [
        [[run("2P1D", 0.8, 9.0), run("3P1D", 0.97, 2.0), run("2P2D", 0.81, 9.0)], called],
        [[run("2P1D", 1.0, 2.0), run("3P1D", 1.0, 1.0)], called],
        [[run("2P1D", 0.8, 2.0), run("3P1D", 0.8, 2.0)], called],
        [[run("2P1D", 0.8, 2.0)], called],
    ]
    told = in_node(modules, "replay.js", "value.map(([runs, called]) => page.verdict(runs, called))", cases)
    assert told[0].startswith("One more prefill node, yes (3P1D: 97 % would have been served")
    assert "; one more decode node, " in told[0], "each role is answered by itself"
    assert told[1].startswith(
        "No: in the replay 100.0 % are within their bounds with 2P1D already; the slowest hundredth"
    )
    assert told[2].startswith("No: none of these clusters")
    assert told[3] == ""
    was = [{"served_within": share, "ttft_s": {"p99": 9.5}} for share in (0.79, 0.6)]
    told = in_node(
        modules,
        "replay.js",
        "value[1].flatMap((was) => [page.verdict(value[0], {}, was), page.errorOf(was, value[0][0])])",
        [cases[0][0], was],
    )
    assert told[0].startswith("Yes: with 3P1D"), "17 points more is more than an error of one"
    assert "measured were 79 % within bounds and a TTFT p99 of 9.5 s" in told[1]
    assert "80 % (1 points kinder) and 9 s" in told[1]
    assert told[2].startswith("Perhaps: with 3P1D"), "and less than one of twenty"
    nobody = {"served_within": 0.0, "completed": 0, "ttft_s": {"p99": 0.0}}
    told = in_node(modules, "replay.js", "page.errorOf(value, {report: value})", nobody)
    assert "0.0 % within bounds and a TTFT p99 of –; the replay" in told, "nobody had a first token"


@needs_node
def test_an_answer_is_gathered_from_its_events(modules):
    events = [
        {"id": "chatcmpl-1", "choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"reasoning_content": "Hm."}}]},
        {"choices": [{"delta": {"content": "Hello"}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "weather"}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}}]},
        {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
        {
            "choices": [],
            "usage": {
                "prompt_tokens": 40,
                "completion_tokens": 11,
                "prompt_tokens_details": {"cached_tokens": 32},
            },
        },
    ]
    expression = (
        "(() => { const answer = {text: '', reasoning: '', calls: []};"
        " value.forEach((event, at) => page.take(answer, event, 100 * at)); answer.lastMs = 1100;"
        " return [answer, page.summary(answer)]; })()"
    )
    answer, told = in_node(modules, "playground.js", expression, events)
    assert (answer["id"], answer["text"], answer["reasoning"]) == ("chatcmpl-1", "Hello", "Hm.")
    assert answer["calls"] == [{"id": "c", "name": "weather", "arguments": "{}"}]
    assert told == (
        "first token after 100 ms · 32 of 40 prompt tokens hit (80 %) · 11 new tokens · 10 a second"
        " · ended: tool_calls"
    )
