"""A checkpoint that was rounded once is loaded by later starts, and says the same."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from base.config import EngineConfig
from base.errors import ConfigError
from engine import quantization
from engine.device_weights import _Visit, move_to, visiting
from engine.model import PagedModel
from engine.quantization import LOGITS, load_weights
from engine.quantized_linear import QuantizedLinear, quantize_linears
from engine.quantized_weight import WeightFormat
from tests.engine.test_gpu_model import make_family

TOKENS = torch.tensor([[(index * index * 7 + 3) % 61 for index in range(50)]])
CPU = torch.device("cpu")


def saved(folder: Path, ties: bool) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=ties,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def loaded(folder: Path, weight_format: str, cache: Path | None) -> quantization.LoadedWeights:
    config = EngineConfig(device="cpu", quantization=weight_format)
    return load_weights(config, folder, torch.float32, CPU, cache)


def logits_of(weights: quantization.LoadedWeights) -> torch.Tensor:
    with torch.inference_mode():
        return weights.module(TOKENS).logits


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("weight_format", ["fp8", "int8", "int4"])
def test_a_second_start_loads_what_the_first_rounded(
    tmp_path: Path, monkeypatch, weight_format: str, ties: bool
) -> None:
    folder = saved(tmp_path / "model", ties)
    expected = loaded(folder, weight_format, None)
    first = loaded(folder, weight_format, tmp_path / "cache" / "id")
    monkeypatch.setattr(quantization, "quantize", None)  # nobody rounds again
    second = loaded(folder, weight_format, tmp_path / "cache" / "id")
    for weights in (first, second):
        assert torch.equal(logits_of(weights), logits_of(expected))
        assert weights.source_logits is not None
        assert torch.equal(weights.source_logits, expected.source_logits)
        assert weights.format == weight_format
    error = second.stated(PagedModel(second.module)).error
    assert error == expected.stated(PagedModel(expected.module)).error > 0


def test_formats_and_models_have_folders_of_their_own(tmp_path: Path) -> None:
    one, other = saved(tmp_path / "one", ties=False), saved(tmp_path / "other", ties=True)
    for folder, weight_format in ((one, "int8"), (one, "int4"), (other, "int8")):
        loaded(folder, weight_format, tmp_path / "cache" / folder.name)
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 3


def test_of_several_starts_one_rounds(tmp_path: Path, monkeypatch) -> None:
    folder = saved(tmp_path / "model", ties=False)
    calls = []
    real = quantization.quantize

    def counted(*args: object) -> None:
        calls.append(args)
        real(*args)

    monkeypatch.setattr(quantization, "quantize", counted)
    with ThreadPoolExecutor(3) as pool:
        starts = [pool.submit(loaded, folder, "int8", tmp_path / "cache" / "id") for _ in range(3)]
        first, *others = (logits_of(start.result()) for start in starts)
    assert len(calls) == 1
    assert all(torch.equal(first, other) for other in others)


def test_without_room_a_node_serves_what_it_rounded(tmp_path: Path, monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    folder = saved(tmp_path / "model", ties=False)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.weights.save_file", full)
    weights = loaded(folder, "int8", tmp_path / "cache" / "id")
    assert torch.equal(logits_of(weights), logits_of(loaded(folder, "int8", None)))
    name = quantization.rounded_name("id", WeightFormat.INT8, torch.float32)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"{name}.lock"]
    assert "No space left" in caplog.text


@pytest.mark.parametrize("part", ["scales", "zeros", "levels"])
def test_levels_and_scales_that_do_not_fit_are_refused(tmp_path: Path, part: str) -> None:
    folder = saved(tmp_path / "model", ties=False)
    loaded(folder, "int4", tmp_path / "cache" / "id")
    [file] = (tmp_path / "cache").glob("*/model.safetensors")
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if name.endswith(f"mlp.up_proj.{part}"))
    tensors[name] = tensors[name].half() if part == "levels" else tensors[name][:1]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=f"{part} are"):
        loaded(folder, "int4", tmp_path / "cache" / "id")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", ties=False)
    (tmp_path / "cache").write_text("no folder")
    with pytest.raises(ConfigError, match=r"cache_dir: .*cache"):
        loaded(folder, "int8", tmp_path / "cache" / "id")


def test_a_folder_without_logits_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", ties=False)
    loaded(folder, "int8", tmp_path / "cache" / "id")
    (kept,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    (kept / LOGITS).unlink()
    with pytest.raises(ConfigError, match="remove the folder"):
        loaded(folder, "int8", tmp_path / "cache" / "id")


def test_a_layer_that_visits_a_device_is_home_again_as_it_was() -> None:
    model = make_family("llama")
    layer = model.base_model.layers[0]
    before = dict(layer.named_parameters())
    visit = _Visit(torch.device("meta"))
    (args, kwargs) = visit.begin(layer, (torch.ones(2),), {"mask": None, "pair": (torch.ones(1), 3)})
    assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}
    assert args[0].device.type == kwargs["pair"][0].device.type == "meta"
    assert kwargs["mask"] is None
    visit.end(layer, None, None)
    assert all(parameter is before[name] for name, parameter in layer.named_parameters())


def test_a_layer_that_is_rounded_on_its_visit_brings_its_levels_home() -> None:
    model = make_family("llama")
    with visiting(model, CPU):  # where it is already: no effect
        assert not any(module._forward_hooks for module in model.modules())
    layer = model.base_model.layers[0]
    visit = _Visit(CPU)
    visit.begin(layer, (), {})
    quantize_linears(layer, WeightFormat.INT8)
    visit.end(layer, None, None)
    assert not [each for each in layer.modules() if type(each) is nn.Linear]
    assert {
        each.quantized.levels.device for each in layer.modules() if isinstance(each, QuantizedLinear)
    } == {CPU}


def test_all_of_a_model_moves() -> None:
    model = make_family("llama")
    quantize_linears(model, WeightFormat.INT4, model.get_output_embeddings())
    move_to(model, torch.device("meta"))
    assert {each.device.type for each in (*model.parameters(), *model.buffers())} == {"meta"}
    levels = [each.quantized.levels for each in model.modules() if isinstance(each, QuantizedLinear)]
    assert {each.device.type for each in levels} == {"meta"}
