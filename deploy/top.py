"""`conductor top`: the page at /ui in a terminal. Sparklines, budgets, the slowest requests, KV on its way.

It asks what the page asks, `/v1/page/NAME`, and of the history only the rows that are new.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from math import isnan, nan
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.api_client import read_json
from deploy.options import ADDRESS, MAX_PAUSE_S, Address

SHOWN_S = 600
SPARK_WIDTH = 30
BARS = "▁▂▃▄▅▆▇█"
NUM_SLOWEST = 5
NUM_LINKS = 5
MAX_NODES = 24
"""Nodes shown, those with the fullest budgets."""
TIGHT, FULL = 0.6, 0.9
NOTABLE = 0.01
"""Share of the requests that, rejected for want of a role, makes it the bottleneck."""

LINES = (
    ("in bounds/s", "good", ""),
    ("late/s", "late", ""),
    ("rejected/s", "rejected", ""),
    ("TTFT median", "ttft_p50", "s"),
    ("TTFT p99", "ttft_p99", "s"),
    ("TBT p99", "tbt_p99", "s"),
    ("tokens/s", "output_tokens", ""),
    ("running", "running", ""),
    ("waiting", "waiting", ""),
    ("KV held", "kv_held", "%"),
    ("KV moved", "kv_moved_bytes", "B/s"),
)
"""Name, series, unit. TBT is the mean of each request, as at /ui; a p99 is of the requests of one second."""

Node = dict[str, Any]
Bounds = dict[str, float | None]


class Recent:
    """The last minutes of a conductor's history."""

    def __init__(self) -> None:
        self.columns: dict[str, deque[float]] = {}
        self._next: int | None = None

    def look(self, address: str) -> dict[str, Any]:
        """Ask for the rows that are new; return the answer."""
        name = "hour" if self._next is None else f"hour.{self._next}"
        answer: dict[str, Any] = read_json(address, f"/v1/page/{name}")
        if answer["first"] != self._next:
            self.columns = {}
        self._next = answer["next"]
        numbers = array("f", base64.b64decode(answer["rows"]))
        many = max(1, SHOWN_S // answer["step_s"])
        for place, series in enumerate(answer["names"]):
            column = self.columns.setdefault(series, deque(maxlen=many))
            column.extend(numbers[place :: len(answer["names"])])
        return answer


def top(
    address: Address = ADDRESS,
    period_s: Annotated[
        float, typer.Option("--period", min=0, max=MAX_PAUSE_S, help="Seconds between two looks")
    ] = 1.0,
    times: Annotated[int, typer.Option(min=0, help="Looks, then end; 0: until Ctrl-C")] = 0,
) -> None:
    """Watch goodput, latencies, nodes and the slowest requests."""
    tick = threading.Event()  # never set: its wait is a pause that Ctrl-C ends
    recent = Recent()
    with contextlib.suppress(KeyboardInterrupt), Live(auto_refresh=False) as live:
        for look in itertools.count(1):
            about = recent.look(address)
            now = read_json(address, "/v1/page/now")
            slowest = read_json(address, "/v1/page/requests.slowest")["requests"]
            live.update(screen(about, recent, now, slowest), refresh=True)
            if look == times:
                break
            tick.wait(period_s)
    if not live.console.is_terminal:
        live.console.line()  # a terminal has one already


def screen(
    about: dict[str, Any], recent: Recent, now: dict[str, Any], slowest: Sequence[dict[str, Any]]
) -> Group:
    """Return what is shown at one look."""
    bounds, limits = about["bounds"], now["limits"]
    nodes = [dict(zip(now["columns"], row, strict=True)) for row in now["nodes"]]
    said = "ready" if now["ready"] else "not ready"
    first = f"{said}   {now['running']} requests in progress, {now['waiting']} wait to be placed"
    parts: list[Text | Table] = [Text(first, "bold green" if now["ready"] else "bold red")]
    parts += [bottleneck(nodes, limits, now["lacked"])] if nodes else []
    parts += [_history(recent, bounds), _nodes(nodes, limits)]
    if slowest:
        parts.append(_slowest(slowest))
    if now["links"]:
        highest = now["links"][:NUM_LINKS]
        flows = "   ".join(f"{source} → {target} {_said(rate, 'B/s')}" for source, target, rate in highest)
        parts.append(Text(f"KV on its way: {flows}"))
    return Group(*parts)


def sparkline(column: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """Return a column as bars from nought up, the highest of each stretch; what nobody knows is blank."""
    if not column:
        return ""
    size = max(1, -(-len(column) // width))
    stretches = [list(column)[at : at + size] for at in range(0, len(column), size)]
    highest = [max((value for value in each if not isnan(value)), default=nan) for each in stretches]
    most = max((value for value in highest if not isnan(value)), default=0.0)
    bars = (
        " " if isnan(value) else BARS[min(len(BARS) - 1, int(value / most * len(BARS)))] if most else BARS[0]
        for value in highest
    )
    return "".join(bars)


def budgets(node: Node, limits: Bounds) -> list[tuple[str, float]]:
    """Return what a node has used up of each budget, as shares, the fullest first: `serving/budgets.py`."""
    found = []
    if node["queue_s"] is not None and limits["queue_s"] is not None:
        found.append(("queue", node["queue_s"] / limits["queue_s"]))
    least_s = limits["step_least_s"] or 0.0
    if node["step_s"] is not None and limits["step_s"] is not None:
        found.append(("step", max(0.0, node["step_s"] - least_s) / (limits["step_s"] - least_s)))
    if node["held"] is not None and node["blocks"]:
        found.append(("KV", node["held"] / node["blocks"]))
    return sorted(found, key=lambda each: -each[1])


def bottleneck(nodes: list[Node], limits: Bounds, lacked: dict[str, int]) -> Text:
    """Return where the cluster is fullest, in words: as the page at /ui has it."""
    came, notable = lacked["came"], max(1.0, NOTABLE * lacked["came"])
    role = max(("prefill", "decode"), key=lambda each: lacked[each])
    if lacked[role] >= notable:
        said = f"The bottleneck is {role}: {lacked[role] / came:.0%} of the last minute's requests lacked it"
    else:
        used = [(share, name, str(node["id"])) for node in nodes for name, share in budgets(node, limits)]
        share, name, node_id = max(used, default=(0.0, "", ""))
        said = "The bottleneck is" if share >= TIGHT else "Nothing is tight: the fullest is"
        said = f"{said} {node_id}, {share:.0%} of its {name}" if used else "No node has a budget"
    if lacked["speed"] >= notable:
        said += f"; {lacked['speed'] / came:.0%} would have been late on any node"
    return Text(f"{said}.")


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False)


def _history(recent: Recent, bounds: Bounds) -> Table:
    table = _table("last 10 minutes", "", "now", "highest", "bound")
    for name, series, unit in LINES:
        column = recent.columns.get(series, ())
        known = [value for value in column if not isnan(value)]
        bound = bounds.get(f"{series.partition('_')[0]}_s") if series.startswith(("ttft", "tbt")) else None
        late = bound is not None and known and known[-1] > bound
        table.add_row(
            name,
            Text(sparkline(tuple(column)), "red" if late else "cyan"),
            _said(known[-1] if known else None, unit),
            _said(max(known, default=None), unit),
            _said(bound, unit) if bound else "",
        )
    return table


def _nodes(nodes: list[Node], limits: Bounds) -> Table:
    fullest = sorted(nodes, key=lambda node: -max((share for _, share in budgets(node, limits)), default=0.0))
    shown = sorted(fullest[:MAX_NODES], key=lambda node: str(node["id"]))
    more = f" ({len(shown)} of {len(nodes)}, the fullest)" if len(shown) < len(nodes) else ""
    table = _table(f"node{more}", "roles", "queue", "step", "rows", "to prefill", "budgets")
    for node in shown:
        used = Text("  ").join(_budget(*each) for each in budgets(node, limits))
        table.add_row(
            Text(f"{node['id']}{' draining' if node['draining'] else ''}"),
            node["roles"] or "storage",
            _said(node["queue_s"], "s"),
            _said(node["step_s"], "s"),
            _said(node["running"], ""),
            _said(node["queued_tokens"], ""),
            used,
        )
    return table


def _budget(name: str, share: float) -> Text:
    """Return a budget as a bar of eight, in words too."""
    filled = min(8, round(8 * share))
    colour = "red" if share >= FULL else "yellow" if share >= TIGHT else "green"
    return Text(f"{name} {'█' * filled}{'░' * (8 - filled)} {share:.0%}", colour)


def _slowest(requests: Sequence[dict[str, Any]]) -> Table:
    table = _table("slowest first tokens", "ago", "TTFT", "predicted", "prefill", "decode")
    for each in requests[:NUM_SLOWEST]:
        bound = each.get("ttft_slo_s")
        is_late = bound is not None and each["ttft_s"] > bound
        table.add_row(
            Text(each["request_id"]),  # its client's: no markup
            f"{each['age_s'] / 60:.0f} min" if each["age_s"] >= 60 else f"{each['age_s']:.0f} s",
            Text(_said(each["ttft_s"], "s") + (" late" if is_late else ""), "red" if is_late else ""),
            _said(each["predicted_ttft_s"], "s"),
            Text(each["prefill_node"]),
            Text(each["decode_node"]),
        )
    return table


def _said(value: float | None, unit: str) -> str:
    """Return a number as people read it; None is a dash."""
    if value is None:
        return "-"
    if unit == "%":
        return f"{value:.0%}"
    if unit == "s":
        return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit == "B/s":
        power = min(4, max(0, (len(str(int(value))) - 1) // 3))
        return f"{value / 1000**power:.3g} {['', 'k', 'M', 'G', 'T'][power]}B/s"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
