"""Products of a few rows are products."""

import pytest
import torch

from engine.kernels.shared_sums import part_counters
from engine.kernels.streamed_product import MAX_THIN_ROWS, thin_product
from tests.engine.definitions import thin_product_definition
from tests.engine.kernels.paged import DEVICE, MULTIPLIED, relative_error, tolerance

COUNTERS = part_counters(torch.device(DEVICE))


@pytest.mark.parametrize("dtype", MULTIPLIED)
@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features"),
    [
        (1, 8, 512),
        (1, 1000, 48),
        (1, 1031, 1100),
        (2, 64, 128),
        (9, 100, 200),
        (MAX_THIN_ROWS, 130, 300),
        (5, 8200, 32),
        (3, 70, 1000),
        (0, 8, 8),
    ],
)
def test_kernel_and_definition_agree(
    num_rows: int, out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, in_features, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(out_features, in_features, generator=generator).to(DEVICE, dtype)
    output = thin_product(rows, weight, COUNTERS)
    assert output.shape == (num_rows, out_features)
    assert relative_error(output, thin_product_definition(rows, weight)) < tolerance(dtype)


@pytest.mark.parametrize(
    ("rows", "weight", "message"),
    [
        (torch.zeros(MAX_THIN_ROWS + 1, 8), torch.zeros(8, 8), "do not fit"),
        (torch.zeros(1, 8), torch.zeros(8, 9), "do not fit"),
        (torch.zeros(1, 8), torch.zeros(8, 8).half(), "weight"),
        (torch.zeros(8, 2).t(), torch.zeros(8, 8), "contiguous"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(rows, weight, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        thin_product(rows.to(DEVICE), weight.to(DEVICE), COUNTERS)
