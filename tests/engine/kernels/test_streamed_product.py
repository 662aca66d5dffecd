"""A product of rows and a weight of 8-bit floats is that of the numbers that they stand for."""

import pytest
import torch

from engine.fused_projections import product, quantized_product
from engine.kernels.round_rows import round_rows
from engine.kernels.shared_sums import NARROW, part_counters
from engine.kernels.streamed_product import MAX_ROWS, is_rounded_faster, rounded_product
from engine.quantized_weight import QuantizedWeight, WeightFormat, quantized
from tests.engine.kernels.paged import DEVICE, MULTIPLIED, relative_error, tolerance

COUNTERS = part_counters(torch.device(DEVICE))


def made(num_rows: int, out_features: int, in_features: int) -> tuple[torch.Tensor, QuantizedWeight]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out_features, in_features, generator=generator).to(DEVICE)
    return torch.randn(num_rows, in_features, generator=generator).to(DEVICE), quantized(
        weight, WeightFormat.FP8
    )


def multiplied(rows: torch.Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    return rounded_product(*round_rows(rows), weight.levels, weight.scales, COUNTERS, dtype)


@pytest.mark.parametrize("dtype", MULTIPLIED)
@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features"),
    [(17, 70, 300), (1, 8, 16), (64, 130, 1040), (MAX_ROWS, 65, 128), (20, NARROW + 8, 32), (0, 8, 64)],
)
def test_a_product_is_that_of_the_numbers_that_the_levels_stand_for(
    num_rows: int, out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    rows, weight = made(num_rows, out_features, in_features)
    levels, scales = round_rows(rows)
    output = multiplied(rows, weight, dtype)
    assert output.shape == (num_rows, out_features)
    assert output.dtype == dtype
    expected = (levels.float() * scales) @ weight.dequantized().t()
    # Tensor cores keep 14 bits of a sum of products of 8-bit floats.
    assert relative_error(output, expected.to(dtype)) < max(tolerance(dtype), 2e-3)
    assert not COUNTERS.any()


def test_a_product_is_the_same_each_time_and_whatever_the_rows_beside() -> None:
    rows, weight = made(40, 100, 2048)
    output = multiplied(rows, weight, torch.float32)
    assert torch.equal(output, multiplied(rows, weight, torch.float32))
    assert torch.equal(output[:33], multiplied(rows[:33], weight, torch.float32))


def test_a_row_that_is_not_a_number_leaves_the_others_as_they_are() -> None:
    rows, weight = made(20, 40, 512)
    levels, scales = round_rows(rows)
    sides = scales, weight.levels, weight.scales, COUNTERS, torch.float32
    output = rounded_product(levels, *sides)
    levels.view(torch.uint8)[3, 7] = 0x7F  # float8_e4m3fn's one value that is no number
    damaged = rounded_product(levels, *sides)
    assert not torch.equal(damaged[3], output[3])
    others = [row for row in range(20) if row != 3]
    assert torch.equal(damaged[others], output[others])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 16, 32, 33])
@pytest.mark.parametrize("out_features", [1000, 4096, NARROW + 64, 100_032])
def test_a_product_of_floats_gives_what_cublas_gives(num_rows: int, out_features: int) -> None:
    rows = torch.randn(num_rows, 2048, device=DEVICE).bfloat16()
    weight = torch.randn(out_features, 2048, device=DEVICE).bfloat16()
    expected = torch.mm(rows, weight.t())
    assert relative_error(product(rows, weight, COUNTERS), expected) < 1e-2
    assert not COUNTERS.any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [17, 64, 65, 128, 129])
@pytest.mark.parametrize("out_features", [4096, NARROW + 64])
def test_the_faster_kernel_gives_what_the_other_gives(num_rows: int, out_features: int) -> None:
    rows, weight = made(num_rows, out_features, 4096)
    rows = rows.bfloat16()
    levels, scales = round_rows(rows)
    limit = MAX_ROWS if out_features <= NARROW else 64
    assert is_rounded_faster(levels, weight.levels) == (num_rows <= limit)
    expected = torch._scaled_mm(
        levels, weight.levels.t(), scales, weight.scales.t(), out_dtype=rows.dtype, use_fast_accum=True
    )
    output = quantized_product(rows, weight.levels, weight.scales, None, None, weight.group, COUNTERS)
    assert relative_error(output, expected) < 1e-2


@pytest.mark.parametrize(
    ("rows", "levels", "outputs", "message"),
    [
        ((MAX_ROWS + 1, 64), (8, 64), 8, "at most"),
        ((1, 64), (8, 32), 8, "do not fit"),
        ((1, 64), (8, 64), 7, "one scale"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(
    rows: tuple[int, int], levels: tuple[int, int], outputs: int, message: str
) -> None:
    left, right = (torch.zeros(size, device=DEVICE).to(torch.float8_e4m3fn) for size in (rows, levels))
    steps, scales = torch.ones(rows[0], 1, device=DEVICE), torch.ones(outputs, 1, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        rounded_product(left, steps, right, scales, COUNTERS, torch.float32)


def test_numbers_of_another_dtype_are_refused_by_name() -> None:
    rows, weight = made(1, 8, 64)
    with pytest.raises(ValueError, match=r"rows are torch\.float32"):
        rounded_product(rows, rows[:, :1], weight.levels, weight.scales, COUNTERS, torch.float32)
