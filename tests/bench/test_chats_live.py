"""Chats over HTTP: what is summed up of them."""

from __future__ import annotations

import pytest

from bench.chats_live import summary
from bench.sse_client import Outcome


def outcome(turn: int, arrived_at_s: list[float], **fields) -> Outcome:
    return Outcome(
        10.0, arrived_at_s, arrived_at_s[-1], 100, 80 * (turn > 0), len(arrived_at_s), turn=turn, **fields
    )


def test_later_turns_are_those_after_the_first_whatever_they_found() -> None:
    outcomes = [
        outcome(0, [10.1, 10.2]),
        outcome(1, [10.3, 10.31, 10.35]),
        outcome(2, [10.5]),
        Outcome(10.0, error="refused"),
    ]
    outcomes[2].cached_tokens = 0
    found = summary(outcomes)
    assert (found["turns"], found["failed"], found["errors"]) == (3, 1, ["refused"])
    assert found["first_turns_ttft_ms"]["mean"] == pytest.approx(100)
    assert found["later_turns_ttft_ms"]["mean"] == pytest.approx(400)
    assert found["gap_ms"]["p50"] == pytest.approx(40)
    assert found["gaps_over_20_ms_percent"] == pytest.approx(100 * 2 / 3)
    assert found["cached_share"] == pytest.approx(80 / 300)


def test_nothing_that_was_answered_has_no_figures() -> None:
    found = summary([])
    assert (found["turns"], found["gap_ms"], found["cached_share"]) == (0, {}, 0.0)
