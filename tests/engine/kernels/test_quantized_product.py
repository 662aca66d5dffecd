"""Products by weights of few bits are products by the weights written out."""

from unittest.mock import patch

import pytest
import torch

from engine import fused_projections
from engine.fused_projections import QuantizedProduct
from engine.kernels import quantized_product
from engine.kernels.devices import HOPPER, capability
from engine.kernels.quantized_product import MAX_ROWS, SUMMED, levels_product, written_out
from engine.kernels.round_rows import ALIGNED, round_groups, round_rows
from engine.kernels.shared_sums import Tiles, part_counters, room_for_parts
from engine.quantized_linear import QuantizedLinear, rounded_rows
from engine.quantized_weight import QuantizedWeight, WeightFormat, block_scales, quantized, widened
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
    ("num_rows", "out_features", "in_features"),
    [(1, 8, 256), (3, 70, 320), (17, 70, 256), (130, 33, 320), (MAX_ROWS, 33, 128), (0, 8, 64)],
)
def test_a_product_is_that_of_the_weight_written_out(
    num_rows: int, out_features: int, in_features: int, weight_format: WeightFormat, dtype: torch.dtype
) -> None:
    weight = made(weight_format, out_features, in_features)
    rows = torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    output = levels_product(rows, weight.levels, weight.scales, weight.zeros, weight.group, COUNTERS)
    assert output.shape == (num_rows, out_features)
    expected = (rows.float() @ weight.dequantized().t()).to(dtype)
    assert relative_error(output, expected) < tolerance(dtype)


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("height", [0, 16])
def test_programs_that_share_the_inputs_leave_their_sum(parts: int, is_grouped: bool, height: int) -> None:
    weight = in_groups(70, 640) if is_grouped else made(WeightFormat.INT8, 70, 640)
    num_rows = 40 if height else 3
    rows = torch.randn(num_rows, 640, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    tiles = Tiles(32, parts, 4, 2, height)
    parts_of = weight.levels, weight.scales, weight.zeros, weight.group
    output = levels_product(rows, *parts_of, COUNTERS, tiles)
    assert relative_error(output, rows @ weight.dequantized().t()) < tolerance(torch.float32)
    assert torch.equal(output, levels_product(rows, *parts_of, COUNTERS, tiles))
    assert not COUNTERS.any()


def test_inputs_are_not_shared_where_tiles_of_rows_and_outputs_are_more_than_counters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantized_product, "PART_TILES", 4)
    counters = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    weight = made(WeightFormat.INT8, 70, 640)
    rows = torch.randn(40, 640, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    shared: list[int] = []

    def noted(output: torch.Tensor, parts: int) -> torch.Tensor:
        shared.append(parts)
        return room_for_parts(output, parts)

    monkeypatch.setattr(quantized_product, "room_for_parts", noted)
    for height in (64, 32):  # three tiles, and six
        tiles = Tiles(32, 2, 4, 2, height)
        levels_product(rows, weight.levels, weight.scales, weight.zeros, weight.group, counters, tiles)
    assert shared == [2, 1]


def test_zero_points_that_are_not_as_scales_are_refused_by_name() -> None:
    weight, zeros = made(WeightFormat.INT8, 40, 64), torch.zeros(1, 1, device=DEVICE)
    rows = torch.zeros(1, 64, device=DEVICE)
    with pytest.raises(ValueError, match="zeros"):
        levels_product(rows, weight.levels, weight.scales, zeros, weight.group, COUNTERS)
    with pytest.raises(ValueError, match="zeros"):
        written_out(weight.levels, weight.scales, zeros, weight.group, torch.float32)


@pytest.mark.parametrize("num_rows", [5, 20, SUMMED + 1])
@pytest.mark.parametrize("in_features", [256, 320])
def test_a_product_follows_scales_of_blocks(in_features: int, num_rows: int) -> None:
    weight = in_groups(40, in_features)
    rows = torch.randn(num_rows, in_features, device=DEVICE)
    output = levels_product(rows, weight.levels, weight.scales, None, weight.group, COUNTERS)
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
        levels_product(rows.to(DEVICE), levels.to(DEVICE), scales.to(DEVICE), None, 16, COUNTERS)


def test_every_level_of_whole_numbers_is_read_as_itself() -> None:
    levels = torch.arange(-128, 128, device=DEVICE).repeat(20, 1).to(torch.int8)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    output = levels_product(
        torch.eye(256, device=DEVICE, dtype=dtype),
        levels,
        torch.ones(20, 1, device=DEVICE),
        None,
        256,
        COUNTERS,
    )
    assert torch.equal(output.float(), levels.t().float())


@pytest.mark.parametrize(("num_rows", "width"), [(5, 256), (8, 4224), (0, 128)])
def test_groups_of_rows_are_rounded_as_defined(num_rows: int, width: int) -> None:
    rows = torch.randn(num_rows, width, device=DEVICE)
    levels, scales = round_groups(rows)
    assert levels.shape[0] % ALIGNED == 0
    assert scales.stride() == (1, levels.shape[0]) or not num_rows
    rounded = levels[:num_rows].float() * scales[:num_rows].repeat_interleave(128, 1)
    close = (rounded - rounded_rows(rows, 128)).abs() < 1e-6
    assert close.float().mean() > 0.95 or not num_rows


def test_rows_of_other_widths_have_no_groups() -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        round_groups(torch.zeros(2, 192, device=DEVICE))


def of_blocks(out_features: int, in_features: int) -> QuantizedWeight:
    one = made(WeightFormat.FP8, out_features, in_features)
    blocks = torch.rand(out_features // 128, in_features // 128, device=DEVICE) + 0.5
    return QuantizedWeight(one.format, one.levels, blocks.repeat_interleave(128, 0), 128)


def test_blocks_are_seen_where_128_outputs_share_a_scale() -> None:
    weight = of_blocks(256, 384)
    blocks = block_scales(weight)
    assert blocks is not None
    assert torch.equal(blocks.repeat_interleave(128, 0), weight.scales)
    weight.scales[3, 1] += 1
    assert block_scales(weight) is None
    assert block_scales(of_blocks(256, 384).outputs(0, 200)) is None
    assert block_scales(made(WeightFormat.FP8, 256, 384)) is None


def test_rows_of_another_dtype_than_bfloat16_are_not_multiplied_by_blocks() -> None:
    weight, rows = of_blocks(128, 256), torch.randn(20, 256, device=DEVICE)
    blocks, sides = block_scales(weight), (rows, weight.levels, weight.scales, None)
    assert blocks is not None
    with patch.object(fused_projections, "block_product", side_effect=AssertionError):
        output = fused_projections.quantized_product(*sides, blocks, weight.group, COUNTERS)
    assert relative_error(output, rows @ weight.dequantized().t()) < tolerance(torch.float32)


@pytest.mark.skipif(capability(torch.device(DEVICE)) != HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("num_rows", [17, 33, 128, 777])
@pytest.mark.parametrize("in_features", [384, 512])
def test_rows_are_multiplied_by_blocks(num_rows: int, in_features: int) -> None:
    weight = of_blocks(256, in_features)
    product = QuantizedProduct(QuantizedLinear(weight, None))
    assert product.blocks is not None
    rows = torch.randn(num_rows, in_features, device=DEVICE, dtype=torch.bfloat16)
    expected = rounded_rows(rows.float(), 128) @ weight.dequantized().t()
    assert relative_error(product(rows), expected) < tolerance(torch.bfloat16)
