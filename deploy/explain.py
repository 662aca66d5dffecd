"""`conductor explain ID`: why a request went where it went, and whether it went as predicted."""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Group
from rich.table import Table

from deploy.api_client import read_json
from deploy.options import ADDRESS, Address, AsItIs
from deploy.status import console_for_tables

PREFILL_COLUMNS = (
    "queue_s",
    "fetch_s",
    "prefill_s",
    "ready_s",
    "others_s",
    "local_blocks",
    "matched_blocks",
    "fetch_from",
)
DECODE_COLUMNS = ("tbt_s", "beside_s", "sequences", "free_tokens", "matched_blocks", "fits")


def main(
    request_id: Annotated[str, typer.Argument(help="As in the answer's id or its x-request-id header")],
    address: Address = ADDRESS,
    json_: AsItIs = False,
) -> None:
    """Explain one of the last thousand placements."""
    explanation = read_json(address, f"/v1/explain/{quote(request_id, safe='')}")
    if json_:
        print(json.dumps(explanation))
        return
    console = console_for_tables()
    for attempt in explanation["attempts"]:
        console.print(shown(attempt))


def shown(attempt: dict[str, Any]) -> Group:
    """Return one attempt of a request as lines and tables."""
    asked = attempt["asked"]
    lines = [f"{attempt['request_id']}: {asked['num_tokens']} tokens, at most {asked['max_tokens']} new"]
    if placed := attempt.get("placed"):
        lines.append(f"placed: {_where(placed, asked)}")
        if placed["source_node"]:
            lines[-1] += f", prefix from {placed['source_node']}"
        lines.append(
            f"predicted: TTFT {_seconds(attempt['waited_s'] + placed['predicted_ttft_s'])}"
            f" (waiting {_seconds(attempt['waited_s'])}, queue {_seconds(placed['queue_s'])},"
            f" fetch {_seconds(placed['fetch_s'])}, prefill {_seconds(placed['prefill_s'])},"
            f" hand-off {_seconds(placed['handoff_s'])}), TBT {_seconds(placed['predicted_tbt_s'])}"
        )
    else:
        rejected = attempt["rejected"]
        lines.append(
            f"rejected: {rejected['reason']}, predicted TTFT {_seconds(rejected['predicted_ttft_s'])},"
            f" TBT {_seconds(rejected['predicted_tbt_s'])}; retry after {_seconds(rejected['retry_after_s'])}"
        )
    lines += _actual_lines(attempt)
    chosen = placed or {}
    tables = [
        _table("prefill", attempt.get("prefill_candidates"), PREFILL_COLUMNS, chosen.get("prefill_node")),
    ]
    if asked["max_tokens"]:
        rows = attempt.get("decode_candidates")
        tables.append(_table("decode", rows, DECODE_COLUMNS, chosen.get("decode_node")))
    return Group(*lines, *tables)


def _where(placed: dict[str, Any], asked: dict[str, Any]) -> str:
    """Return on which nodes a request is, as the page at /ui says it."""
    if not asked["max_tokens"]:
        return f"computed on {placed['prefill_node']}, and nothing decodes"
    where = f"prefill on {placed['prefill_node']}, decode on {placed['decode_node']}"
    return f"{where}, beside what decodes there" if placed["is_inline"] else where


def _actual_lines(attempt: dict[str, Any]) -> list[str]:
    actual = attempt.get("actual")
    if actual is None:
        return []
    lines = [
        f"actual: TTFT {_seconds(actual['ttft_s'])} (queue {_seconds(actual['queue_s'])},"
        f" prefill {_seconds(actual['compute_s'])}, transfer {_seconds(actual['exposed_transfer_s'])}),"
        f" TBT {_seconds(actual['mean_tbt_s'])}, {actual['num_output_tokens']} tokens, {actual['end']}"
    ]
    if compared := attempt.get("predicted_over_actual"):
        ratios = (f"{term} {ratio:.2f}" for term, ratio in compared.items() if ratio is not None)
        lines.append(f"predicted/actual: {', '.join(ratios)}")
    return lines


def _table(
    title: str, rows: list[dict[str, Any]] | None, columns: tuple[str, ...], chosen: str | None
) -> Table | str:
    if rows is None:
        return f"{title}: the candidates were too many to keep"
    table = Table(title, *(column.removesuffix("_s") for column in columns), box=None, pad_edge=False)
    for row in rows:
        mark = " <-" if row["node"] == chosen else ""
        table.add_row(row["node"] + mark, *(_cell(column, row[column]) for column in columns))
    return table


def _cell(column: str, value: Any) -> str:
    if column.endswith("_s"):
        return _seconds(value)
    return f"{value:.0f}" if isinstance(value, float) else str("" if value is None else value)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
