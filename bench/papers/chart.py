"""Lines drawn as SVG, without a library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Line = list[tuple[float, float]]

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
WIDTH, HEIGHT, MARGIN = 520, 260, 46


def chart(heading: str, unit: str, runs: Sequence[tuple[str, Line]], is_file: bool = False) -> str:
    """Return an SVG with a line for each run; both axes begin at 0.

    Args:
        heading: For who does not see it.
        unit: Of x.
        runs: Name and line.
        is_file: Rather than a part of a page, which need not say what an SVG is.
    """
    points = [point for _, line in runs for point in line]
    most_x = max((x for x, _ in points), default=1.0) or 1.0
    most_y = max((y for _, y in points), default=1.0) or 1.0
    wide, high = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN

    def place(point: tuple[float, float]) -> str:
        x, y = point
        return f"{MARGIN + wide * x / most_x:.1f},{HEIGHT - MARGIN - high * y / most_y:.1f}"

    drawn = []
    for number, (name, line) in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(map(place, line))
        drawn.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>')
        column, row = number % 4, number // 4
        at = f'x="{MARGIN + 4 + 120 * column}" y="{14 + 13 * row}"'
        drawn.append(f'<text {at} fill="{colour}" font-size="11">{escape(name)}</text>')
    for share in (0.0, 0.5, 1.0):
        x, y = MARGIN + wide * share, HEIGHT - MARGIN - high * share
        drawn.append(f'<text x="{x:.0f}" y="{HEIGHT - 28}" font-size="10">{most_x * share:.4g}</text>')
        drawn.append(f'<text x="4" y="{y:.0f}" font-size="10">{most_y * share:.3g}</text>')
        drawn.append(f'<path d="M{MARGIN} {y:.0f}h{wide}" stroke="#ddd"/>')
    drawn.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 10}" font-size="11">{escape(unit)}</text>')
    if not points:
        drawn.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT / 2 - 6:.0f}" font-size="11">none</text>')
    namespace = ' xmlns="http://www.w3.org/2000/svg"' if is_file else ""
    return (
        f'<svg{namespace} role="img" aria-label="{escape(heading)}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(drawn)}</svg>'
    )
