"""The report's page in a real browser: every chart is drawn, inside its frame, and nothing is an error."""

import shutil

import pytest

from bench.papers.command import main
from bench.trace_file import write_trace
from tests.conductor.api.browser import chromium
from tests.conductor.replay.builders import small_trace

HAS_BROWSER = shutil.which("chromium") is not None

CHARTS = """Array.from(document.querySelectorAll('svg')).map(svg => {
  const frame = svg.getBoundingClientRect();
  const drawn = Array.from(svg.querySelectorAll('polyline')).map(line => line.getBoundingClientRect());
  return {
    heading: svg.getAttribute('aria-label'),
    wide: frame.width,
    lines: drawn.length,
    inside: drawn.every(box => box.left >= frame.left - 1 && box.right <= frame.right + 1
      && box.top >= frame.top - 1 && box.bottom <= frame.bottom + 1),
    seen: drawn.some(box => box.width > 50),
  };
})"""


@pytest.mark.full
@pytest.mark.skipif(not HAS_BROWSER, reason="chromium is not installed")
def test_browser_draws_every_chart_of_the_report(tmp_path) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "report.html"
    write_trace(small_trace(150), trace)
    args = ["--nodes", "2P2D", "--policy", "all", "--speed", "4", "--reject", "early"]
    bounds = ["--slo-ttft", "5", "--slo-tbt", "0.045"]
    assert main([str(trace), *args, *bounds, "--roles", "fixed", "--html", str(out), "--sweep"]) == 0
    with chromium(tmp_path / "profile") as page:
        page.open(out.as_uri())
        page.until("document.querySelectorAll('figure').length > 0")
        charts = page.run(CHARTS)
        rows = page.run("document.querySelectorAll('tbody tr').length")
        overflows = page.run("document.documentElement.scrollWidth > window.innerWidth")
    assert rows == 4
    assert not overflows
    assert len(charts) == 10
    for chart in charts:
        assert chart["wide"] > 300, chart
        assert chart["inside"], chart
        assert chart["lines"] > 0, chart
        assert chart["seen"], chart
