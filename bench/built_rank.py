"""`python -m bench.built_rank`: one of the other ranks of an engine that `build_engine` builds alone.

Builds what rank 0 builds, in the same order, and follows its steps. The rank of a node is `node/rank.py`.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from base.clock import SystemClock
from base.errors import ConfigError
from engine.arrivals import ArrivingBlocks
from engine.build import build_rank
from engine.ranks import follow_steps, join_ranks


def main() -> NoReturn:
    """Follow rank 0 to its end, which reports what cannot be served."""
    clock = SystemClock()
    spec, group, pipe = join_ranks()
    try:
        engine = build_rank(spec, group, clock)
    except ConfigError:
        sys.exit(1)
    nothing = ArrivingBlocks((), clock)
    follow_steps(pipe, group.device, engine.runner, lambda message: None, nothing)


if __name__ == "__main__":
    main()
