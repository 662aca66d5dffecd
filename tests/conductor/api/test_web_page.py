"""The page at /ui: what is served, what its functions make of that, and what a browser shows."""

import asyncio
import json
import re
import shutil
import subprocess

import httpx
import pytest

from conductor.api.panel_values import PanelValues
from conductor.api.panels import DASHBOARDS
from conductor.api.web_page import FOLDER
from conductor.placing.decisions import Actual
from conductor.placing.explain import MAX_LISTED, Decisions
from conductor.placing.placement import Placement
from conductor.placing.scheduler_settings import SchedulerSettings
from tests.conductor.api.browser import chromium
from tests.conductor.fakes import serving, spoken
from tests.conductor.placing.test_decisions import COST, history

FILES = {
    "/ui": ("index.html", "text/html"),
    "/ui/page.js": ("page.js", "text/javascript"),
    "/ui/style.css": ("style.css", "text/css"),
}
LATE = "SLO missed, by cause"
HOSTILE = "<img src=x onerror=\"document.title='hacked'\">"
NODE = {
    "host": "h",
    "transports": ["shm", "tcp"],
    "blocks": 40,
    "held_blocks": 10,
    "running": 1,
    "waiting": 2,
    "queued_tokens": 3000,
    "draining": False,
}
STATUS = {
    "ready": True,
    "running_requests": 7,
    "waiting_requests": 1,
    "nodes": [
        {"id": "p0", "roles": ["prefill"], **NODE},
        {"id": HOSTILE, "roles": ["decode"], **NODE, "draining": True},
        {"id": "s0", "roles": [], "host": "h", "transports": [], "blocks": 9},
    ],
}


def decisions_of_a_busy_cluster(**renamed):
    settings = SchedulerSettings()
    decisions = Decisions(COST, settings)
    for made in history(1, settings):
        name = renamed.get(made.asked.request_id, made.asked.request_id)
        decisions.decided(made._replace(asked=made.asked._replace(request_id=name)))
    return decisions


PANELS = PanelValues("http://127.0.0.1:1", lambda: 0.0)


def drawn_for(name):
    """Two lines, for any panel."""
    points = [[1000.0 + 60 * minute, 0.1 * (minute % 5)] for minute in range(60)]
    return {
        "series": [{"legend": f"{name} {line}", "points": points[line:]} for line in (0, 1)],
        "problem": "",
    }


def reports(decisions):
    return {
        "/status": lambda: STATUS,
        "/v1/panels": PANELS.boards,
        "/v1/panels/{name}": drawn_for,
        "/v1/explain": lambda: decisions.recent(100.0),
        "/v1/explain/{name}": decisions.explain,
    }


async def test_the_page_is_whole_and_allows_no_script_but_its_own(model):
    async with serving(model, lambda _: spoken(model, "hi")) as api, httpx.AsyncClient() as client:
        for path, (file, media_type) in FILES.items():
            answer = await client.get(api.url + path)
            assert answer.content == (FOLDER / file).read_bytes()
            assert answer.headers["content-type"].startswith(media_type)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy


def test_the_page_asks_nobody_else_and_writes_no_markup():
    for file, _ in FILES.values():
        text = (FOLDER / file).read_text()
        assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)


def test_requests_are_listed_newest_first_with_how_they_went():
    settings = SchedulerSettings()
    decisions, made = Decisions(COST, settings), history(2, settings)
    for each in made:
        decisions.decided(each)
    placed = [each for each in made if isinstance(each.result, Placement)]
    decisions.ended(placed[0].asked.request_id, Actual(9.0, "finished", ttft_s=0.5, num_output_tokens=4))
    rows = decisions.recent(made[-1].decided_at_s)
    assert [row["request_id"] for row in rows] == [each.asked.request_id for each in reversed(made)]
    by_id = {row["request_id"]: row for row in rows}
    first = by_id[placed[0].asked.request_id]
    assert (first["state"], first["ttft_s"], first["num_output_tokens"]) == ("finished", 0.5, 4)
    assert by_id[placed[1].asked.request_id]["state"] == "running"
    assert {row["state"].partition(":")[0] for row in rows} == {"finished", "running", "rejected"}
    assert all(row["age_s"] >= 0 for row in rows)
    assert json.loads(json.dumps(rows)) == rows


def test_no_more_requests_are_listed_than_a_page_can_show():
    settings = SchedulerSettings()
    decisions = Decisions(COST, settings)
    for made in history(1, settings, num_requests=MAX_LISTED + 20):
        decisions.decided(made)
    assert len(decisions.recent(1e9)) == MAX_LISTED


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed here")


def in_node(expression, value):
    """What an expression of the page's functions makes of `value`."""
    script = (
        f"const page = require({str(FOLDER / 'page.js')!r});"
        f"const value = JSON.parse(require('fs').readFileSync(0));"
        f"console.log(JSON.stringify({expression}));"
    )
    done = subprocess.run(
        ["node", "-e", script],
        input=json.dumps(value),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
async def test_the_numbers_are_those_of_the_metrics_between_two_looks(model):
    def script(_):
        return spoken(model, "hi there", num_cached_tokens=3)

    async with serving(model, script) as api, httpx.AsyncClient() as client:
        looks = [(await client.get(f"{api.url}/metrics")).text]
        body = {"model": "tiny", "prompt": "abcdef", "max_tokens": 20}
        assert (await client.post(f"{api.url}/v1/completions", json=body)).status_code == 200
        looks.append((await client.get(f"{api.url}/metrics")).text)
    expression = (
        "page.numbers(value.status, page.parseMetrics(value.looks[0]), page.parseMetrics(value.looks[1]), 2)"
    )
    shown = dict(await asyncio.to_thread(in_node, expression, {"status": STATUS, "looks": looks}))
    assert shown["requests running"] == "7"
    assert shown["prefix hit rate, last minute"] == "50.0 %"
    assert float(shown["tokens a second"]) > 0
    assert shown["KV blocks held"] == "0.0 %"


@needs_node
def test_a_quantile_lies_in_its_bucket_and_a_restarted_counter_counts_from_nothing():
    lines = 'h_bucket{le="0.1"} 10\nh_bucket{le="1.0"} 20\nh_bucket{le="+Inf"} 20\n'
    value = {"first": 'h_bucket{le="0.1"} 100\n# HELP h x\n', "last": lines}
    looks = "page.parseMetrics(value.first), page.parseMetrics(value.last)"
    assert in_node(f"page.quantile(0.5, 'h', {looks})", value) == pytest.approx(0.1)
    assert 0.1 < in_node(f"page.quantile(0.9, 'h', {looks})", value) <= 1.0
    assert in_node(f"page.quantile(0.5, 'h', {looks})", {"first": lines, "last": lines}) is None


@needs_node
@pytest.mark.parametrize(
    ("unit", "value", "told"),
    [
        ("s", 0.25, "250 ms"),
        ("percentunit", 0.5, "50.0 %"),
        ("reqps", 3, "3/s"),
        ("Bps", 2.5e9, "2.5 GB/s"),
        ("Bps", 0, "0 B/s"),
        ("short", 12345, "12,350"),
    ],
)
def test_a_panels_numbers_have_its_unit(unit, value, told):
    assert in_node("page.inUnit(value.unit, value.value)", {"unit": unit, "value": value}) == told


@needs_node
def test_lines_begin_at_nought_and_fill_their_frame():
    series = [{"points": [[100, 0], [160, 2]]}, {"points": [[130, 1]]}]
    told = in_node("page.drawn(value, 200, 50)", series)
    assert told["lines"] == ["0.0,50.0 200.0,0.0", "100.0,25.0"]
    assert (told["top"], told["fromS"], told["untilS"]) == (2, 100, 160)
    assert in_node("page.drawn(value, 200, 50)", [{"points": []}]) is None
    assert in_node("page.drawn(value, 200, 50)", [{"points": [[5, 0]]}])["lines"] == ["200.0,50.0"]


@needs_node
def test_every_kind_of_explanation_can_be_told():
    decisions = decisions_of_a_busy_cluster()
    rows = decisions.recent(1e9)
    attempts = [decisions.explain(row["request_id"])["attempts"][0] for row in rows]
    told = in_node("value.map(page.explained)", json.loads(json.dumps(attempts)))
    assert {line[0] for each in told for line in each["lines"]} == {
        "asked",
        "placed",
        "predicted",
        "rejected",
    }
    for each, attempt in zip(told, attempts, strict=True):
        nodes = [row[0] for row in each["tables"][0]["rows"]]
        assert nodes == [row["node"] for row in attempt["prefill_candidates"]]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed here")
async def test_a_browser_shows_the_cluster_and_explains_the_request_that_is_clicked(model, tmp_path):
    decisions = decisions_of_a_busy_cluster(r79=HOSTILE)
    placed = [
        (number, row) for number, row in enumerate(decisions.recent(100.0), 1) if row.get("prefill_node")
    ]
    number, row = placed[1]

    def look(url):
        with chromium(tmp_path / "profile") as page:
            page.open(f"{url}/ui")
            page.until("document.querySelectorAll('#requests tbody tr').length")
            seen = page.run("document.body.innerText")
            boxes = page.run("document.querySelectorAll('#topology rect[rx]').length")
            page.click(f"#requests tbody tr:nth-child({number})")
            explained = page.until("document.querySelector('#attempts tr.chosen')?.textContent")
            chosen = page.run("document.getElementById('explained').textContent")
            page.until("document.querySelectorAll('#panels polyline').length")
            page.click("#boards button:nth-child(2)")
            titles = page.until(
                f"document.querySelector('#panels').innerText.includes({LATE!r}) "
                "&& [...document.querySelectorAll('#panels h3')].map((title) => title.textContent)"
            )
            lines = page.run("document.querySelectorAll('#panels polyline').length")
            picture = page.screenshot()
            (tmp_path / "page.png").write_bytes(picture)
            return seen, boxes, explained, chosen, picture, page.run("document.title"), titles, lines

    async with serving(model, lambda _: spoken(model, "hi"), reports=reports(decisions)) as api:
        seen, boxes, explained, chosen, picture, title, titles, lines = await asyncio.to_thread(look, api.url)
    assert boxes == len(STATUS["nodes"]) + 1
    assert "draining" in seen
    assert "10 of 40" in seen
    assert HOSTILE in seen, "a name is shown as it is"
    assert title == "Conductor", "a name was taken for markup"
    assert chosen == row["request_id"]
    assert explained.startswith(row["prefill_node"])
    assert titles == [panel.title for panel in DASHBOARDS[1].panels]
    assert lines == 2 * len(titles)
    assert picture.startswith(b"\x89PNG")
