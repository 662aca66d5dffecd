"""Results as they are kept: as JSON, with the machine, the date and the commit beside each figure."""

import json
import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path


def about_run(*packages: str) -> dict[str, object]:
    """Return processor, cores, load average, date, commit and the versions of `packages`."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "date": today(),
        "commit": current_commit(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": {package: version(package) for package in packages},
    }


def write_result(path: Path | None, result: object) -> None:
    """Write a result as JSON; no path: nowhere."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def processor_name() -> str:
    """Return what the kernel calls the processor; where it does not, the architecture."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def current_commit() -> str:
    """Return the commit of the working directory, with a + if there are changes on top."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
