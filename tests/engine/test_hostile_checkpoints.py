"""Checkpoints that are damaged, odd or made to harm who loads them: a line that names what is wrong, soon."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GraniteMoeHybridConfig

from base.clock import SystemClock
from base.config import EngineConfig
from base.errors import ConfigError
from engine import layer_patterns
from engine.build import build_engine
from engine.layer_patterns import LayerNames, require_quick
from engine.model_config import model_config
from engine.model_store import CONFIG_BYTES, prepare
from engine.tensor_parallel import TensorGroup, cut_causal_model
from engine.weights import load_model
from tests.effort import counting
from tests.engine.test_gpu_model import make_family
from tests.engine.test_published_weights import FORMATS, pack_quantized
from tests.engine.test_published_weights import publish as publish_linears
from tests.engine.test_stored_experts import edited, experts_of, publish

SCALES = {"blocks": "weight_scale_inv", "channels": "weight_scale"}
LAYERS = {"expert": "layers.0.mlp.experts.1.up_proj", "linear": "layers.1.self_attn.q_proj"}


def serve(folder: Path) -> None:
    config = EngineConfig(device="cpu", block_size=16, kv_cache_gib=0.002, threads=1, chunk_tokens=32)
    build_engine(config, str(folder), SystemClock())


def changed(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=SCALES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, publish(tmp_path_factory.mktemp("published"), "qwen3_moe", request.param)


def with_scales(published: tuple[str, Path], folder: Path, layer: str, scales: Any) -> Path:
    """Return a copy in which a layer has other scales."""
    form, source = published
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((source / name).read_bytes())

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        (key,) = [key for key in tensors if key.endswith(f"{LAYERS[layer]}.{SCALES[form]}")]
        tensors[key] = scales(tensors[key])

    return edited(folder, edit)


HARMFUL_SCALES = {
    "one is no number": (lambda found: found.index_fill(0, torch.tensor([0]), torch.nan), "not all finite"),
    "infinite": (lambda found: found.float() * torch.inf, "not all finite"),
    "too large for a float": (lambda found: torch.full_like(found, 3e38).float(), "not all finite"),
    "one for all": (lambda found: found.flatten()[:1].clone(), r"scales of \(1,\) do not fit"),
    "none": (lambda found: found[:0].clone(), "do not fit"),
    "of three dimensions": (lambda found: found[None].clone(), "do not fit"),
    "exponents as bytes": (lambda found: torch.full_like(found, 127).to(torch.uint8), "uint8, and must be"),
    "truths": (lambda found: found > 0, "BOOL; known: "),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", HARMFUL_SCALES)
def test_scales_that_would_make_another_model_are_refused_by_layer(
    published: tuple[str, Path], layer: str, kind: str, tmp_path: Path
) -> None:
    make, reason = HARMFUL_SCALES[kind]
    with pytest.raises(ConfigError, match=f"{LAYERS[layer]}.*{reason}"):
        load_model(with_scales(published, tmp_path, layer, make), torch.float32)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_level_that_is_no_number_is_refused_by_layer(
    published: tuple[str, Path], layer: str, byte: int, tmp_path: Path
) -> None:
    """Whether or not a token hits its expert, which the self-check cannot promise."""

    def with_byte(folder: Path, damaged: int) -> Path:
        def edit(tensors: dict[str, torch.Tensor]) -> None:
            (key,) = [key for key in tensors if key.endswith(f"{LAYERS[layer]}.weight")]
            tensors[key].view(torch.uint8)[-1, -1] = damaged

        folder.mkdir()
        return edited(with_scales(published, folder, layer, lambda scales: scales), edit)

    load_model(with_byte(tmp_path / "largest", byte - 1), torch.float32)
    with pytest.raises(ConfigError, match=f"{LAYERS[layer]}.*levels are not all numbers"):
        load_model(with_byte(tmp_path / "damaged", byte), torch.float32)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float64])
def test_scales_of_any_float_are_what_they_say(
    published: tuple[str, Path], layer: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Powers of two, which all have: exponents alone are how scales of `ue8m0` may be stored."""

    def power(found: torch.Tensor) -> torch.Tensor:
        return torch.exp2(found.double().log2().round()).to(found.dtype)

    def read(scales: Any) -> torch.Tensor:
        model = load_model(with_scales(published, tmp_path, layer, scales), torch.float32)
        if layer == "expert":
            return experts_of(model)[0].gate_up_proj.scales[1]
        return model.model.layers[1].self_attn.q_proj.quantized.scales

    assert torch.equal(read(lambda found: power(found).to(dtype)), read(power))


@pytest.mark.parametrize("block", [[64, 64], [100, 128], [128, 1 << 30], [1.5, 128], [True, 128], ["1", "1"]])
def test_blocks_that_the_scales_are_not_of_are_refused(block: list[Any], tmp_path: Path) -> None:
    publish_linears(tmp_path, "fp8 in blocks")
    changed(tmp_path, lambda config: config["quantization_config"].update(weight_block_size=block))
    with pytest.raises(ConfigError, match=r"do not fit|cannot be served|whole numbers|not supported"):
        load_model(tmp_path, torch.float32)


def test_a_block_larger_than_a_weight_is_the_weight(tmp_path: Path) -> None:
    folder = publish(tmp_path, "qwen3_moe", "blocks", lambda key: "q_proj" in key)

    def one_block(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith("weight_scale_inv")]:
            tensors[key] = tensors[key].flatten()[:1].view(1, 1).clone()

    edited(folder, one_block)
    sizes = {"weight_block_size": [1 << 30, 1 << 30]}
    model = load_model(changed(folder, lambda c: c["quantization_config"].update(sizes)), torch.float32)
    weight = model.model.layers[0].self_attn.q_proj.quantized
    assert weight.scales.shape == (64, 1)
    assert len(weight.scales.unique()) == 1


@pytest.mark.parametrize(("place", "pattern"), [("ignore", "(.+)+q_proj!"), ("targets", "(.*.*.*.*.*)*x")])
def test_patterns_that_take_for_ever_are_refused(
    place: str, pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_linears(tmp_path, "compressed-tensors fp8")
    monkeypatch.setattr(layer_patterns, "PROCESSOR_S", 1)

    def edit(config: dict[str, Any]) -> None:
        part = config["quantization_config"]
        (part if place == "ignore" else part["config_groups"]["group_0"])[place] = [f"re:{pattern}"]

    with pytest.raises(ConfigError, match="ignore, targets: 1 patterns take more than 1 s of a processor"):
        load_model(changed(tmp_path, edit), torch.float32)


def test_entries_that_are_no_patterns_are_refused() -> None:
    names = ["model.layers.0.mlp.up_proj"]
    for entry in ("[", "(?P<n>", "(" * 5000):
        with pytest.raises(ConfigError, match="is no pattern"):
            require_quick([entry], names)
    require_quick([r".*mlp\.(gate|up)_proj$", r"^(?!visual)"], names)


def test_what_ends_a_trial_of_patterns_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_patterns.sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="could not be tried") as caught:
        require_quick(["a"], ["a"])
    assert "of a processor" not in str(caught.value)


def test_layers_are_named_by_name_by_kind_and_by_pattern() -> None:
    layer = "model.layers.0.mlp.up_proj"
    for entries in ([layer], ["Linear"], [r"re:.*mlp\.(gate|up)_proj"], ["re:model"]):
        assert layer in LayerNames(["lm_head", *entries])
    for entries in ([], ["up_proj"], ["re:mlp"], [r"re:.*\.down_proj"], [".*"]):
        assert layer not in LayerNames(["lm_head", *entries])


CONFIGURATIONS = {
    "num_labels is 100000000: leave it out": {"num_labels": 10**8},
    r"gate of expert 4": {"num_local_experts": 10**9},
    "num_experts_per_tok is 1000000000, of 4 experts": {"num_experts_per_tok": 10**9},
    "num_experts_per_tok is 0, of 4 experts": {"num_experts_per_tok": 0},
    "num_experts_per_tok is 2, of -1 experts": {"num_local_experts": -1},
    "max_position_embeddings is 0; a number": {"max_position_embeddings": 0},
    "max_position_embeddings is -5; a number": {"max_position_embeddings": -5},
    r"(embed_tokens|lm_head)\.weight is \[211, 192\] in the files, and \[1000000000, 192\]": {
        "vocab_size": 10**9
    },
    "do not fit blocks": {"intermediate_size": 10**9},
    "expected int, got str": {"num_local_experts": "4"},
    "'x' is unknown": {"hidden_act": "x"},
    "at most are read": {"id2label": {str(index): "a" * 30 for index in range(CONFIG_BYTES // 30)}},
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("mixture"), "mixtral", "blocks")


@pytest.mark.parametrize("reason", CONFIGURATIONS)
def test_a_configuration_made_to_harm_is_refused_with_little_work(
    mixture: Path, reason: str, tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((mixture / name).read_bytes())
    changed(tmp_path, lambda config: config.update(CONFIGURATIONS[reason]))
    with counting() as effort, pytest.raises(ConfigError, match=reason) as caught:
        serve(tmp_path)
    assert effort.lines < 600_000
    assert effort.peak_bytes < 64 << 20
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_group": 3}, "n_group is 3, which does not divide 4 experts"),
        ({"topk_group": 10**9}, "topk_group is 1000000000, of 2 groups"),
        ({"num_experts_per_tok": 3}, "num_experts_per_tok is 3, and 1 groups have 2 experts"),
        ({"n_group": 4, "topk_group": 4}, "cannot be run"),
    ],
)
def test_groups_of_experts_that_do_not_fit_are_refused(
    changes: dict[str, int], reason: str, tmp_path: Path
) -> None:
    make_family("deepseek_v3").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        serve(changed(tmp_path, lambda config: config.update(changes)))


def test_a_model_without_experts_of_a_family_that_has_some_is_described(tmp_path: Path) -> None:
    GraniteMoeHybridConfig(num_local_experts=0, num_experts_per_tok=0).save_pretrained(tmp_path)
    assert model_config(tmp_path).num_local_experts == 0


def test_experts_of_other_sizes_than_the_configuration_are_refused_before_room_is_made(
    mixture: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((mixture / name).read_bytes())
    changed(tmp_path, lambda config: config.update(intermediate_size=128 << 20))
    with pytest.raises(ConfigError, match=r"experts\.0\.w1 cannot be served as fp8: scales of \(2, 2\)"):
        load_model(tmp_path, torch.float32)


@pytest.mark.full
def test_a_large_model_that_cannot_be_served_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_family("llama").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    changed(tmp_path, lambda config: config.update(model_type="nobody_knows"))
    monkeypatch.setattr("engine.model_store.CHECKED_FIRST_BYTES", 1)
    said: list[str] = []
    with pytest.raises(ConfigError, match="`nobody_knows`"):
        prepare(str(tmp_path), tmp_path / "cache", said.append)
    assert not said, "a digest was begun"


@pytest.mark.parametrize("kind", ["far beyond the others", "none"])
def test_layers_that_the_files_do_not_have_are_not_made(kind: str, tmp_path: Path) -> None:
    publish_linears(tmp_path, "gptq")

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if kind == "none":
            tensors.clear()
        tensors["model.layers.999999999.unused.weight" if tensors else "unused.weight"] = torch.zeros(1)

    changed(edited(tmp_path, edit), lambda config: config.update(num_hidden_layers=10**6))
    count = 1 if kind == "none" else 3
    with pytest.raises(ConfigError, match=f"num_hidden_layers is 1000000, the files have {count}"):
        load_model(tmp_path, torch.float32)


@pytest.mark.parametrize("form", ["channels", "floats"])
def test_numbers_that_are_none_are_said_to_be_damage(form: str, tmp_path: Path) -> None:
    if form == "floats":
        make_family("qwen3_moe").save_pretrained(tmp_path)
        folder = tmp_path
    else:
        folder = publish(tmp_path, "qwen3_moe", form)

    def hurt(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith("input_layernorm.weight")]:
            tensors[key] = torch.full_like(tensors[key], float("nan"))

    with pytest.raises(ConfigError, match=r"logits are no numbers: its weights or its config"):
        serve(edited(folder, hurt))


@pytest.mark.parametrize(("layers", "block"), [("fp8 in blocks", 128), ("awq", 64)])
def test_ranks_that_would_cut_a_block_are_refused_by_layer(layers: str, block: int, tmp_path: Path) -> None:
    publish_linears(tmp_path, layers)
    group = TensorGroup(SimpleNamespace(group_name="ranks"), 0, 2)
    reason = rf"layers\.0\.mlp\.down_proj: 96 inputs from 0 on cut a group of {block}, .*; choose another"
    with pytest.raises(ConfigError, match=reason):
        cut_causal_model(load_model(tmp_path, torch.float32), group)


def test_formats_that_differ_from_layer_to_layer_are_each_read_as_theirs(tmp_path: Path) -> None:
    meant = publish_linears(tmp_path, "compressed-tensors fp8")
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in [layer for layer in meant if layer.endswith("k_proj")]:
        del tensors[f"{layer}.weight_scale"]
        parts, meant[layer] = pack_quantized(*tensors.pop(f"{layer}.weight").shape)
        tensors |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    small = FORMATS["compressed-tensors int4"][1]["config_groups"]["group_0"]
    small = small | {"targets": [r"re:.*\.k_proj$"], "format": "pack-quantized"}

    def edit(config: dict[str, Any]) -> None:
        groups = config["quantization_config"]["config_groups"]
        config["quantization_config"]["config_groups"] = {"small": small, **groups}

    layers = dict(load_model(changed(tmp_path, edit), torch.float32).named_modules())
    for layer, weight in meant.items():
        found = layers[layer].quantized.dequantized()
        torch.testing.assert_close(found, weight.float(), rtol=1e-5, atol=1e-6)
