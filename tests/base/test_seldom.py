import logging

import pytest

from base.seldom import MAX_KINDS, PAUSE_S, Seldom
from tests.manual_clock import ManualClock


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def seldom(clock, caplog):
    caplog.set_level(logging.WARNING)
    return Seldom(logging.getLogger("seldom"), clock)


def lines(caplog):
    told = [record.getMessage().strip() for record in caplog.records]
    caplog.clear()
    return told


def test_what_happens_often_is_logged_at_once_and_then_once_a_minute_with_a_count(seldom, clock, caplog):
    for _ in range(1000):
        seldom.event("refused", "late", peer="one")
    assert lines(caplog) == ["refused peer=one"]
    clock.advance(PAUSE_S)
    for _ in range(1000):
        seldom.event("refused", "late", peer="two")
    assert lines(caplog) == ["refused peer=two unlogged=999"]


def test_kinds_have_lines_of_their_own_up_to_a_bound(seldom, caplog):
    for number in range(1000):
        seldom.event("refused", f"kind {number}", number=number)
    assert len(lines(caplog)) == MAX_KINDS + 1
