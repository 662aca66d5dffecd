"""Pictures of /ui in a real Chromium: light and dark, for a desk and for a telephone.

SCREENSHOTS=FOLDER keeps them; docs/images has some of a live cluster.
"""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from tests.conductor.api.browser import chromium
from tests.conductor.api.test_web_page import decisions_of_a_busy_cluster, reports
from tests.conductor.fakes import serving, spoken

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed here"),
]

SIZES = {1440: 900, 390: 844}


CUT_OFF = """(() => {
  const found = [];
  const right = document.documentElement.clientWidth;
  const seen = (one) => one.getBoundingClientRect();
  for (const text of document.querySelectorAll('#topology text'))
    if (seen(text).right > right || seen(text).left < 0) found.push(text.textContent);
  for (const inner of document.querySelectorAll('#topology svg svg'))
    if (seen(inner).right > right) found.push(inner.textContent);
  for (const cell of document.querySelectorAll('.story td, .number'))
    if (cell.scrollWidth > cell.clientWidth + 1 || seen(cell).right > right) found.push(cell.textContent);
  if (!document.querySelector('#requests tr.chosen')) found.push('no request is marked');
  return found;
})()"""


def wide(picture: bytes) -> int:
    """Return the width of a PNG, which its header has."""
    assert picture.startswith(b"\x89PNG")
    return int.from_bytes(picture[16:20])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", SIZES)
async def test_the_page_fits_the_screen_in_both_schemes(model, tmp_path, width, scheme):
    decisions = decisions_of_a_busy_cluster()

    def look(url):
        with chromium(tmp_path / "profile") as page:
            page.show_as(width, SIZES[width], scheme)
            page.open(f"{url}/ui")
            page.until("document.querySelectorAll('#requests tbody tr').length")
            page.run("document.querySelector('#requests tbody tr:nth-child(2)').click()")
            page.until("document.querySelector('#attempts tr.chosen')")
            assert page.run(CUT_OFF) == [], "what is cut off, or chosen and not marked"
            shade = page.run("getComputedStyle(document.querySelector('thead th')).color")
            return page.run("document.documentElement.scrollWidth"), shade, page.whole_page()

    async with serving(model, lambda _: spoken(model, "hi"), reports=reports(decisions)) as api:
        scroll_width, shade, picture = await asyncio.to_thread(look, api.url)
    assert scroll_width <= width, "the page is wider than the screen"
    assert (shade == "rgb(0, 0, 0)") == (scheme == "light"), "the letters have the colour of the scheme"
    assert wide(picture) == width
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    (folder / f"ui-{width}-{scheme}.png").write_bytes(picture)
