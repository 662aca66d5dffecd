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
        torch.testing.assert_close(PackedLinear(plain.weight, plain.bias)(rows), plain(rows))


def test_large_layers_are_packed_and_small_ones_left() -> None:
    model = nn.ModuleDict({"large": nn.Linear(640, 512), "small": nn.Linear(8, 8)})
    pack_linears(model)
    assert isinstance(model["large"], PackedLinear)
    assert type(model["small"]) is nn.Linear


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_one_input_are_one_product_and_give_what_they_gave(num_rows: int, bias: bool) -> None:
    sizes = {"q_proj": 512, "k_proj": 64, "v_proj": 64}
    model = nn.ModuleDict({name: nn.Linear(640, size, bias=bias) for name, size in sizes.items()})
    rows = torch.randn(1, num_rows, 640)
    with torch.inference_mode():
        expected = [layer(rows) for layer in model.values()]
        pack_linears(model)
        found = [layer(rows) for layer in model.values()]
    assert sum(isinstance(each, PackedLinear) for each in model.modules()) == 1
    for wanted, given in zip(expected, found, strict=True):
        torch.testing.assert_close(given, wanted)
