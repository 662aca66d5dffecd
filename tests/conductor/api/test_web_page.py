"""The page at /ui: what is served, what its functions make of that, and what a browser shows."""

import asyncio
import json
import re
import shutil
import subprocess

import httpx
import pytest

from conductor.api.web_page import FOLDER, MODULES
from tests.conductor.api.browser import chromium
from tests.conductor.api.shown import HOSTILE, ShownCluster
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
        " [0, 2.5e9].map(page.bytes),"
        " [0, 0.3, 1, 7, 230].map(page.niceTop)]",
        None,
    )
    assert told == [
        ["250 ms", "3 s", "119 s", "41 min", "–"],
        ["5 s", "59 s", "1 min 1 s", "41 min", "2 h 1 min", "11 days"],
        ["0.0 %", "50 %", "99.9 %"],
        ["0.123", "12,345", "2.5 M"],
        ["0 B", "2.5 GB"],
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
        "rejected": {"reason": "ttft", "predicted_ttft_s": 9.0, "predicted_tbt_s": 0.1, "retry_after_s": 2.0},
    }
    value = json.loads(json.dumps([*attempts, running, rejected]))
    told = in_node(
        modules, "requests.js", "value.map((each) => [page.sentence(each), page.placed(each.parts)])", value
    )
    assert told[-1][0].startswith("Rejected (ttft): its first token was predicted after 9 s")
    assert told[-2][0].startswith("It runs: prefill on")
    for (sentence, bars), attempt in zip(told[:-2], attempts, strict=True):
        actual = attempt["actual"]
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
def test_the_fullest_budget_is_the_bottleneck(modules):
    node = {"roles": "decode", "held": 10, "blocks": 100, "queue_s": None, "step_s": 0.05, "draining": False}
    nodes = [
        {**node, "id": "d0"},
        {**node, "id": "p0", "roles": "prefill", "step_s": None, "queue_s": 3.2},
        {**node, "id": "s0", "roles": "", "step_s": None, "held": None},
    ]
    bounds = {"ttft_s": 4.0, "tbt_s": 0.1}
    expression = (
        "[page.bottleneck(value.nodes, value.bounds), page.groups(value.nodes).map(({name}) => name)]"
    )
    told = in_node(modules, "cluster.js", expression, {"nodes": nodes, "bounds": bounds})
    assert told[0] == "The bottleneck now is p0: 80 % of its TTFT bound (queue), 3.2 s of 4 s."
    assert told[1] == ["Prefill", "Decode", "Storage"]
    told = in_node(modules, "cluster.js", expression, {"nodes": nodes[:1], "bounds": {}})
    assert told[0].startswith("Nothing is tight: the fullest is d0, 10 % of its KV blocks held")


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
    assert dict(told)["TTFT, 99 %"] == "3.5 s"
    assert dict(told)["TBT, 99 %"] == "–"


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
def test_what_if_names_the_clusters_a_step_away_and_answers_the_question(modules):
    nodes = [{"roles": roles, "draining": False} for roles in ("prefill", "prefill", "decode")]
    [steps, both] = in_node(
        modules, "replay.js", "value.map(page.steps)", [nodes, [{"roles": "decode+prefill"}]]
    )
    assert [name for name, _ in steps] == ["2P1D", "3P1D", "2P2D", "1P2D"]
    assert [name for name, _ in both] == ["1C", "2C"]

    def run(name, share, p99_s):
        return {"nodes": name, "report": {"effective_capacity": share, "ttft_s": {"p99": p99_s}}}

    called = dict(steps)
    cases = [
        [[run("2P1D", 0.8, 9.0), run("3P1D", 0.97, 2.0), run("2P2D", 0.81, 9.0)], called],
        [[run("2P1D", 1.0, 2.0), run("3P1D", 1.0, 1.0)], called],
        [[run("2P1D", 0.8, 2.0), run("3P1D", 0.8, 2.0)], called],
        [[run("2P1D", 0.8, 2.0)], called],
    ]
    told = in_node(modules, "replay.js", "value.map(([runs, called]) => page.verdict(runs, called))", cases)
    assert told[0].startswith("Yes: with one more prefill node (3P1D) 97 % would have been served")
    assert told[1].startswith(
        "No: in the replay 100.0 % are within their bounds with 2P1D already; the slowest hundredth"
    )
    assert told[2].startswith("No: none of these clusters")
    assert told[3] == ""


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
        " return [answer, page.told(answer)]; })()"
    )
    answer, told = in_node(modules, "playground.js", expression, events)
    assert (answer["id"], answer["text"], answer["reasoning"]) == ("chatcmpl-1", "Hello", "Hm.")
    assert answer["calls"] == [{"id": "c", "name": "weather", "arguments": "{}"}]
    assert told == (
        "first token after 100 ms · 32 of 40 prompt tokens hit (80 %) · 11 new tokens · 10 a second"
        " · ended: tool_calls"
    )


needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed here")
HEADING = "document.querySelector('#view h2')?.textContent"


async def shown(model, cluster, look, tmp_path, script=None, **options):
    """Return what `look` makes of a page that shows a cluster, and of where it is."""

    def drive(url):
        with chromium(tmp_path / "profile") as page:
            return look(page, url)

    script = script or (lambda _: spoken(model, "hi there"))
    async with serving(model, script, reports=cluster.reports, **options) as api:
        return await asyncio.to_thread(drive, api.url)


@pytest.mark.full
@needs_chromium
async def test_every_view_is_reached_by_click_and_by_keyboard(model, tmp_path):
    cluster = ShownCluster(seconds=900).keeps_moving()

    def look(page, url):
        page.open(f"{url}/ui")
        page.until(f"{HEADING} === 'Overview'")
        assert page.run("document.querySelectorAll('.chart path.line').length") > 10
        for tab, heading in (("cluster", "Cluster"), ("requests", "Requests"), ("playground", "Playground")):
            page.click(f"#tabs a[href^='#/{tab}']")
            page.until(f"{HEADING} === {heading!r}")
            assert page.run("document.activeElement.tagName") == "H2", "what is read next is the view"
        page.run("document.querySelector('#tabs a').focus()")
        for heading in ("Overview", "Cluster", "Requests", "Playground", "Replay a trace", "What if"):
            page.key("Enter")
            page.until(f"{HEADING} === {heading!r}")
            page.run(
                "[...document.querySelectorAll('#tabs a')].find((a) => a.ariaCurrent === 'page').focus()"
            )
            page.key("Tab")
        return page.run("document.title")

    assert await shown(model, cluster, look, tmp_path) == "What if · Conductor"


@pytest.mark.full
@needs_chromium
async def test_a_request_is_found_by_each_list_and_by_its_id(model, tmp_path):
    cluster = ShownCluster(seconds=900)

    def look(page, url):
        page.open(f"{url}/ui#/requests/missed")
        page.until(f"{HEADING} === 'Requests'")
        late = page.until("document.querySelectorAll('#view tbody tr').length")
        page.click("#view tbody tr:nth-child(1) td:nth-child(3)")
        page.until(f"{HEADING}.startsWith('Request ')")
        sentence = page.run("document.querySelector('.sentence').textContent")
        parts = page.run(
            "[...document.querySelectorAll('.waterfall tbody th')].map((each) => each.textContent)"
        )
        top = page.run("document.querySelector('.waterfall').getBoundingClientRect().top < innerHeight")
        page.open(f"{url}/ui?again#/requests/latest")
        page.until("document.querySelector('#find-id')")
        page.run("document.querySelector('#find-id').focus()")
        page.write("no-such-request")
        page.key("Enter")
        nothing = page.until(
            "document.querySelector('#view .empty')?.textContent.includes('latest thousand')"
        )
        return late, sentence, parts, top, nothing

    late, sentence, parts, top, nothing = await shown(model, cluster, look, tmp_path)
    assert late == len(cluster.decisions.recent(900.0, "missed"))
    assert "late by" in sentence
    assert parts[0] == "read and tokenised"
    assert "prompt computed in 3 steps" in parts
    assert top, "the waterfall is seen without scrolling"
    assert nothing


@pytest.mark.full
@needs_chromium
async def test_focus_and_what_is_typed_outlive_refreshes_and_names_are_no_markup(model, tmp_path):
    cluster = ShownCluster(seconds=100)

    def look(page, url):
        page.open(f"{url}/ui#/requests/latest")
        page.until("document.querySelectorAll('#view tbody tr').length")
        page.run("document.querySelector('#find-id').focus()")
        page.write("half")
        page.run("document.querySelector('#view tbody tr:nth-child(4) a').focus()")
        before = page.run("document.activeElement.textContent")
        cluster.ask(1.0)
        cluster.clock.advance(1.0)
        first = page.run("document.querySelector('#view tbody tr').dataset.key")
        page.until(f"document.querySelector('#view tbody tr').dataset.key !== {json.dumps(first)}")
        kept = page.run("[document.activeElement.textContent, document.querySelector('#find-id').value]")
        return before, kept, page.run("document.title"), page.run("document.body.innerText")

    before, kept, title, text = await shown(model, cluster, look, tmp_path)
    assert kept == [before, "half"]
    assert HOSTILE in text, "a name is shown as it is"
    assert "hacked" not in title


@pytest.mark.full
@needs_chromium
async def test_four_hundred_nodes_are_grouped_walked_by_arrow_keys_and_opened(model, tmp_path):
    cluster = ShownCluster(150, 250, seconds=40, hosts=50).keeps_moving()

    def look(page, url):
        page.open(f"{url}/ui#/cluster")
        page.until("document.querySelectorAll('[data-node]').length === 400")
        flows = page.until("document.querySelectorAll('#flows path').length")
        in_order = page.run("document.querySelectorAll('[data-node][tabindex=\"0\"]').length")
        page.run("document.querySelector('[data-node][tabindex=\"0\"]').focus()")
        first = page.run("document.activeElement.dataset.node")
        page.key("ArrowRight")
        second = page.run("document.activeElement.dataset.node")
        page.key("Enter")
        page.until(f"{HEADING} === 'Node ' + {second!r}")
        charts = page.until("document.querySelectorAll('.chart').length")
        return flows, in_order, first, second, charts

    flows, in_order, first, second, charts = await shown(model, cluster, look, tmp_path)
    assert flows == 24
    assert in_order == 1, "Tab stops at the nodes once"
    assert first != second
    assert charts >= 3


@pytest.mark.full
@needs_chromium
async def test_an_empty_cluster_says_what_to_do_in_each_view(model, tmp_path):
    cluster = ShownCluster(0, 0, seconds=0)

    def look(page, url):
        told = {}
        for view in ("overview", "cluster", "requests/latest", "requests/rejected", "playground", "whatif"):
            page.open(f"{url}/ui?{view}#/{view}")
            page.until(HEADING)
            told[view] = page.until("document.querySelector('#view .empty')?.textContent")
        page.click("#view form button")
        problem = page.until("document.querySelector('#view [role=alert]')?.textContent")
        return told, problem

    told, problem = await shown(model, cluster, look, tmp_path)
    assert "conductor bench" in told["overview"]
    assert "conductor up" in told["cluster"]
    assert "playground" in told["requests/latest"].lower()
    assert "rejected" in told["requests/rejected"]
    assert "no request has ended in the last hour" in problem


@pytest.mark.full
@needs_chromium
async def test_the_playground_streams_shows_hits_and_leads_to_the_request(model, tmp_path):
    cluster = ShownCluster(seconds=10)

    def look(page, url):
        page.open(f"{url}/ui#/playground")
        page.until(f"{HEADING} === 'Playground'")
        page.run("document.querySelector('#words').focus()")
        page.write("Say hello")
        page.key("Enter")
        page.until("document.querySelector('#talk article.assistant .note')")
        said = page.run("document.querySelector('#talk').innerText")
        page.click("#example") if page.run("document.querySelector('details').open = true") else None
        tools = page.run("document.querySelector('#tools').value")
        link = page.run("document.querySelector('#talk article.assistant a').getAttribute('href')")
        page.click("#again")
        return said, tools, link, page.run("document.querySelector('#talk').innerText")

    script = lambda _: spoken(model, "hi there", num_cached_tokens=3)  # noqa: E731
    said, tools, link, after = await shown(model, cluster, look, tmp_path, script)
    assert "hi there" in said
    assert "first token after" in said
    assert "3 of" in said
    assert "weather" in tools
    assert link.startswith("#/request/chatcmpl-")
    assert "Say something" in after


@pytest.mark.full
@needs_chromium
@pytest.mark.timeout(300)
async def test_the_last_hour_and_a_dropped_trace_are_replayed(model, tmp_path):
    cluster = ShownCluster(seconds=120)

    def look(page, url):
        page.open(f"{url}/ui#/whatif")
        page.until(f"{HEADING} === 'What if'")
        page.run("document.querySelector('#nodes').value = '1P1D 2P1D'")
        page.click("#view form button")
        verdict = page.until(
            "document.querySelectorAll('#view tbody tr').length === 2"
            " && document.querySelector('.sentence').textContent",
            60,
        )
        page.open(f"{url}/ui?drop#/replay")
        page.until(f"{HEADING} === 'Replay a trace'")
        page.run(
            "(() => { const rows = [0, 900].map((timestamp) => JSON.stringify({timestamp,"
            " input_length: 600, output_length: 9, hash_ids: [0, 1 + timestamp]})).join('\\n');"
            " const file = new File([rows], 'two.jsonl'), moved = new DataTransfer(); moved.items.add(file);"
            " document.querySelector('#drop').dispatchEvent("
            "new DragEvent('drop', {dataTransfer: moved, bubbles: true})); })()"
        )
        page.until("document.querySelector('#named').textContent === 'two.jsonl: 2 lines'")
        page.click("#view form button")
        figures = page.until("document.querySelectorAll('.report figure svg').length", 60)
        saved = page.run("document.querySelector('a[download]').download")
        scripts = page.run("document.querySelectorAll('.report script, .report style').length")
        return verdict, figures, saved, scripts

    verdict, figures, saved, scripts = await shown(model, cluster, look, tmp_path)
    assert verdict.startswith(("Yes:", "No:"))
    assert figures >= 5
    assert saved == "replay-2P2D.html"
    assert scripts == 0


@pytest.mark.full
@needs_chromium
async def test_first_paint_needs_no_answer_of_the_cluster(model, tmp_path):
    cluster = ShownCluster(seconds=60)

    def look(page, url):
        page.open(f"{url}/ui")
        page.until(HEADING)
        return page.run("performance.getEntriesByType('resource').map(({name}) => new URL(name).pathname)")

    asked = await shown(model, cluster, look, tmp_path)
    assert {path for path in asked if not path.startswith("/ui/")} == {"/v1/page/hour"}, (
        "one question, no more"
    )
