"""A deep model costs the compiler no more than a shallow one."""

from dataclasses import replace

import pytest
import torch
from torch import fx
from torch._inductor import config

from engine.compiled import OPTIONS, OwnOperators
from engine.expert_load import expert_counts
from engine.gpu_attention import step_header
from engine.gpu_model import GpuModel
from engine.model import PagedModel
from engine.paged_cache import PagedCache
from engine.quantized_experts import quantize_experts
from engine.quantized_weight import WeightFormat
from engine.scaled_kv import scaled_layout
from engine.step import StepPlan
from engine.step_memory import StepShape, StepWriter
from tests.engine.builders import make_sequence
from tests.engine.test_families import SMALL
from tests.engine.test_gpu_model import BLOCK_SIZE, NO_TOKENS, entry, make_family

KINDS = {
    "llama": ("llama", False),
    "llama with KV of 8 bits": ("llama", True),
    "latents": ("deepseek_v3", False),
    "complex rotations": ("deepseek_v2", False),
    "experts": ("mixtral", False),
    "experts of 8-bit floats": ("mixtral", False),
    "experts counted beside their product": ("mixtral", False),
}


def graphs_of(kind: str, num_layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a chunk and a token through a compiled model, and return how many graphs that took."""
    monkeypatch.setitem(SMALL, "num_hidden_layers", num_layers)
    if "beside" in kind:
        monkeypatch.setattr("engine.gpu_experts.is_plain", lambda _: False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    family, is_scaled = KINDS[kind]
    model = make_family(family)
    if "8-bit floats" in kind:
        quantize_experts(model, WeightFormat.FP8)
    shape = PagedModel(model).shape
    layout = replace(shape, block_size=BLOCK_SIZE)
    layout = scaled_layout(layout) if is_scaled else layout
    counts = expert_counts(model)
    gpu_model = GpuModel(model, PagedCache(layout, 32, torch.device("cpu")), counts=counts)
    gpu_model.take_steps(32)
    sequence = make_sequence("a", range(20))
    for entries, step in (
        ([entry(sequence, 0, 19, 0)], StepShape(32, 0, 2, 8)),
        ([entry(sequence, 19, 1, 0)], StepShape(4, 4, 0, 8)),
    ):
        plan = StepPlan(tuple(entries), sum(item.num_tokens == 1 for item in entries))
        memory = StepWriter(4096, BLOCK_SIZE, pinned=False).write(plan, step, {})
        gpu_model.forward(memory, step, step_header(step), NO_TOKENS)
    if counts is not None:
        *num_choices, last = counts.copied().sum(1).tolist()
        assert set(num_choices) == {2 * 20}
        assert last in (0, 2 * 20), "a last layer that is cut is not counted"
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_layers_share_what_is_compiled(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert graphs_of(kind, 5, monkeypatch) == graphs_of(kind, 3, monkeypatch) <= 6


def early_launches(make) -> bool:
    """Return whether a compiled function's kernels may be launched before the ones before them have ended."""
    found = []

    class Watched(OwnOperators):
        def __call__(self, graph: fx.Graph) -> None:
            super().__call__(graph)
            found.append(config.triton.enable_pdl)

    torch._dynamo.reset()
    own = {"post_grad_custom_pre_pass": Watched(), "fx_graph_cache": False}
    torch.compile(make, options=OPTIONS | own)(torch.ones(5, 4))
    assert not config.triton.enable_pdl, "the option is that of one graph"
    (is_early,) = found
    return is_early


@pytest.mark.full
def test_kernels_are_launched_early_where_each_reads_something() -> None:
    assert early_launches(lambda x: x.softmax(-1) + x.split(2, 1)[0].sum())


@pytest.mark.full
def test_kernels_are_not_launched_early_beside_one_that_reads_nothing() -> None:
    assert not early_launches(lambda x: torch.zeros_like(x).scatter(1, x.argmax(1)[:, None], 1.0) + x)
