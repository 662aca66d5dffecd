"""Rows that are sent to real nodes: read from the command line, and sharing no prefix."""

from __future__ import annotations

import pytest

from bench.step_budgets_live import Row, parse_rows, trace_of
from conductor.replay.trace import TraceRequest, turns


def test_a_row_names_its_load_its_bounds_and_each_of_its_rates() -> None:
    assert parse_rows("8192/256@15/20:4.7,5 chat@8:0.6") == [
        Row("8192/256", 0.015, 0.02, 4.7),
        Row("8192/256", 0.015, 0.02, 5.0),
        Row("chat", 0.008, 0.0, 0.6),
    ]
    assert parse_rows("burst@30/50:8")[0].headers == (
        ("x-slo-ttft-ms", "2000"),
        ("x-slo-tpot-ms", "30"),
        ("x-slo-gap-ms", "50"),
    )


@pytest.mark.parametrize("text", ["8192@15:5", "talk@15:5", "8192/256:5", "8192/256@15:"])
def test_what_is_no_row_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is wanted"):
        parse_rows(text)


@pytest.mark.parametrize("text", ["8192/256@15:2", "chat@15:0.5", "burst@30:2"])
def test_two_rows_share_no_block(text: str) -> None:
    (row,) = parse_rows(text)
    blocks = [
        {
            block
            for first in trace_of(row, 10.0, number).requests
            for turn in turns(first)
            for block in turn.chain
        }
        for number in (0, 1)
    ]
    assert blocks[0]
    assert blocks[0].isdisjoint(blocks[1])


def test_a_moved_chat_keeps_its_turns_lengths_and_pauses() -> None:
    (row,) = parse_rows("chat@15:0.5")
    here, there = (trace_of(row, 10.0, number).requests for number in (0, 3))

    def said(first: TraceRequest) -> list[tuple[float, int, int]]:
        return [(turn.arrival_s, turn.num_tokens, turn.output_tokens) for turn in turns(first)]

    assert [said(first) for first in here] == [said(first) for first in there]
    assert max(len(turns(first)) for first in here) > 5
