"""Replays that an operator asks for: a trace, or the traffic of the last hour, on nodes of one's choice.

The command `conductor replay --html` runs in a process of its own, one at a time, with bounds of memory, of
processor time and of the clock, at the lowest priority: whatever a trace holds, the conductor serves on. What
comes back is the command's own report and page.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from base.errors import InvalidRequestError, RejectedError
from base.request import Slo
from conductor.serving.traffic import Traffic, measured, trace_lines

UNBOUNDED = Slo()
COMMAND = "bench.papers.command"
"""The module of `conductor replay`, which is run by its name."""
WALL_S = 120.0
"""Seconds for all runs of one call."""
CPU_S = 100
MEMORY_BYTES = 2 << 30
MAX_FILE_BYTES = 32 << 20
MAX_PAGE_BYTES = 1 << 20
"""Bytes of one run's page; a longer one is left out."""
LEAST_PRIORITY = 19


class Replays:
    """Runs them one at a time. Belongs to the event loop."""

    def __init__(self, traffic: Traffic, block_size: int, arguments: Sequence[str]) -> None:
        """Begin. `arguments`: those under which replay does as this conductor."""
        self._traffic = traffic
        self._block_size = block_size
        self._arguments = tuple(arguments)
        self._is_running = False

    async def run(
        self, trace: str, nodes: Iterable[str], bounds: Sequence[str], slo: Slo = UNBOUNDED
    ) -> dict[str, Any]:
        """Return the reports and pages of a trace on each of some clusters.

        Of the last hour's traffic also what was measured of it, as `traffic.measured` reports.

        Args:
            trace: Rows of a file, in any of the formats; empty: the traffic of the last hour.
            nodes: As `--nodes` has it: 1P1D, 4C.
            bounds: More arguments, which go before the conductor's own.
            slo: The bounds that what was measured is judged by: the same ones, or the conductor's own.

        Raises:
            InvalidRequestError: it is no trace, or is none of those nodes; the command's own words.
            RejectedError: another replay runs.
        """
        if self._is_running:
            raise RejectedError("another replay runs: ask again when it has ended")
        records = [] if trace else self._traffic.records()
        extra = () if trace else ("--skip-bad",)  # two blocks of one name, one time in billions
        if not trace and not records:
            raise InvalidRequestError(
                "no request has ended in the last hour: there is nothing to replay", "trace"
            )
        self._is_running = True
        try:
            async with asyncio.timeout(WALL_S):
                with tempfile.TemporaryDirectory(prefix="conductor-replay-") as name:
                    path = Path(name) / ("dropped.csv" if _is_table(trace) else "dropped.jsonl")
                    lines = [trace] if trace else trace_lines(records, self._block_size)
                    await asyncio.to_thread(_write, path, lines)
                    runs = [await self._one(path, each, (*bounds, *extra)) for each in nodes]
                    was = await asyncio.to_thread(measured, records, slo) if records else None
                    return {"measured": was, "runs": runs}
        except TimeoutError:
            raise InvalidRequestError(
                f"the replay took longer than {WALL_S:g} s: send less", "trace"
            ) from None
        finally:
            self._is_running = False

    async def _one(self, trace: Path, nodes: str, bounds: Sequence[str]) -> dict[str, Any]:
        page = trace.with_name("page.html")
        command = ["-m", COMMAND, str(trace), *self._arguments, *bounds, "--nodes", nodes]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command, "--json", "--html", str(page)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _bound(process.pid)
            said, problem = await process.communicate()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if process.returncode:
            raise InvalidRequestError(_problem(problem, process.returncode, trace), "trace")
        told = json.loads(said)
        html = page.read_text() if page.stat().st_size <= MAX_PAGE_BYTES else ""
        return {"nodes": nodes, "trace": told["trace"], "report": told["runs"][0], "html": html}


def _bound(pid: int) -> None:
    """Bound what a process takes."""
    limits = {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_CPU: CPU_S,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    with suppress(ProcessLookupError):
        for limit, most in limits.items():
            resource.prlimit(pid, limit, (most, most))
        os.setpriority(os.PRIO_PROCESS, pid, LEAST_PRIORITY)


def _problem(said: bytes, status: int, trace: Path) -> str:
    """Return the last words of a command that failed, without the folder of its file."""
    lines = said.decode(errors="replace").replace(f"{trace.parent}/", "").strip().splitlines()
    if status < 0 or not lines or "MemoryError" in lines[-1]:
        return f"the replay needs more than {MEMORY_BYTES >> 30} GiB or {CPU_S} s: send less"
    return lines[-1].removeprefix("conductor replay: ").rpartition("error: ")[2][:400]


def _is_table(trace: str) -> bool:
    """Return whether a file's first line is a table's head rather than JSON."""
    return trace.lstrip()[:1] not in ("{", "[", "")


def _write(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", errors="replace") as file:
        file.writelines(lines)
