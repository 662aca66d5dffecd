"""Weights in few bits: what is kept of them, cut among ranks, and put together again."""

import pytest
import torch

from engine.quantized_linear import QuantizedLinear, quantized_are_alike
from engine.quantized_weight import (
    SMALL,
    QuantizedWeight,
    WeightFormat,
    four_bit_group,
    packed,
    quantized,
    stacked,
    unpacked,
)

WEIGHT = torch.randn(48, 256, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("weight_format", "least", "most"),
    [(WeightFormat.FP8, 0.01, 0.03), (WeightFormat.INT8, 0.002, 0.01), (WeightFormat.INT4, 0.05, 0.11)],
)
def test_the_error_of_a_format_is_that_of_its_bits(weight_format, least: float, most: float) -> None:
    kept = quantized(WEIGHT, weight_format)
    error = (kept.dequantized() - WEIGHT).norm() / WEIGHT.norm()
    assert least < error < most


def test_levels_of_four_bits_come_out_as_they_went_in() -> None:
    levels = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)
    assert packed(levels).shape == (3, 16)
    assert torch.equal(unpacked(packed(levels)), levels)


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_a_weight_of_levels_comes_out_as_it_went_in(weight_format: WeightFormat) -> None:
    once = quantized(WEIGHT, weight_format).dequantized()
    torch.testing.assert_close(quantized(once, weight_format).dequantized(), once, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_shares_of_ranks_are_the_whole(weight_format: WeightFormat) -> None:
    whole = quantized(WEIGHT, weight_format)
    by_outputs = [whole.outputs(first, 24).dequantized() for first in (0, 24)]
    assert torch.equal(torch.cat(by_outputs), whole.dequantized())
    by_inputs = [whole.inputs(first, 128).dequantized() for first in (0, 128)]
    assert torch.equal(torch.cat(by_inputs, 1), whole.dequantized())


def test_a_share_that_cuts_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="group of 32"):
        quantized(WEIGHT, WeightFormat.INT4).inputs(16, 64)


def test_a_share_that_cuts_a_byte_is_refused() -> None:
    whole = quantized(WEIGHT[:, :6], WeightFormat.INT4)
    for first in (0, 3):
        with pytest.raises(ValueError, match=f"3 inputs from {first} on cut a byte"):
            whole.inputs(first, 3)
    assert torch.equal(whole.inputs(2, 4).dequantized(), whole.dequantized()[:, 2:])


def test_layers_of_one_input_are_put_together() -> None:
    parts = [quantized(part, WeightFormat.INT4) for part in WEIGHT.split(16)]
    layers = [QuantizedLinear(part, None) for part in parts]
    assert quantized_are_alike(layers)
    assert torch.equal(stacked(parts).dequantized(), quantized(WEIGHT, WeightFormat.INT4).dequantized())
    assert not quantized_are_alike([layers[0], QuantizedLinear(quantized(WEIGHT, WeightFormat.INT8), None)])


def test_a_row_of_zeros_stays_one() -> None:
    for weight_format in WeightFormat:
        assert not quantized(torch.zeros(2, 128), weight_format).dequantized().any()


def test_blocks_at_the_end_may_be_smaller() -> None:
    levels = torch.ones(2, 320, dtype=torch.int8)
    weight = QuantizedWeight(WeightFormat.INT8, levels, torch.tensor([[1.0, 2.0, 3.0]] * 2), 128)
    assert weight.dequantized()[0].tolist() == [1.0] * 128 + [2.0] * 128 + [3.0] * 64


def test_small_weights_of_four_bits_have_a_scale_for_fewer_inputs() -> None:
    assert four_bit_group(2048, 640) == 32
    assert four_bit_group(2048, 48) == 48
    assert [four_bit_group(2**15, inputs) for inputs in (4096, 576, 672)] == [128, 64, 32]
    small, large = torch.randn(16, 256), torch.randn(16, 256).repeat(SMALL // (16 * 256) + 1, 1)
    assert quantized(small, WeightFormat.INT4).scales.shape[1] == 8
    assert quantized(large, WeightFormat.INT4).scales.shape[1] == 2


def test_four_bits_of_an_odd_number_of_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        quantized(torch.ones(2, 5), WeightFormat.INT4)
