"""Finding every process that a test's command started, however deep and whoever adopted it.

Each run carries a mark in its environment, which children inherit: Ray's, and ours.
"""

import os
import select
import sys
import uuid
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MARK = "CONDUCTOR_TEST_RUN"


def marked_environment(**more: str) -> dict[str, str]:
    """An environment with a mark of its own, in which our packages can be imported."""
    here = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return {**here, "PYTHONPATH": str(ROOT), "COLUMNS": "200", MARK: uuid.uuid4().hex, **more}


def marked_pids(environment: dict[str, str]) -> dict[int, str]:
    """Living processes (no zombies) that carry the mark, with their command lines."""
    wanted = f"{MARK}={environment[MARK]}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def wait_all_gone(environment: dict[str, str], timeout_s: float) -> dict[int, str]:
    """Wait until no marked process is left; return those that are, after `timeout_s`."""
    while left := marked_pids(environment):
        # What they began meanwhile is looked for again.
        if not all([wait_gone(pid, timeout_s) for pid in left]):
            return marked_pids(environment)
    return {}


def wait_gone(pid: int, timeout_s: float) -> bool:
    """Block until a process that need not be our child has ended; False after `timeout_s`."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


assert sys.platform == "linux", "these tests read /proc"
