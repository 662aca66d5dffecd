"""`python -m bench.engine_rank`: one of the other ranks of `bench/engine.py --ranks N`."""

from __future__ import annotations

from base.clock import SystemClock
from base.config import EngineConfig
from bench.engine_shapes import SHAPES, build_model
from engine.build import assemble_engine
from engine.model import PagedModel
from engine.ranks import join_ranks
from engine.runner import Follower
from engine.tensor_parallel import TensorGroup, cut_causal_model


def build_rank(shape: str, group: TensorGroup | None) -> PagedModel:
    """Return this rank's share of a model of `shape`, the same random weights on every rank."""
    model = build_model(SHAPES[shape])
    if group is not None:
        cut_causal_model(model, group)
    return PagedModel(model)


def main() -> None:
    spec, group, steps = join_ranks()
    config = EngineConfig(**spec["engine"])
    model = build_rank(spec["shape"], group)
    runner = assemble_engine(config, model, "bfloat16", SystemClock(), group=group).runner
    assert isinstance(runner, Follower)
    for numbers in steps:
        runner.follow(numbers)


if __name__ == "__main__":
    main()
