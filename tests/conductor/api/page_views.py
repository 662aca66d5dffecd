"""The eight views of the page at /ui, for what looks at each of them."""

from tests.conductor.api.shown import ShownCluster

SIZES = {1440: 900, 390: 844}
SCHEMES = ("light", "dark")


def views_of(cluster: ShownCluster) -> dict[str, tuple[str, str]]:
    """Return where each view is, and what is true of it when it is drawn."""
    slowest = cluster.decisions.recent(cluster.clock.now_s(), "missed")[0]["request_id"]
    form = "document.querySelector('#view form')"
    return {
        "overview": ("#/overview/hour", "document.querySelectorAll('.chart path.line').length > 10"),
        "cluster": ("#/cluster", "document.querySelectorAll('#flows path').length"),
        "node": ("#/node/prefill-0", "document.querySelectorAll('.chart path.line').length"),
        "requests": ("#/requests/missed", "document.querySelectorAll('#view tbody tr').length"),
        "request": (f"#/request/{slowest}", "document.querySelector('.waterfall')"),
        "playground": ("#/playground", form),
        "replay": ("#/replay", form),
        "whatif": ("#/whatif", form),
    }


def fill(page, name: str) -> None:
    """Do in a view what its user would, so that it has something to show."""
    if name == "playground":
        page.run("document.querySelector('#words').focus()")
        page.write("Say hello")
        page.key("Enter")
        page.until("document.querySelector('#talk article.assistant .note')")
    if name == "whatif":
        page.click("#view form button")
        page.until("document.querySelectorAll('#view tbody tr').length > 2", 120)
    if name == "replay":
        page.run(
            "(() => { const rows = [...Array(60).keys()].map((at) => JSON.stringify({timestamp: 700 * at,"
            " input_length: 2000, output_length: 90, hash_ids: [0, 1, 2, 10 + at]})).join('\\n');"
            " const moved = new DataTransfer(); moved.items.add(new File([rows], 'morning.jsonl'));"
            " document.querySelector('#drop').dispatchEvent("
            "new DragEvent('drop', {dataTransfer: moved, bubbles: true})); })()"
        )
        page.until("document.querySelector('#named').textContent.startsWith('morning.jsonl:')")
        page.click("#view form button")
        page.until("document.querySelectorAll('.report figure svg').length", 120)
