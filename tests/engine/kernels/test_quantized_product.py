"""Products by weights of few bits are products by the weights written out."""

import pytest
import torch

from engine.integer_product import rounded_rows
from engine.kernels.quantized_product import MAX_ROWS, few_rows_product, written_out
from engine.kernels.round_rows import round_rows
from engine.kernels.shared_sums import Tiles, part_counters
from engine.quantized_weight import QuantizedWeight, WeightFormat, quantized, widened
from tests.engine.kernels.paged import DEVICE, MULTIPLIED, relative_error, tolerance

COUNTERS = part_counters(torch.device(DEVICE))


def made(weight_format: WeightFormat, out_features: int, in_features: int) -> QuantizedWeight:
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(1))
    return widened(quantized(weight.to(DEVICE), weight_format))


def in_groups(out_features: int, in_features: int) -> QuantizedWeight:
    """Return 8-bit floats with a scale for each 128 inputs, the last group perhaps shorter."""
    one = made(WeightFormat.FP8, out_features, in_features)
    scales = torch.rand(out_features, -(-in_features // 128), device=DEVICE) + 0.5
    return QuantizedWeight(one.format, one.levels, scales * one.scales, 128)


@pytest.mark.parametrize("dtype", MULTIPLIED)
@pytest.mark.parametrize("weight_format", WeightFormat)
@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features"), [(1, 8, 256), (3, 70, 320), (MAX_ROWS, 33, 128), (0, 8, 64)]
)
def test_a_product_of_a_few_rows_is_that_of_the_weight_written_out(
    num_rows: int, out_features: int, in_features: int, weight_format: WeightFormat, dtype: torch.dtype
) -> None:
    weight = made(weight_format, out_features, in_features)
    rows = torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    output = few_rows_product(rows, weight.levels, weight.scales, weight.zeros, weight.group, COUNTERS)
    assert output.shape == (num_rows, out_features)
    expected = (rows.float() @ weight.dequantized().t()).to(dtype)
    assert relative_error(output, expected) < tolerance(dtype)


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_programs_that_share_the_inputs_leave_their_sum(parts: int, is_grouped: bool) -> None:
    weight = in_groups(70, 640) if is_grouped else made(WeightFormat.INT8, 70, 640)
    rows = torch.randn(3, 640, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    parts_of = weight.levels, weight.scales, weight.zeros, weight.group
    output = few_rows_product(rows, *parts_of, COUNTERS, Tiles(32, parts, 4, 2))
    assert relative_error(output, rows @ weight.dequantized().t()) < tolerance(torch.float32)
    assert torch.equal(output, few_rows_product(rows, *parts_of, COUNTERS, Tiles(32, parts, 4, 2)))
    assert not COUNTERS.any()


def test_zero_points_that_are_not_as_scales_are_refused_by_name() -> None:
    weight, zeros = made(WeightFormat.INT8, 40, 64), torch.zeros(1, 1, device=DEVICE)
    rows = torch.zeros(1, 64, device=DEVICE)
    with pytest.raises(ValueError, match="zeros"):
        few_rows_product(rows, weight.levels, weight.scales, zeros, weight.group, COUNTERS)
    with pytest.raises(ValueError, match="zeros"):
        written_out(weight.levels, weight.scales, zeros, weight.group, torch.float32)


@pytest.mark.parametrize("in_features", [256, 320])
def test_a_product_follows_scales_of_blocks(in_features: int) -> None:
    weight = in_groups(40, in_features)
    rows = torch.randn(5, in_features, device=DEVICE)
    output = few_rows_product(rows, weight.levels, weight.scales, None, weight.group, COUNTERS)
    assert relative_error(output, rows @ weight.dequantized().t()) < tolerance(torch.float32)


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_a_weight_is_written_out(weight_format: WeightFormat) -> None:
    weight = made(weight_format, 37, 320)
    output = written_out(weight.levels, weight.scales, weight.zeros, weight.group, torch.float32)
    torch.testing.assert_close(output, weight.dequantized())


def test_a_weight_of_blocks_is_written_out() -> None:
    weight = in_groups(20, 320)
    output = written_out(weight.levels, weight.scales, None, weight.group, torch.float32)
    torch.testing.assert_close(output, weight.dequantized())


def test_rows_are_rounded_as_defined() -> None:
    rows = torch.randn(5, 300, device=DEVICE)
    rows[2] = 0.0
    levels, scales = round_rows(rows)
    rounded = levels.float() * scales
    assert not rounded[2].any()
    # Triton's interpreter does not carry where a level rounds up to the next power of two.
    assert relative_error(rounded, rows) < (0.04 if DEVICE == "cuda" else 0.1)
    assert ((rounded - rounded_rows(rows, 300)).abs() < 1e-6).float().mean() > 0.95


@pytest.mark.parametrize(
    ("rows", "levels", "scales", "message"),
    [
        (torch.zeros(MAX_ROWS + 1, 64), torch.zeros(8, 64, dtype=torch.int8), torch.zeros(8, 1), "at most"),
        (torch.zeros(1, 64), torch.zeros(8, 32, dtype=torch.int8), torch.zeros(8, 1), "do not fit"),
        (torch.zeros(1, 64), torch.zeros(8, 64), torch.zeros(8, 1), "levels are"),
        (torch.zeros(1, 64), torch.zeros(8, 64, dtype=torch.int8), torch.zeros(8, 4), "32, 64 or 128"),
        (torch.zeros(1, 64), torch.zeros(64, 8, dtype=torch.int8).t(), torch.zeros(8, 1), "contiguous"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(rows, levels, scales, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        few_rows_product(rows.to(DEVICE), levels.to(DEVICE), scales.to(DEVICE), None, 16, COUNTERS)
