"""Pictures of the eight views of /ui in a real Chromium: light and dark, for a desk and for a telephone.

SCREENSHOTS=FOLDER keeps them; docs/images/ui has some. Nothing may be cut off or lie over another.
"""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from tests.conductor.api.browser import chromium
from tests.conductor.api.page_views import SCHEMES, SIZES, fill, views_of
from tests.conductor.api.shown import ShownCluster
from tests.conductor.fakes import serving, spoken

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed here"),
]

CUT_OFF = """(() => {
  const found = [], right = document.documentElement.clientWidth;
  const box = (one) => one.getBoundingClientRect();
  for (const one of document.querySelectorAll('body *')) {
    if (one.closest('svg, .skip, noscript, thead') || !one.checkVisibility()) continue;
    const inner = one.closest('.scroll'), at = box(one);
    if (one === inner && one.scrollWidth > one.clientWidth + 1) found.push('scrolls: ' + one.textContent.slice(0, 40));
    if (!inner && (at.right > right + 1 || at.left < -1)) found.push('off: ' + one.tagName + ' ' + one.textContent.slice(0, 40));
    if (one.matches('dd, dt, .card b, .card .what, button, .choice a, nav a, figcaption') && one.scrollWidth > one.clientWidth + 1
        && getComputedStyle(one).display !== 'inline') found.push('cut: ' + one.textContent.slice(0, 40));
  }
  const solid = [...document.querySelectorAll('.card, .numbers > div, figure.chart, button, .choice a')].filter((one) => one.checkVisibility());
  solid.forEach((a, number) => solid.slice(number + 1).forEach((b) => {
    const [p, q] = [box(a), box(b)];
    if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 1 && q.top < p.bottom - 1) found.push('over: ' + a.textContent.slice(0, 30) + ' / ' + b.textContent.slice(0, 30));
  }));
  return found;
})()"""  # noqa: E501


def wide(picture: bytes) -> int:
    """Return the width of a PNG, which its header has."""
    assert picture.startswith(b"\x89PNG")
    return int.from_bytes(picture[16:20])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", SIZES)
async def test_every_view_fits_the_screen_in_both_schemes(model, tmp_path, width, scheme):
    cluster = ShownCluster(seconds=3_600).keeps_moving()
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))

    def look(url):
        shades = set()
        with chromium(tmp_path / "profile") as page:
            page.show_as(width, SIZES[width], scheme)
            for name, (place, is_drawn) in views_of(cluster).items():
                page.open(f"{url}/ui?{name}{place}")
                page.until(is_drawn)
                fill(page, name)
                assert page.run(CUT_OFF) == [], name
                assert page.run("document.documentElement.scrollWidth") <= width, name
                shades.add(page.run("getComputedStyle(document.body).backgroundColor"))
                picture = page.whole_page()
                assert wide(picture) == width
                (folder / f"{name}-{width}-{scheme}.png").write_bytes(picture)
        return shades

    async with serving(
        model, lambda _: spoken(model, "hi there", num_cached_tokens=3), reports=cluster.reports
    ) as api:
        [shade] = await asyncio.to_thread(look, api.url)
    assert (shade == "rgb(252, 252, 250)") == (scheme == "light"), "the page has the colours of the scheme"
