"""`python -m conductor.replay`: the command, compiled where `conductor compile` was run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from conductor.replay import compiled


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    compiled.use_or_say_so()
    # only now: what it imports is what may be compiled
    command = importlib.import_module("conductor.replay.command")
    return int(command.main(argv))


if __name__ == "__main__":
    sys.exit(main())
