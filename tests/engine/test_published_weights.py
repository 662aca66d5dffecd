"""Checkpoints as they are published in few bits are served level for level, or refused by name."""

import json
import re
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from base.clock import SystemClock
from base.config import EngineConfig
from base.errors import ConfigError
from engine.build import build_engine
from engine.published_weights import published_format, weight_of
from engine.quantized_linear import QuantizedLinear
from engine.weights import load_model
from tests.engine.builders import greedy

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Place in a word of each of eight outputs, as AutoAWQ's kernels want them."""

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.3,
    attention_bias=True,
)
GENERATOR = torch.Generator().manual_seed(3)


def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=GENERATOR)


def scales_of(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=GENERATOR) * 0.02 + 0.01


def packed_along_inputs(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Return unsigned numbers [n, k] in words [n, k * bits / 32], lowest first."""
    parts = fields.long().view(len(fields), -1, 32 // bits)
    words = sum(parts[..., at] << (bits * at) for at in range(32 // bits))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def gptq(out_features: int, in_features: int, bits: int = 4):
    groups = in_features // 32
    levels, zeros = drawn(0, 1 << bits, out_features, in_features), drawn(1, 1 << bits, out_features, groups)
    scales = scales_of(out_features, groups)
    tensors = {
        "qweight": packed_along_inputs(levels, bits).t(),
        "qzeros": packed_along_inputs((zeros - 1).t(), bits),
        "scales": scales.t(),
        "g_idx": (torch.arange(in_features) // 32).int(),
    }
    return tensors, (levels - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1)


def gptq8(out_features: int, in_features: int):
    return gptq(out_features, in_features, 8)


def awq(out_features: int, in_features: int):
    groups = in_features // 64
    levels, zeros = drawn(0, 16, out_features, in_features), drawn(0, 16, out_features, groups)
    scales = scales_of(out_features, groups).half()

    def words(fields: torch.Tensor) -> torch.Tensor:
        ordered = fields.t().reshape(fields.shape[1], -1, 8)[..., list(AWQ_ORDER)]
        return packed_along_inputs(ordered.flatten(1), 4)

    tensors = {"qweight": words(levels), "qzeros": words(zeros), "scales": scales.t()}
    return tensors, (levels - zeros.repeat_interleave(64, 1)) * scales.float().repeat_interleave(64, 1)


def blocks(out_features: int, in_features: int):
    levels = (torch.randn(out_features, in_features, generator=GENERATOR) * 50).to(torch.float8_e4m3fn)
    scales = scales_of(-(-out_features // 128), -(-in_features // 128)) * 0.1
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:out_features, :in_features]
    return {"weight": levels, "weight_scale_inv": scales}, levels.float() * spread


def channels(out_features: int, in_features: int):
    levels = (torch.randn(out_features, in_features, generator=GENERATOR) * 50).to(torch.float8_e4m3fn)
    scales = scales_of(out_features, 1) * 0.1
    return {"weight": levels, "weight_scale": scales.bfloat16()}, levels.float() * scales.bfloat16().float()


def int_channels(out_features: int, in_features: int):
    levels, scales = drawn(-127, 128, out_features, in_features), scales_of(out_features, 1) * 0.1
    return {"weight": levels.to(torch.int8), "weight_scale": scales}, levels * scales


def pack_quantized(out_features: int, in_features: int):
    groups = in_features // 32
    levels, zeros = drawn(-8, 8, out_features, in_features), drawn(-8, 8, out_features, groups)
    scales = scales_of(out_features, groups)
    tensors = {
        "weight_packed": pack_to_int32(levels.to(torch.int8), 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor([out_features, in_features]),
        "weight_zero_point": pack_to_int32(zeros.to(torch.int8), 4, packed_dim=0),
    }
    return tensors, (levels - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1)


def group(weights: dict, rows: dict | None = None, stored: str = "") -> dict:
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": rows}},
    }


EIGHT_BIT_ROWS = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token", "symmetric": True}
FORMATS = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}, "int4"),
    "gptq of 8 bits": (gptq8, {"quant_method": "gptq", "bits": 8, "group_size": 32}, "int8"),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, "int4"),
    "fp8 in blocks": (
        blocks,
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        "fp8",
    ),
    "compressed-tensors fp8": (
        channels,
        group({"num_bits": 8, "type": "float", "strategy": "channel"}, EIGHT_BIT_ROWS, "float-quantized"),
        "fp8",
    ),
    "compressed-tensors int8": (
        int_channels,
        group({"num_bits": 8, "type": "int", "strategy": "channel"}, None, "int-quantized"),
        "int8",
    ),
    "compressed-tensors int4": (
        pack_quantized,
        group(
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
            None,
            "pack-quantized",
        ),
        "int4",
    ),
}


def publish(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Write a model whose layers are published so; return the weights that they mean, by layer."""
    make, published, _ = FORMATS[name]
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors, meant = load_file(file), {}
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        layer = key.removesuffix(".weight")
        parts, meant[layer] = make(*tensors.pop(key).shape)
        tensors |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, file, {"format": "pt"})
    change(folder, published)
    return meant


def change(folder: Path, published: dict) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": published}))


@pytest.mark.parametrize("name", FORMATS)
def test_a_published_checkpoint_is_read_level_for_level(name: str, tmp_path: Path) -> None:
    meant = publish(tmp_path, name)
    model = load_model(tmp_path, torch.float32)
    layers = dict(model.named_modules())
    for layer, weight in meant.items():
        assert isinstance(layers[layer], QuantizedLinear)
        torch.testing.assert_close(
            layers[layer].quantized.dequantized(), weight.float(), rtol=1e-5, atol=1e-6
        )
        assert layers[layer].bias is None or layers[layer].bias.device.type == "cpu"
    assert type(model.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("name", FORMATS)
async def test_a_published_checkpoint_is_served(name: str, tmp_path: Path) -> None:
    publish(tmp_path, name)
    config = EngineConfig(device="cpu", block_size=16, kv_cache_gib=0.002, threads=1, chunk_tokens=32)
    engine = build_engine(config, str(tmp_path), SystemClock())
    assert engine.quantization.format == FORMATS[name][2]
    assert 0 < engine.quantization.error < 0.5
    (tokens,) = await greedy(engine.loop, [list(range(40))], 8)
    assert len(tokens) == 8


def test_a_published_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    publish(tmp_path, "gptq")
    with pytest.raises(ConfigError, match="published in int4: say none"):
        build_engine(EngineConfig(device="cpu", quantization="int8"), str(tmp_path), SystemClock())


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
REFUSED = {
    "quant_method 'exl3'.*known: compressed-tensors, fp8, awq, gptq": {"quant_method": "exl3"},
    "gptq: bits: 3": {"quant_method": "gptq", "bits": 3},
    "checkpoint_format 'marlin'": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
    "dynamic: bits that differ": {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}},
    "awq: Unsupported AutoAWQ version: gemv": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "scale_fmt must be": {"quant_method": "fp8", "scale_fmt": "int"},
    "expert_dtype 'fp4'": {"quant_method": "fp8", "expert_dtype": "fp4"},
    "weights of 4 bits": group(
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    ),
    "weights of 3 bits": group(INT4 | {"num_bits": 3}),
    "format 'marlin-24'": group(INT4, None, "marlin-24"),
    "actorder='group'": group(INT4 | {"actorder": "group"}, None, "pack-quantized"),
    "activations of 4 bits": group(INT4, {"num_bits": 4, "type": "int"}, "pack-quantized"),
    "sparsity_config cannot be served": group(INT4, None, "pack-quantized")
    | {"sparsity_config": {"format": "sparse-24-bitmask"}},
    "transform_config cannot be served": group(INT4, None, "pack-quantized") | {"transform_config": {"a": 1}},
    "compressed-tensors: ": {"quant_method": "compressed-tensors", "config_groups": 5},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        published_format(REFUSED[reason])


def broken(tensors: dict, layer: str, part: str, tensor: torch.Tensor | None) -> None:
    if tensor is None:
        del tensors[f"{layer}.{part}"]
    else:
        tensors[f"{layer}.{part}"] = tensor


@pytest.mark.parametrize(
    ("name", "part", "tensor", "reason"),
    [
        ("gptq", "g_idx", torch.arange(128).flip(0).int() // 32, "another order"),
        ("gptq", "scales", None, "scales.* is missing"),
        ("gptq", "qweight", torch.zeros(4, 128, dtype=torch.int32), "cannot be served as gptq|levels are"),
        ("fp8 in blocks", "weight_scale_inv", torch.ones(3, 1), "do not fit"),
        (
            "compressed-tensors int4",
            "weight_packed",
            torch.zeros(1, 1, dtype=torch.int32),
            "levels are",
        ),
        ("compressed-tensors fp8", "weight_scale", torch.ones(7, 1), "do not fit"),
        ("gptq", "qweight", torch.zeros(32, 128, dtype=torch.int32), "levels are"),
        (
            "compressed-tensors int4",
            "weight_g_idx",
            torch.arange(128).flip(0).int() // 32,
            "another order",
        ),
        ("compressed-tensors fp8", "weight", torch.ones(128, 128), "levels are torch.float32"),
        ("fp8 in blocks", "weight", torch.ones(128, 128).bfloat16(), "levels are torch.bfloat16"),
        ("compressed-tensors fp8", "weight_scale", None, "its scales are missing"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_layer(name, part, tensor, reason, tmp_path: Path) -> None:
    publish(tmp_path, name)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    broken(tensors, "model.layers.1.self_attn.q_proj", part, tensor)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=f"layers.1.self_attn.q_proj.*({reason})"):
        load_model(tmp_path, torch.float32)


@pytest.mark.parametrize("shape", [(63, 1), (63, 24), (64, 16)])
def test_scales_that_are_not_one_for_each_output_and_group_are_refused(shape: tuple[int, int]) -> None:
    tensors = {
        "qweight": torch.zeros(250, 16, dtype=torch.int32),
        "qzeros": torch.full((64, 2), 0x77777777, dtype=torch.int32),  # zero points that are all 0
        "scales": torch.ones(63, 16),
    }
    gptq = published_format({"quant_method": "gptq", "bits": 4})
    assert weight_of(gptq, "layer", tensors, (16, 2000)).group == 32
    reason = f"layer: its scales are {[shape[1], shape[0]]}; [16, 63] are wanted"
    with pytest.raises(ConfigError, match=re.escape(reason)):
        weight_of(gptq, "layer", tensors | {"scales": torch.ones(shape)}, (16, 2000))


def test_few_bits_of_what_is_no_linear_layer_are_refused(tmp_path: Path) -> None:
    publish(tmp_path, "gptq")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.0.up_proj.qweight"] = torch.zeros(2, 2, dtype=torch.int32)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"no linear layer.*experts\.0\.up_proj"):
        load_model(tmp_path, torch.float32)


def test_a_head_of_few_bits_that_config_json_ties_to_embeddings_is_refused_by_the_key(tmp_path: Path) -> None:
    publish(tmp_path, "gptq")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    parts, _ = gptq(64, 128)
    tensors |= {f"lm_head.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, file, {"format": "pt"})
    load_model(tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ConfigError, match="tie_word_embeddings is true, and the output head has few bits"):
        load_model(tmp_path, torch.float32)
