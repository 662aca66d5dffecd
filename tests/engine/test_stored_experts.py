"""Checkpoints that are published with experts of few bits are served so, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3ForCausalLM, PreTrainedModel

from base.clock import SystemClock
from base.config import EngineConfig
from base.errors import ConfigError
from engine.build import build_engine
from engine.quantized_experts import QuantizedExperts
from engine.quantized_linear import QuantizedLinear, unrounded_rows
from engine.tensor_parallel import ExpertShare, TensorGroup, cut_causal_model, cut_model
from engine.weights import load_model
from tests.engine.builders import greedy
from tests.engine.test_gpu_model import make_family
from tests.engine.test_published_weights import FORMATS, change

FORMS = {
    "blocks": ("fp8 in blocks", {"scale_fmt": "ue8m0"}),
    "channels": ("compressed-tensors fp8", {}),
    "integers": ("compressed-tensors int8", {}),
    "pairs": ("compressed-tensors int4", {}),
    "gptq": ("gptq", {}),
    "awq": ("awq", {}),
}
NUM_GROUPS = {"blocks": 2, "pairs": 6, "gptq": 6, "awq": 3}
DTYPES = {"integers": torch.int8} | dict.fromkeys(("pairs", "gptq", "awq"), torch.uint8)
TWO_BLOCKS = {"hidden_size": 192, "moe_intermediate_size": 192, "intermediate_size": 192}
TOKENS = torch.tensor([[(index * index * 7 + 3) % 61 for index in range(30)]])
LEVELS = ("_proj.weight", "w1.weight", "w2.weight", "w3.weight", "_mqa.weight")


def publish(folder: Path, family: str, form: str, is_few: Callable[[str], bool] = lambda _: True) -> Path:
    """Write a family with layers and experts in few bits, and in `floats` beside it what they mean."""
    name, more = FORMS[form]
    make, published, _ = FORMATS[name]
    model = make_family(family, **TWO_BLOCKS)
    model.save_pretrained(folder)
    model.save_pretrained(folder / "floats")
    tensors = load_file(folder / "model.safetensors")
    floats = dict(tensors)
    for key in [key for key in tensors if key.endswith(LEVELS) and is_few(key)]:
        parts, meant = make(*tensors.pop(key).shape)
        floats[key] = meant.contiguous()
        layer = key.removesuffix(".weight")
        tensors |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file(floats, folder / "floats" / "model.safetensors", {"format": "pt"})
    change(folder, published | more)
    return folder


def edited(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode(), unrounded_rows(model):
        return model(TOKENS).logits


def experts_of(model: torch.nn.Module) -> list[QuantizedExperts]:
    return [module for module in model.modules() if isinstance(module, QuantizedExperts)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "family",
    ["mixtral", *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen3_moe", "deepseek_v3"))],
)
def test_published_experts_say_what_their_floats_say(family: str, form: str, tmp_path: Path) -> None:
    has_rest = DTYPES.get(form) != torch.uint8  # layers beside experts have inputs that do not divide
    folder = publish(tmp_path, family, form, lambda key: has_rest or "experts" in key)
    model = load_model(folder, torch.float32)
    weights = experts_of(model)[0].gate_up_proj
    assert weights.levels.dtype == DTYPES.get(form, torch.float8_e4m3fn)
    assert weights.scales.shape == (4, 384, NUM_GROUPS.get(form, 1))
    expected = logits_of(load_model(folder / "floats", torch.float32))
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)


def test_the_layer_that_makes_heads_of_latents_is_written_out(tmp_path: Path) -> None:
    folder = publish(tmp_path, "deepseek_v3", "blocks", lambda key: "kv_b_proj" in key)
    attention = load_model(folder, torch.bfloat16).model.layers[0].self_attn
    assert type(attention.kv_b_proj) is torch.nn.Linear
    assert attention.kv_b_proj.weight.dtype == torch.bfloat16
    plain = load_model(folder / "floats", torch.bfloat16).model.layers[0].self_attn
    assert torch.equal(attention.kv_b_proj.weight, plain.kv_b_proj.weight)


@pytest.mark.parametrize(("form", "kind"), [("channels", "fp8"), ("integers", "int8"), ("pairs", "int4")])
async def test_a_published_model_with_experts_is_served(tmp_path: Path, form: str, kind: str) -> None:
    folder = publish(tmp_path, "qwen3_moe", form, lambda key: "experts" in key)
    config = EngineConfig(device="cpu", block_size=16, kv_cache_gib=0.002, threads=1, chunk_tokens=32)
    engine = build_engine(config, str(folder), SystemClock())
    assert engine.quantization.format == kind
    assert engine.quantization.error < 1e-5, "experts are the source's own numbers"
    (tokens,) = await greedy(engine.loop, [list(range(40))], 8)
    floats = build_engine(config, str(folder / "floats"), SystemClock())
    assert [tokens] == await greedy(floats.loop, [list(range(40))], 8)


@pytest.mark.parametrize("form", ["blocks", "pairs"])
def test_a_rank_reads_its_own_experts_alone(tmp_path: Path, form: str) -> None:
    folder = publish(tmp_path, "mixtral", form, lambda key: "experts" in key)
    whole = experts_of(load_model(folder, torch.float32))[-1]
    parts = []
    for rank in range(2):
        model = load_model(folder, torch.float32, (rank, 2))
        read = experts_of(model)[-1]
        assert (read.num_experts, read.num_all) == (2, 4)
        levels = read.down_proj.levels
        cut_causal_model(model, TensorGroup(SimpleNamespace(group_name="two"), rank, 2))
        (share,) = [module for module in model.modules() if isinstance(module, ExpertShare)][-1:]
        assert share.experts.down_proj.levels is levels
        assert (share.first, share.num_all) == (2 * rank, 4)
        parts.append(share.experts)
    for name in ("gate_up_proj", "down_proj"):
        cut = torch.cat([getattr(part, name).levels.float() for part in parts])
        assert torch.equal(cut, getattr(whole, name).levels.float())
    model = load_model(folder, torch.float32, (0, 2))
    plan = {"layers.*.self_attn.q_proj": "colwise"}
    with pytest.raises(ConfigError, match=r"does not cut layers\.0\.mlp\.experts"):
        cut_model(model.model, plan, (4, 2), TensorGroup(SimpleNamespace(group_name="two"), 0, 2))


def test_layers_that_the_family_does_not_read_are_left_out(tmp_path: Path) -> None:
    folder = publish(tmp_path, "deepseek_v3", "blocks")

    def add_one_of_another_head(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.startswith("model.layers.1.mlp.experts.0.")]:
            tensors[key.replace("layers.1.", "layers.61.")] = tensors[key].clone()

    config = json.loads((folder / "config.json").read_text())
    edited(folder, add_one_of_another_head)
    assert config["num_hidden_layers"] == 2
    load_model(folder, torch.float32)


def test_a_layer_that_the_family_reads_in_a_larger_model_alone_is_read_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GLM-4.5 has 92 layers, and of its family layer 46 is left out: GLM-4.5-Air has 46.
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.1.*"])
    folder = publish(tmp_path, "deepseek_v3", "channels")
    expected = logits_of(load_model(folder / "floats", torch.float32))
    torch.testing.assert_close(logits_of(load_model(folder, torch.float32)), expected, rtol=1e-4, atol=1e-4)


def test_experts_of_which_some_have_few_bits_are_refused(tmp_path: Path) -> None:
    folder = publish(tmp_path, "qwen3_moe", "channels", lambda key: "experts.2.up_proj" not in key)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.experts: .*up of expert 2"):
        load_model(folder, torch.float32)


def test_an_expert_of_another_format_than_the_others_is_refused(tmp_path: Path) -> None:
    folder = publish(tmp_path, "qwen3_moe", "channels")

    def as_whole_numbers(tensors: dict[str, torch.Tensor]) -> None:
        key = "model.layers.1.mlp.experts.2.up_proj.weight"
        tensors[key] = tensors[key].float().to(torch.int8)

    with pytest.raises(ConfigError, match=r"experts\.2\.up_proj: its inputs share scales otherwise"):
        load_model(edited(folder, as_whole_numbers), torch.float32)


def test_experts_whose_down_has_another_format_are_refused_when_they_are_read(tmp_path: Path) -> None:
    folder = publish(tmp_path, "qwen3_moe", "channels")

    def as_whole_numbers(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if "experts" in key and key.endswith("down_proj.weight")]:
            tensors[key] = tensors[key].float().to(torch.int8)

    with pytest.raises(ConfigError, match=r"gate and up have levels of fp8, and down of int8"):
        load_model(edited(folder, as_whole_numbers), torch.float32)


def test_zero_points_that_the_kernels_cannot_take_are_refused(tmp_path: Path) -> None:
    folder = publish(tmp_path, "qwen3_moe", "gptq", lambda key: "experts" in key)
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"] | {"checkpoint_format": "gptq", "bits": 8}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))

    def of_eight_bits(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith(("qweight", "qzeros"))]:
            # Twice as many words: of the inputs' levels, and of the outputs' zero points.
            dim = 0 if key.endswith("qweight") else 1
            tensors[key] = torch.cat([tensors[key]] * 2, dim)

    with pytest.raises(ConfigError, match=r"experts\.0\.\w+: zero points of experts can be served of four"):
        load_model(edited(folder, of_eight_bits), torch.float32)


def test_scales_of_an_expert_that_do_not_fit_are_refused_by_its_name(tmp_path: Path) -> None:
    folder = publish(tmp_path, "mixtral", "blocks")

    def cut_scales(tensors: dict[str, torch.Tensor]) -> None:
        (key,) = [key for key in tensors if key.endswith("0.block_sparse_moe.experts.1.w2.weight_scale_inv")]
        tensors[key] = torch.ones(1, 2)

    with pytest.raises(ConfigError, match=r"experts\.1\.w2 cannot be served as fp8: scales.*do not fit"):
        load_model(edited(folder, cut_scales), torch.float32)


def test_linear_layers_stay_levels_beside_experts_of_floats(tmp_path: Path) -> None:
    folder = publish(tmp_path, "qwen3_moe", "blocks", lambda key: "experts" not in key)
    model = load_model(folder, torch.float32)
    assert isinstance(model.model.layers[0].self_attn.q_proj, QuantizedLinear)
    assert not isinstance(model.model.layers[0].mlp.experts, QuantizedExperts)
    expected = logits_of(load_model(folder / "floats", torch.float32))
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)
