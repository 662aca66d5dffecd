"""Progress of a start, as a person sees it: one line a stage, with its seconds.

On a terminal the stages under way are shown too, with the latest thing each said.
Everything goes to standard error: standard output is the answer's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from base.clock import Clock


class Progress:
    """Stages of a start, which may overlap."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._console = Console(stderr=True, highlight=False)
        self._running: dict[str, str] = {}
        self._status = self._console.status("")

    @contextmanager
    def stage(self, title: str) -> Iterator[Callable[[str], None]]:
        """Show `title` while the block runs, and a line with its seconds when it is done.

        Yields a function that takes what the stage has to say; the last thing said
        stands in the line. A stage that raises leaves no line: the error says it.
        """
        started_at_s = self._clock.now_s()
        self._running[title] = ""

        def note(text: str) -> None:
            self._running[title] = text
            self._show()

        self._show()
        try:
            yield note
            seconds = self._clock.now_s() - started_at_s
            self.say(f"[green]✓[/green] {title:<12} {self._running[title]:<52} {seconds:5.1f} s")
        finally:
            del self._running[title]
            self._show()

    def say(self, text: str) -> None:
        """Print one line of rich markup."""
        self._console.print(text, soft_wrap=True)

    def _show(self) -> None:
        if self._running and self._console.is_terminal:
            under_way = " · ".join(f"{title} {note}".strip() for title, note in self._running.items())
            self._status.update(under_way)
            self._status.start()
        else:
            self._status.stop()
            # one that is started again takes the line above it for its own, where its last text had two
            self._status = self._console.status("")
