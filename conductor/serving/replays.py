"""Replays that an operator asks for: a trace, or the traffic of the last hour, on nodes of one's choice.

The command `conductor replay --html` runs in a process of its own, one at a time, with bounds of memory, of
processor time and of the clock, at the lowest priority: whatever a trace holds, the conductor serves on. What
comes back is the command's own report and page. The last hour is replayed on nodes that are as slow as this
conductor's own were measured to be.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from base.errors import InvalidRequestError, RejectedError
from base.request import Role, Slo
from base.uninterrupted import uninterrupted
from conductor.placing.cluster_view import ClusterView
from conductor.placing.placement import UNBOUNDED
from conductor.serving.traffic import Traffic, measured, trace_lines

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
SLOW = 1.25
"""Times of what its profile says, from which on a node is replayed as slow as it is: less is noise."""

Paces = Callable[[], Mapping[str, Sequence[float]]]
"""Returns how many times what the profile says the work of each node takes, by P, D and C as in `--nodes`."""


class Replays:
    """Runs them one at a time. Belongs to the event loop."""

    def __init__(self, traffic: Traffic, block_size: int, arguments: Sequence[str], paces: Paces) -> None:
        """Begin. `arguments`: those under which replay does as this conductor."""
        self._traffic, self._paces = traffic, paces
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
                    # whoever leaves meanwhile, the folder is deleted when the thread has made its file
                    await uninterrupted(asyncio.to_thread(_write, path, lines))
                    paces = {} if trace else self._paces()
                    runs = [
                        await self._one(path, each, (*bounds, *extra), slow_nodes(each, paces))
                        for each in nodes
                    ]
                    was = await asyncio.to_thread(measured, records, slo) if records else None
                    return {"measured": was, "runs": runs}
        except TimeoutError:
            raise InvalidRequestError(
                f"the replay took longer than {WALL_S:g} s: send less, or ask when this host is less busy",
                "trace",
            ) from None
        finally:
            self._is_running = False

    async def _one(
        self, trace: Path, nodes: str, bounds: Sequence[str], slow: Mapping[str, float]
    ) -> dict[str, Any]:
        page = trace.with_name("page.html")
        command = ["-m", COMMAND, str(trace), *self._arguments, *bounds, "--nodes", nodes]
        for name, times in slow.items():
            command += ["--slow-node", f"{name}={times:.3g}"]
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
        answer = json.loads(said)
        html = page.read_text() if page.stat().st_size <= MAX_PAGE_BYTES else ""
        answer |= {"report": answer["runs"][0], "nodes": nodes, "slow_nodes": dict(slow), "html": html}
        return {key: answer[key] for key in ("nodes", "slow_nodes", "trace", "report", "html")}


def paces_of(view: ClusterView) -> dict[str, list[float]]:
    """Return the paces of a view's nodes, as `Paces` has it."""
    found: dict[str, list[float]] = {"P": [], "D": [], "C": []}
    ratio = view.corrections.ratio
    for node_id in view.node_ids():
        roles = view.node(node_id).info.roles
        terms = [("prefill", Role.PREFILL in roles), ("decode", Role.DECODE in roles)]
        paces = [ratio(node_id, term) for term, is_its in terms if is_its]
        if paces:
            found["C" if len(paces) > 1 else "P" if Role.PREFILL in roles else "D"].append(max(paces))
    return found


def slow_nodes(nodes: str, paces: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return which nodes of a cluster like 5P2D are slow, as replay calls them, and how many times.

    Nodes that there are not yet are as the profile says; where there are fewer, the slowest have gone.
    """
    found = {}
    for size, kind in re.findall(r"(\d{1,6})([PDC])", nodes.upper()):
        for number, pace in enumerate(sorted(paces.get(kind, ()))[: int(size)]):
            if pace >= SLOW:
                found[f"{kind.lower()}{number}"] = pace
    return found


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
    # Without memory left not even an exception is always printed to its end.
    if status < 0 or not lines or any(each in said for each in (b"MemoryError", b"Exception ignored in")):
        return f"the replay needs more than {MEMORY_BYTES >> 30} GiB or {CPU_S} s: send less"
    return lines[-1].removeprefix("conductor replay: ").rpartition("error: ")[2][:400]


def _is_table(trace: str) -> bool:
    """Return whether a file's first line is a table's head rather than JSON."""
    return trace.lstrip()[:1] not in ("{", "[", "")


def _write(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", errors="replace") as file:
        file.writelines(lines)
