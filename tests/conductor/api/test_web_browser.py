"""The page at /ui in a real Chromium: each view by click and by keyboard, and what it shows."""

import asyncio
import json
import shutil

import pytest

from tests.conductor.api.browser import chromium
from tests.conductor.api.shown import HOSTILE, TRACE_PAGE, ShownCluster
from tests.conductor.builders import make_heartbeat
from tests.conductor.fakes import serving, spoken

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed here"),
]
HEADING = "document.querySelector('#view h2')?.textContent"


async def shown(model, cluster, look, tmp_path, script=None, **options):
    """Return what `look` makes of a page that shows a cluster, and of where it is."""

    def drive(url):
        with chromium(tmp_path / "profile") as page:
            return look(page, url)

    script = script or (lambda _: spoken(model, "hi there"))
    async with serving(model, script, reports=cluster.reports, **options) as api:
        return await asyncio.to_thread(drive, api.url)


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
        title = page.run("document.title")
        for nowhere in ("constructor", "overview/__proto__", "toString/a", "node/%ZZ"):
            page.open(f"{url}/ui?{nowhere}#/{nowhere}")
            page.until(
                f"['Overview', 'Node %ZZ'].includes({HEADING}) && document.querySelector('#problem').hidden"
            )
        return title

    assert await shown(model, cluster, look, tmp_path) == "What if · Conductor"


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
        explained = page.run(
            "(() => { const all = (which) => [...document.querySelectorAll(which)];"
            " const known = all('.words dd').map((each) => each.textContent);"
            " const said = all('.waterfall tbody th[title]').map((each) => each.title);"
            " return [said.length, said.filter((each) => !known.includes(each)).length]; })()"
        )
        back = page.run(
            "[...document.querySelectorAll('#view h2 ~ p a, #view .note a')].slice(0, 2)"
            ".map((each) => each.getAttribute('href'))"
        )
        trace = page.run("document.querySelector('#view a[rel]').href")
        page.click("#view a[href^='#/cluster/at/']")
        page.until(f"{HEADING} === 'Cluster'")
        then = page.run("document.querySelector('.sentence').textContent")
        page.run("history.back()")
        page.until(f"{HEADING}.startsWith('Request ')")
        page.click("#view section a[href^='#/node/prefill']")
        page.until(f"{HEADING}.startsWith('Node ')")
        node = page.run(HEADING)
        page.open(f"{url}/ui?again#/requests/latest")
        page.until("document.querySelector('#find-id')")
        page.run("document.querySelector('#find-id').focus()")
        page.write("no-such-request")
        page.key("Enter")
        nothing = page.until(
            "document.querySelector('#view .empty')?.textContent.includes('latest thousand')"
        )
        return late, sentence, parts, (top, explained, back, trace, then, node), nothing

    late, sentence, parts, seen, nothing = await shown(model, cluster, look, tmp_path)
    top, explained, back, trace, then, node = seen
    assert late == len(cluster.decisions.recent(900.0, "missed"))
    assert "late by" in sentence
    assert parts[0] == "read and tokenised"
    assert "tokens after the first" in parts[-2]
    assert explained == [len(parts) - 1, 0], "each part is explained, for a pointer and to be opened"
    assert back == ["#/requests/latest", "#/requests/missed"]
    assert trace == TRACE_PAGE.replace("{trace_id}", "4bf92f3577b34da6a3ce929d0e0e4736")
    assert node.startswith("Node prefill-")
    assert "at " in then
    assert "prompt computed in 3 steps" in parts
    assert top, "the waterfall is seen without scrolling"
    assert nothing


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


async def test_four_hundred_nodes_are_grouped_walked_by_arrow_keys_and_opened(model, tmp_path):
    cluster = ShownCluster(150, 250, seconds=40, hosts=50).keeps_moving()

    def look(page, url):
        page.open(f"{url}/ui#/cluster")
        page.until("document.querySelectorAll('[data-node]').length === 400")
        flows = page.until("document.querySelectorAll('#flows path').length")
        moving = page.run("document.getAnimations().length")
        in_order = page.run("document.querySelectorAll('[data-node][tabindex=\"0\"]').length")
        page.run("document.querySelector('[data-node][tabindex=\"0\"]').focus()")
        first = page.run("document.activeElement.dataset.node")
        page.key("ArrowRight")
        second = page.run("document.activeElement.dataset.node")
        page.key("Enter")
        page.until(f"{HEADING} === 'Node ' + {second!r}")
        charts = page.until("document.querySelectorAll('.chart').length")
        return flows, moving, in_order, first, second, charts

    flows, moving, in_order, first, second, charts = await shown(model, cluster, look, tmp_path)
    assert flows == 24
    assert moving >= flows, "a dot runs along each"
    assert in_order == 1, "Tab stops at the nodes once"
    assert first != second
    assert charts >= 3


async def test_a_moment_is_chosen_by_keyboard_by_click_and_from_the_history(model, tmp_path):
    cluster = ShownCluster(seconds=900)
    overloaded = cluster.sessions[3]
    for second in range(900, 1_020):
        beat = make_heartbeat(num_free_blocks=27, num_held_blocks=2_673, num_running=20)
        cluster.membership.heartbeat(overloaded, beat, cluster.clock.now_s())
        cluster.second(second)
    for second in range(1_020, 1_500):
        cluster.second(second)

    sentence = "document.querySelector('.sentence').textContent"

    def look(page, url):
        page.open(f"{url}/ui#/cluster")
        page.until("document.querySelector('#moment')")
        page.run("document.querySelector('#moment').focus()")
        page.key("ArrowLeft")
        page.until(f"{sentence}.includes(' at ')")
        focus = page.run("[document.activeElement.id, location.hash]")
        listed = page.run(
            "[...document.querySelectorAll('#view tbody tr')].map((each) => each.textContent)"
            f".find((each) => each.startsWith({overloaded.info.node_id!r}))"
        )
        page.click(f"#view tr[data-key='{overloaded.info.node_id} kv'] a[href^='#/cluster/at/']")
        worst = page.until(f"{sentence}.includes({overloaded.info.node_id!r}) && {sentence}")
        page.click("#view .choice a:last-child")
        page.until(f"!{sentence}.includes(' at ')")
        page.click(".strip .plot")
        page.until(f"{sentence}.includes(' at ')")
        page.open(f"{url}/ui?again#/overview")
        page.until("document.querySelectorAll('.chart path.line').length > 10")
        page.click(".chart .plot")
        page.until(f"{HEADING} === 'Cluster' && location.hash.startsWith('#/cluster/at/')")
        page.open(f"{url}/ui?never#/cluster/at/1000")
        nothing = page.until(f"{sentence}.startsWith('Nothing is recorded') && {sentence}")
        return focus, listed, worst, nothing

    focus, listed, worst, nothing = await shown(model, cluster, look, tmp_path)
    assert focus[0] == "moment", "the slider keeps the focus"
    assert focus[1].startswith("#/cluster/at/")
    assert "KV blocks" in listed
    assert worst.startswith("The bottleneck at ")
    assert "99 % of its KV blocks" in worst
    assert nothing


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


@pytest.mark.timeout(300)
async def test_the_last_hour_and_a_dropped_trace_are_replayed(model, tmp_path):
    cluster = ShownCluster(seconds=120)

    def look(page, url):
        page.open(f"{url}/ui#/whatif")
        page.until(f"{HEADING} === 'What if'")
        page.run("document.querySelector('#nodes').value = '1P1D 2P1D'")
        page.click("#view form button")
        verdict = page.until(
            "document.querySelectorAll('#view tbody tr').length === 3"
            " && document.querySelector('.sentence').textContent",
            60,
        )
        measured = page.run("document.querySelector('#view tbody tr').textContent")
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
        return verdict, measured, figures, saved, scripts

    verdict, measured, figures, saved, scripts = await shown(model, cluster, look, tmp_path)
    assert verdict.startswith(("Yes:", "No:", "Perhaps:"))
    assert measured.startswith("measuredwhat really was")
    assert figures >= 5
    assert saved == "replay-2P2D.html"
    assert scripts == 0


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
