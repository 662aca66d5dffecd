"""One event is one line, whatever its values hold."""

import logging
import re

from hypothesis import given
from hypothesis import strategies as st

from base.logs import event

LOG = logging.getLogger("test_logs")


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def logged(**fields):
    lines = Lines()
    LOG.addHandler(lines)
    LOG.setLevel(logging.INFO)
    try:
        event(LOG, "rejected", **fields)
    finally:
        LOG.removeHandler(lines)
    [line] = lines.lines
    return line


def test_values_are_fields_with_their_names():
    assert logged(request_id="r-1", predicted_s=1.9, why="too late") == (
        'rejected request_id=r-1 predicted_s=1.9 why="too late"'
    )


@given(st.text())
def test_a_value_from_outside_makes_no_second_line_and_no_other_field(value):
    line = logged(request_id=value, reason="ttft")
    assert len(line.splitlines()) == 1
    assert re.fullmatch(r'rejected request_id=("(?:[^"\\]|\\.)*"|[^ "=]*) reason=ttft', line)
