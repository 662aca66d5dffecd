"""What every recorded figure needs beside it: which machine, when, of which commit."""

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
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": current_commit(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": {package: version(package) for package in packages},
    }


def processor_name() -> str:
    """Return what the kernel calls the processor; where it does not, the architecture."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def current_commit() -> str:
    """Return the commit of the working directory, with a + if there are changes on top."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
