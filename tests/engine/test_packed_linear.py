"""Packed linear layers compute what plain ones compute."""

import pytest
import torch
from torch import nn

from engine.packed_linear import PackedLinear, pack_linears


@pytest.mark.parametrize("num_rows", [1, 2, 7, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_the_same(num_rows: int, bias: bool) -> None:
    plain = nn.Linear(640, 512, bias=bias)
    rows = torch.randn(1, num_rows, 640)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(plain)(rows), plain(rows))


def test_large_layers_are_packed_and_small_ones_left() -> None:
    model = nn.ModuleDict({"large": nn.Linear(640, 512), "small": nn.Linear(8, 8)})
    pack_linears(model)
    assert isinstance(model["large"], PackedLinear)
    assert type(model["small"]) is nn.Linear
