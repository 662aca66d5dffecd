"""A bar chart of one claim's table as SVG, readable on a light and on a dark page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM = 760, 360, 20, 260
COLOURS = ("#3367d6", "#7da2f2", "#2a8f4f", "#d9822b")
STYLE = (
    "text { fill: #111; font: 13px system-ui, sans-serif; } .axis { stroke: #888; } "
    "@media (prefers-color-scheme: dark) { text { fill: #eee; } }"
)


def bars(title: str, groups: Sequence[str], series: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return the chart: a group of bars for each of `groups`, one bar of each series in it.

    A series is its name and its figures as the table has them, of which the first number is drawn.
    """
    values = [[float(re.search(r"[\d.]+", cell)[0]) for cell in cells] for _, cells in series]  # type: ignore[index]
    top = max(max(row) for row in values)
    group_width = (WIDTH - LEFT - 10) / len(groups)
    bar_width = group_width * 0.8 / len(series)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        f'<text x="{LEFT}" y="18">{escape(title)}</text>\n'
        f'<path class="axis" d="M{LEFT} {BOTTOM}H{WIDTH - 10}"/>\n'
    ]
    for number, (name, cells) in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        for group, (cell, value) in enumerate(zip(cells, values[number], strict=True)):
            height = (BOTTOM - 60) * value / top
            x = LEFT + group * group_width + group_width * 0.1 + number * bar_width
            parts.append(
                f'<rect x="{x:.1f}" y="{BOTTOM - height:.1f}" width="{bar_width - 4:.1f}" '
                f'height="{height:.1f}" fill="{colour}"/>\n'
                f'<text x="{x:.1f}" y="{BOTTOM - height - 5:.1f}">{escape(cell)}</text>\n'
            )
        y = BOTTOM + 40 + number * 18
        parts.append(
            f'<rect x="{LEFT}" y="{y - 10}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{LEFT + 16}" y="{y}">{escape(name)}</text>\n'
        )
    for group, name in enumerate(groups):
        x = LEFT + (group + 0.1) * group_width
        parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 17}">{escape(name)}</text>\n')
    return "".join([*parts, "</svg>\n"])
