"""Experts of few bits say what their weights say, on each way through a model, cut, moved and kept."""

import copy
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from base.config import EngineConfig
from engine import quantization, quantized_experts, tensor_parallel
from engine.calibration import quantize_for_text
from engine.device_weights import _Visit, move_to
from engine.expert_load import expert_counts
from engine.gpu_experts import experts
from engine.gpu_model import GpuModel
from engine.kernels.expert_scales import ExpertScales
from engine.kernels.grouped_experts import MAX_PAIRS, grouped_experts
from engine.model import PagedModel
from engine.quantization import load_weights
from engine.quantized_experts import ExpertWeights, QuantizedExperts, experts_in
from engine.quantized_linear import QuantizedLinear, quantize_linears, unrounded_rows
from engine.quantized_weight import WeightFormat
from engine.step_memory import StepShape
from engine.tensor_parallel import ExpertShare, TensorGroup, cut_causal_model
from tests.engine.builders import greedy, make_loop, make_model, make_sequence
from tests.engine.test_gpu_model import entry, expected_logits, make_cache, make_family, run

FAMILIES = ["qwen3_moe", "deepseek_v3"]
PROMPTS = [[5], list(range(30, 75)), [199 - 3 * index for index in range(60)]]
TOKENS = torch.tensor([[(index * index * 7 + 3) % 61 for index in range(50)]])


def floats_of(weights: ExpertWeights) -> torch.Tensor:
    return torch.stack([weights.expert(index).dequantized() for index in range(len(weights.levels))])


def quantised(family: str, kind: WeightFormat = WeightFormat.FP8) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a family with experts of levels, and the same with their floats; linear layers have levels."""
    model = make_family(family)
    quantize_linears(model, kind)
    reference = make_family(family)
    for _, name, _ in experts_in(reference):
        assert name == "experts"
    modules = dict(model.named_modules())
    for name, module in list(reference.named_modules()):
        if isinstance(modules.get(name), QuantizedLinear):
            reference.set_submodule(name, copy.deepcopy(modules[name]))
        if isinstance(modules.get(name), QuantizedExperts):
            module.gate_up_proj.data = floats_of(modules[name].gate_up_proj)
            module.down_proj.data = floats_of(modules[name].down_proj)
    return model, reference


def levels_in(model: torch.nn.Module) -> list[ExpertWeights]:
    return [module for module in model.modules() if isinstance(module, ExpertWeights)]


@pytest.mark.parametrize("kind", WeightFormat)
@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_tokens_equal_those_of_the_floats_that_levels_stand_for(
    family: str, kind: WeightFormat
) -> None:
    model, reference = quantised(family, kind)
    assert {weights.format for weights in levels_in(model)} == {kind}
    assert not levels_in(reference)
    expected = await greedy(make_loop(make_model(reference), chunk_tokens=23), PROMPTS, 6)
    assert await greedy(make_loop(make_model(model), chunk_tokens=23), PROMPTS, 6) == expected


def test_levels_are_near_to_the_floats_and_routers_stay_floats() -> None:
    plain, model = make_family("qwen3_moe"), make_family("qwen3_moe")
    quantize_linears(model, WeightFormat.FP8)
    before, after = plain.model.layers[0].mlp, model.model.layers[0].mlp
    for weights, floats in (
        (after.experts.gate_up_proj, before.experts.gate_up_proj),
        (after.experts.down_proj, before.experts.down_proj),
    ):
        assert weights.levels.dtype == torch.float8_e4m3fn
        assert weights.levels.shape == floats.shape
        assert weights.scales.shape == (*floats.shape[:2], 1)
        torch.testing.assert_close(floats_of(weights), floats.detach(), rtol=0.07, atol=0.002)
    assert torch.equal(after.gate.weight, before.gate.weight)


@pytest.mark.parametrize(
    "kind",
    [
        WeightFormat.FP8,
        *(pytest.param(kind, marks=pytest.mark.full) for kind in (WeightFormat.INT8, WeightFormat.INT4)),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.full)])
def test_kernels_give_the_logits_of_the_floats_and_count_what_is_chosen(
    family: str, kind: WeightFormat
) -> None:
    model, reference = quantised(family, kind)
    cache = make_cache(model)
    counts = expert_counts(model)
    gpu_model = GpuModel(model, cache, False, counts=counts)
    gpu_model.take_steps(128)
    prompts = [[(7 * index + size) % 211 for index in range(size)] for size in (20, 17)]
    first, second = (make_sequence(str(index), prompt) for index, prompt in enumerate(prompts))
    with unrounded_rows(model), unrounded_rows(reference):
        run(gpu_model, [entry(first, 0, 19, 0), entry(second, 0, 5, 8)], StepShape(32, 0, 3, 8))
        logits = run(gpu_model, [entry(first, 19, 1, 0), entry(second, 5, 12, 8)], StepShape(16, 4, 2, 8))
        for row, prompt in ((0, prompts[0]), (4, prompts[1])):
            expected = expected_logits(reference, prompt)
            torch.testing.assert_close(logits[row], expected, rtol=1e-3, atol=1e-4)
    # The last layer computes what is sampled alone, and does not count.
    chosen = counts.copied().sum(1).tolist()
    assert chosen == ([37 * 2, 0] if family == "qwen3_moe" else [0])


def test_floats_are_let_go_of_layer_by_layer(monkeypatch) -> None:
    model = make_family("qwen3_moe")
    floats = [weakref.ref(module.down_proj) for _, _, module in experts_in(model)]
    alive = []
    real = quantized_experts.QuantizedExperts

    def counted(*weights: ExpertWeights) -> QuantizedExperts:
        alive.append(sum(each() is not None for each in floats))
        return real(*weights)

    monkeypatch.setattr(quantized_experts, "QuantizedExperts", counted)
    quantized_experts.quantize_experts(model, WeightFormat.FP8)
    assert alive == [2, 1]


@pytest.mark.parametrize(("inner", "groups"), [(96, (32, 32)), (64, (64, 64)), (24, (64, 24))])
def test_four_bits_of_gate_and_down_have_groups_that_one_launch_takes(
    inner: int, groups: tuple[int, int]
) -> None:
    model = make_family("qwen3_moe", moe_intermediate_size=inner)
    plain = make_family("qwen3_moe", moe_intermediate_size=inner)
    quantized_experts.quantize_experts(model, WeightFormat.INT4)
    before, after = (each.model.layers[0].mlp.experts for each in (plain, model))
    assert (after.gate_up_proj.group, after.down_proj.group) == groups
    for weights, floats in (
        (after.gate_up_proj, before.gate_up_proj),
        (after.down_proj, before.down_proj),
    ):
        assert weights.levels.nbytes * 2 == floats.numel()
        assert (floats_of(weights) - floats).norm() < 0.12 * floats.norm()


def test_levels_and_scales_keep_their_dtypes_wherever_they_go() -> None:
    model, _ = quantised("qwen3_moe")
    model.to(torch.bfloat16)
    move_to(model, torch.device("meta"))
    for weights in levels_in(model):
        assert weights.levels.dtype == torch.float8_e4m3fn
        assert weights.scales.dtype == torch.float32
        assert weights.levels.device.type == weights.scales.device.type == "meta"


def test_experts_that_visit_a_device_are_home_again_as_they_were() -> None:
    model, _ = quantised("qwen3_moe")
    layer = model.base_model.layers[0].mlp
    before = [weights.levels for weights in levels_in(layer)]
    visit = _Visit(torch.device("meta"))
    visit.begin(layer, (), {})
    assert {weights.levels.device.type for weights in levels_in(layer)} == {"meta"}
    visit.end(layer, None, None)
    assert all(weights.levels is levels for weights, levels in zip(levels_in(layer), before, strict=True))


def test_a_layer_that_reads_a_text_rounds_its_experts_too() -> None:
    model = make_family("qwen3_moe")
    quantize_for_text(model, WeightFormat.FP8, model.get_output_embeddings(), list(range(40)))
    nearest, _ = quantised("qwen3_moe")
    for ours, theirs in zip(levels_in(model), levels_in(nearest), strict=True):
        assert torch.equal(ours.levels.float(), theirs.levels.float())
    fitted, plain = (each.base_model.layers[0].self_attn.q_proj.quantized for each in (model, nearest))
    assert not torch.equal(fitted.levels.float(), plain.levels.float())


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("mixtral", WeightFormat.FP8),
        ("deepseek_v3", WeightFormat.FP8),
        ("mixtral", WeightFormat.INT8),
        ("qwen3_moe", WeightFormat.INT4),
    ],
)
def test_ranks_with_some_of_the_experts_sum_to_the_whole(
    family: str, kind: WeightFormat, monkeypatch
) -> None:
    monkeypatch.setattr(tensor_parallel, "all_reduce", lambda *_: None)
    whole = make_family(family)
    quantized_experts.quantize_experts(whole, kind)
    shares = []
    for rank in range(2):
        model = copy.deepcopy(whole)
        cut_causal_model(model, TensorGroup(SimpleNamespace(group_name="two"), rank, 2))
        shares += [module for module in model.modules() if isinstance(module, ExpertShare)][-1:]
    experts = [module for module in whole.modules() if isinstance(module, QuantizedExperts)][-1]
    hidden = torch.randn(9, 64)
    weights, chosen = torch.rand(9, experts.num_experts).topk(2, dim=-1)
    parts = [share(hidden, chosen, weights) for share in shares]
    torch.testing.assert_close(sum(parts), experts(hidden, chosen, weights))
    for name in ("gate_up_proj", "down_proj"):
        cut = [getattr(share.experts, name) for share in shares]
        assert torch.equal(torch.cat([floats_of(each) for each in cut]), floats_of(getattr(experts, name)))
        assert len(cut[0].levels) == len(cut[0].scales) == experts.num_experts // 2


@pytest.mark.parametrize("kind", WeightFormat)
def test_experts_are_kept_and_read_with_the_rounded_weights(
    kind: WeightFormat, tmp_path: Path, monkeypatch
) -> None:
    make_family("deepseek_v3").save_pretrained(tmp_path / "model")
    config = EngineConfig(device="cpu", quantization=kind.value)

    def loaded(cache: Path | None) -> quantization.LoadedWeights:
        return load_weights(config, tmp_path / "model", torch.float32, torch.device("cpu"), cache)

    expected = loaded(None)
    first = loaded(tmp_path / "cache" / "id")
    monkeypatch.setattr(quantization, "quantize", None)  # nobody rounds again
    second = loaded(tmp_path / "cache" / "id")
    with torch.inference_mode():
        wanted = expected.module(TOKENS).logits
        for weights in (first, second):
            assert levels_in(weights.module)
            assert torch.equal(weights.module(TOKENS).logits, wanted)
    error = second.stated(PagedModel(second.module)).error
    assert error == expected.stated(PagedModel(expected.module)).error > 0


@pytest.mark.gpu
def test_many_pairs_of_levels_are_the_products_of_rounded_rows() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    module = QuantizedExperts(*(_weights(shape, device) for shape in ((8, 512, 256), (8, 256, 256))))
    hidden = torch.randn(600, 256, device=device, dtype=torch.bfloat16)
    chosen = torch.stack([torch.randperm(8, device=device)[:2] for _ in range(600)])
    chosen = torch.cat([chosen] * 4, 1)
    shares = torch.rand(chosen.shape, device=device).bfloat16()
    scales = ExpertScales(module.gate_up_proj.scales, module.down_proj.scales, 0)
    levels = module.gate_up_proj.levels, module.down_proj.levels
    assert chosen.numel() > MAX_PAIRS
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    found = experts(hidden, [*levels, *scales[:2]], 0, chosen, shares, nothing, nothing.int())
    expected = grouped_experts(hidden, *levels, chosen, shares, scales=scales)
    assert ((found - expected).float().norm() / expected.float().norm()).item() < 0.06


def _weights(shape: tuple[int, int, int], device: torch.device) -> ExpertWeights:
    weight = 0.05 * torch.randn(shape, device=device)
    scales = weight.abs().amax(-1, keepdim=True) / 448
    return ExpertWeights((weight / scales).to(torch.float8_e4m3fn), scales, shape[2])
