"""`python -m engine.rank`: one of the other ranks of an engine; see `engine/ranks.py`.

Builds what rank 0 builds, in the same order, and follows its steps until the pipe ends.
"""

from __future__ import annotations

import sys

import torch

from base.clock import SystemClock
from base.config import EngineConfig
from base.errors import ConfigError
from engine.build import assemble_engine, load_rank
from engine.ranks import join_ranks
from engine.runner import Follower


def main() -> int:
    """Follow rank 0; return the exit status. What cannot be served is rank 0's to tell."""
    spec, group, steps = join_ranks()
    torch.set_num_threads(spec["threads"])
    config = EngineConfig(**spec["engine"])
    try:
        model, dtype = load_rank(config, spec["model_path"], group)
        runner = assemble_engine(config, model, dtype, SystemClock(), group=group).runner
    except ConfigError:
        return 1
    assert isinstance(runner, Follower)
    for numbers in steps:
        runner.follow(numbers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
