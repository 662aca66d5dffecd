"""An event loop whose time passes when there is nothing else to do: hours in seconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import TypeVar

from base.clock import Busy

Result = TypeVar("Result")


class _NoWait(selectors.DefaultSelector):
    """Moves the loop's clock by what it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.now_s += timeout
        assert ready or timeout is not None, "everybody waits for ever"
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Also a clock, for whatever takes one."""

    def __init__(self) -> None:
        self._virtual = _NoWait()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    def now_s(self) -> float:
        return self._virtual.now_s

    def busy(self) -> Busy:
        """Return zeros: what a thread works takes no virtual time."""
        return Busy(0.0, 0.0)


def run(main: Callable[[VirtualLoop], Awaitable[Result]]) -> Result:
    """Run `main(loop)` in virtual time; return what it returns."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def start() -> Result:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            return await main(loop)

        return runner.run(start())
