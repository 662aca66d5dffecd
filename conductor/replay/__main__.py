"""`python -m conductor.replay`: the command, compiled where `conductor compile` was run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from conductor.replay import compiled

HINT = "conductor replay: in plain Python; `conductor compile`, once, makes it twice as fast\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `conductor replay`; return its exit code."""
    if not compiled.use() and sys.stderr.isatty():
        sys.stderr.write(HINT)
    # only now: what it imports is what may be compiled
    command = importlib.import_module("conductor.replay.command")
    return int(command.main(argv))


if __name__ == "__main__":
    sys.exit(main())
