"""A model that is rounded for a text keeps its form, and says more nearly what it said."""

import copy

import pytest
import torch
from torch import nn

from engine.calibration import quantize_for_text
from engine.quantized_linear import QuantizedLinear, quantize_linears
from engine.quantized_weight import WeightFormat
from tests.engine.test_gpu_model import make_family

TEXT = [(index * index * 7 + 3) % 199 for index in range(2400)]
LATER = torch.tensor([[(index * index * 7 + 3) % 199 for index in range(2400, 2500)]])


def off_by(model: nn.Module, expected: torch.Tensor) -> float:
    with torch.inference_mode():
        return float((model(LATER).logits - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_model_that_has_read_says_more_nearly_what_it_said(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.quantized_weight.SMALL", 0)  # scales as weights of models that are served
    model = make_family(family)
    with torch.inference_mode():
        expected = model(LATER).logits
    nearest, fitted = copy.deepcopy(model), copy.deepcopy(model)
    quantize_linears(nearest, WeightFormat.INT4, nearest.get_output_embeddings())
    quantize_for_text(fitted, WeightFormat.INT4, fitted.get_output_embeddings(), TEXT)
    assert not [name for name, module in fitted.named_modules() if type(module) is nn.Linear]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in fitted.modules())
    assert 0 < off_by(fitted, expected) < 0.9 * off_by(nearest, expected)


def test_without_a_text_levels_are_the_nearest() -> None:
    model = make_family("llama")
    nearest = copy.deepcopy(model)
    quantize_linears(nearest, WeightFormat.INT4, nearest.get_output_embeddings())
    quantize_for_text(model, WeightFormat.INT4, model.get_output_embeddings(), [])
    for ours, theirs in zip(model.modules(), nearest.modules(), strict=True):
        if isinstance(ours, QuantizedLinear):
            assert torch.equal(ours.quantized.dequantized(), theirs.quantized.dequantized())
