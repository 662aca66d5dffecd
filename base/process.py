"""How a process of the cluster begins and says that it is ready.

Every one is `python -m PACKAGE --config FILE`: a JSON file that whoever starts it has written
out of `cluster.yaml`. Its exit status is 2 where the configuration is wrong, and a
supervisor that sees it does not start the process again.

With `--spare` it stands by: it imports and prepares, and runs when a byte comes on its
standard input, because the process that it is a spare of has ended.
"""

from __future__ import annotations

import argparse
import atexit
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from base.config import read_process_config
from base.errors import ConfigError
from base.lifetime import Lifetime, spare_collector
from base.logs import configure, end_log

T = TypeVar("T")

WRONG_CONFIGURATION = 2


def run_process(
    module: str,
    into: type[T],
    name_of: Callable[[T], str],
    prepare: Callable[[T], Callable[[Lifetime], None]],
) -> int:
    """Read what `--config` names, run with it, and return the exit status.

    Args:
        module: As after `python -m`, for the help text.
        into: The dataclass that the file holds.
        name_of: Returns what the process is called in its log lines.
        prepare: Does what takes nothing that another process of the same configuration may hold, and
            returns what runs the process until its lifetime has ended, and it in order.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument(
        "--config", type=Path, required=True, help=f"JSON of {into.__module__}.{into.__name__}"
    )
    parser.add_argument("--spare", action="store_true", help="wait for a byte on standard input first")
    parser.add_argument("--lifeline", type=Path, help="the socket of those for whom the process lives")
    arguments = parser.parse_args()
    atexit.register(end_log)
    try:
        config = read_process_config(arguments.config, into)
        configure(name_of(config))
        spare_collector()  # a fifth of the time in which a GPU node compiles
        _allow_descriptors()
        run = prepare(config)
        # Not sys.stdin, which would read ahead. End of file: the supervisor is gone.
        if not arguments.spare or os.read(0, 1):
            run(Lifetime(arguments.lifeline))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return WRONG_CONFIGURATION
    return 0


def _allow_descriptors() -> None:
    """Raise the limit of open files to the hard one: the soft one is for programs that use `select`."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
