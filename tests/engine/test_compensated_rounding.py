"""Weights that are rounded for their inputs change products less than the nearest levels do."""

import pytest
import torch

from engine.compensated_rounding import compensated
from engine.quantized_weight import QuantizedWeight, WeightFormat, quantized

GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(48, 256, generator=GENERATOR)
INPUTS = torch.randn(2000, 64, generator=GENERATOR) @ torch.randn(64, 256, generator=GENERATOR)
"""Inputs that vary together."""
INPUTS += 0.1 * torch.randn(2000, 256, generator=GENERATOR)


def error_of(weight: QuantizedWeight) -> float:
    exact = INPUTS @ WEIGHT.t()
    return float((INPUTS @ weight.dequantized().t() - exact).norm() / exact.norm())


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_products_err_less_than_those_of_the_nearest_levels(weight_format: WeightFormat) -> None:
    fitted = compensated(WEIGHT, weight_format, INPUTS.t() @ INPUTS)
    nearest = quantized(WEIGHT, weight_format)
    assert error_of(fitted) < 0.6 * error_of(nearest)
    assert fitted.group == nearest.group
    assert fitted.levels.shape == nearest.levels.shape


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_inputs_that_do_not_vary_together_give_the_nearest_levels(weight_format: WeightFormat) -> None:
    fitted, nearest = compensated(WEIGHT, weight_format, torch.eye(256)), quantized(WEIGHT, weight_format)
    assert torch.equal(fitted.levels.float(), nearest.levels.float())
    torch.testing.assert_close(fitted.scales, nearest.scales, rtol=1e-3, atol=0)


@pytest.mark.parametrize("moments", [torch.zeros(256, 256), torch.full((256, 256), float("nan"))])
def test_moments_that_say_nothing_give_the_nearest_levels(moments: torch.Tensor) -> None:
    fitted = compensated(WEIGHT, WeightFormat.INT4, moments)
    assert torch.equal(fitted.dequantized(), quantized(WEIGHT, WeightFormat.INT4).dequantized())


def test_inputs_that_never_come_are_rounded_too() -> None:
    inputs = INPUTS * (torch.arange(256) % 3 > 0)
    fitted = compensated(WEIGHT, WeightFormat.INT4, inputs.t() @ inputs).dequantized()
    assert torch.isfinite(fitted).all()
    assert (fitted - WEIGHT).norm() < 0.5 * WEIGHT.norm()
