"""Each view of /ui before axe-core, which finds what keyboards and screen readers cannot use.

The library is fetched from npm into the folder of the test, and nothing of it is kept.
"""

import asyncio
import shutil
import subprocess

import pytest

from tests.conductor.api.browser import chromium
from tests.conductor.api.page_views import SCHEMES, SIZES, fill, views_of
from tests.conductor.api.shown import ShownCluster
from tests.conductor.fakes import serving, spoken

AXE = "axe-core@4"
TOLD = """axe.run(document, {resultTypes: ['violations']}).then(({violations}) => violations.map(
  (each) => `${each.id} (${each.impact}): ` + each.nodes.map((node) => node.html.slice(0, 160)).join(' | ')
))"""

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed here"),
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed here"),
]


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """The library's text."""
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "install", "--no-save", "--no-audit", "--no-fund", "--ignore-scripts", AXE]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode:
        pytest.skip(f"npm has no {AXE} for us: {done.stderr[-200:]}")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark"), (1440, "dark")])
async def test_no_view_violates_a_rule(model, tmp_path, axe, width, scheme):
    assert width in SIZES
    assert scheme in SCHEMES
    cluster = ShownCluster(seconds=900).keeps_moving()

    def look(url):
        found = {}
        with chromium(tmp_path / "profile") as page:
            page.show_as(width, SIZES[width], scheme)
            for name, (place, is_drawn) in views_of(cluster).items():
                page.open(f"{url}/ui?{name}{place}")
                page.until(is_drawn)
                fill(page, name)
                page.run(f"(() => {{ {axe} }})()")
                if told := page.run(TOLD):
                    found[name] = told
        return found

    async with serving(model, lambda _: spoken(model, "hi there"), reports=cluster.reports) as api:
        assert await asyncio.to_thread(look, api.url) == {}
