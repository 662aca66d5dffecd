"""`python -m bench.engine_rank`: one of the other ranks of `bench/engine.py --ranks N`."""

from __future__ import annotations

from base.clock import SystemClock
from base.config import EngineConfig
from base.errors import ConfigError
from base.tables import from_table
from bench.engine_shapes import SHAPES, build_model
from engine.arrivals import ArrivingBlocks
from engine.build import assemble_engine
from engine.model import PagedModel
from engine.quantization import quantised_weights
from engine.ranks import follow_steps, join_ranks
from engine.tensor_parallel import TensorGroup, cut_causal_model


def build_rank(
    shape: str, group: TensorGroup | None, quantization: str = "none", same_experts: bool = False
) -> PagedModel:
    """Return this rank's share of a model of `shape`, the same random weights on every rank.

    Args:
        same_experts: Whether every token goes to the same experts, which a router of zeros does.

    Raises ConfigError if that is asked of a model without experts."""
    module = build_model(SHAPES[shape])
    if same_experts:
        routers = [weight for name, weight in module.named_parameters() if name.endswith("mlp.gate.weight")]
        if not routers:
            raise ConfigError(f"{shape} has no experts that tokens could be sent to")
        for weight in routers:
            weight.data.zero_()
    weights = quantised_weights(module, quantization)
    if group is not None:
        cut_causal_model(weights.module, group)
    model = PagedModel(weights.module)
    model.quantization = weights.stated(model)
    return model


def main() -> None:
    clock = SystemClock()
    spec, group, pipe = join_ranks()
    config = from_table(EngineConfig, spec["engine"], ("engine",))
    model = build_rank(spec["shape"], group.tensor, config.quantization)
    runner = assemble_engine(config, model, clock, group=group).runner
    follow_steps(pipe, group.device, runner, lambda message: None, ArrivingBlocks((), clock))


if __name__ == "__main__":
    main()
