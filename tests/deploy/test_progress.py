import pytest

from deploy.progress import Progress
from tests.manual_clock import ManualClock

UP = "\x1b[1A"


@pytest.fixture
def on_terminal(monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "1", "TERM": "xterm", "COLUMNS": "30"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_stage_leaves_the_lines_of_those_before_it(on_terminal, capsys):
    progress = Progress(ManualClock())
    with progress.stage("first") as note:
        note("x" * 45)  # two lines of this terminal
    capsys.readouterr()
    with progress.stage("second"):
        pass
    begun = capsys.readouterr().err.partition("second")[0]
    assert "\x1b[?25l" in begun, "a status is shown"
    assert UP not in begun
