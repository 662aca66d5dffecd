"""Products by weights of four bits are products by the weights written out."""

from dataclasses import replace

import pytest
import torch

from engine.kernels.nibble_product import MAX_ROWS, SUMMED, nibble_product, written_out_nibbles
from engine.kernels.shared_sums import Tiles, part_counters
from engine.nibbles import in_nibbles
from engine.quantized_weight import QuantizedWeight, WeightFormat, quantized
from tests.engine.kernels.paged import DEVICE, relative_error, tolerance

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
COUNTERS = part_counters(torch.device(DEVICE))


def made(out_features: int, in_features: int) -> QuantizedWeight:
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(1))
    return quantized(weight.to(DEVICE), WeightFormat.INT4)


@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features"),
    [
        (1, 8, 256),
        (1, 35, 4224),
        (2, 33, 320),
        (1, 16, 30),
        (2, 20, 96),
        (3, 70, 320),
        (5, 17, 4096),
        (9, 40, 128),
        (SUMMED + 1, 33, 320),
        (MAX_ROWS, 33, 96),
        (0, 8, 64),
        (3, 16, 30),
    ],
)
def test_a_product_is_that_of_the_weight_written_out(
    num_rows: int, out_features: int, in_features: int
) -> None:
    weight = made(out_features, in_features)
    rows = torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(0)).to(DEVICE, DTYPE)
    for tiles in (None, Tiles(16, 4, 4, 3)):
        output = nibble_product(rows, in_nibbles(weight), COUNTERS, tiles)
        assert output.shape == (num_rows, out_features)
        assert not COUNTERS.any()
        assert relative_error(output, rows.float() @ weight.dequantized().t()) < tolerance(DTYPE)


@pytest.mark.parametrize(("out_features", "in_features"), [(8, 256), (70, 320), (33, 96), (16, 30)])
def test_a_weight_is_written_out(out_features: int, in_features: int) -> None:
    weight = made(out_features, in_features)
    torch.testing.assert_close(written_out_nibbles(in_nibbles(weight), torch.float32), weight.dequantized())


def test_levels_without_zero_points_and_groups_of_several_units_are_read_as_such() -> None:
    weight = made(24, 512)
    coarse = replace(weight, scales=weight.scales[:, ::2].contiguous(), group=256, zeros=None)
    rows = torch.randn(3, 512, device=DEVICE, dtype=DTYPE)
    output = nibble_product(rows, in_nibbles(coarse), COUNTERS)
    assert relative_error(output, rows.float() @ coarse.dequantized().t()) < tolerance(DTYPE)


def test_what_has_no_place_in_nibbles_is_refused_by_name() -> None:
    weight = made(8, 256)
    with pytest.raises(ValueError, match="groups of 48"):
        in_nibbles(replace(weight, group=48))
    with pytest.raises(ValueError, match="whole numbers"):
        in_nibbles(replace(weight, zeros=weight.scales))
    with pytest.raises(ValueError, match="rows must be"):
        nibble_product(torch.zeros(MAX_ROWS + 1, 256, device=DEVICE), in_nibbles(weight), COUNTERS)
