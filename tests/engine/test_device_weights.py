"""Weights move to their device once, and lie there as the products that read them want."""

import pytest
import torch
from torch import nn

from engine.device_weights import move_to
from engine.fused_projections import Product, use_products
from engine.shared_product import Slice


class Projections(nn.Module):
    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 6, bias=has_bias)
        self.k_proj = nn.Linear(8, 4, bias=has_bias)
        self.v_proj = nn.Linear(8, 4, bias=has_bias)
        self.o_proj = nn.Linear(8, 8, bias=has_bias)


@pytest.mark.parametrize("has_bias", [False, True])
def test_projections_of_one_input_are_moved_to_where_their_product_reads_them(
    has_bias: bool, monkeypatch
) -> None:
    torch.manual_seed(0)
    names = ("q_proj", "k_proj", "v_proj")
    model = nn.ModuleList(Projections(has_bias) for _ in range(2)).requires_grad_(False)
    # Host memory stands for a device's: everything seems to be somewhere else.
    monkeypatch.setattr(
        "engine.device_weights._bytes_elsewhere", lambda part, _: len(list(part.parameters()))
    )
    kept = [getattr(model[0], name).weight.clone() for name in (*names, "o_proj")]
    hidden = torch.randn(3, 8)
    wanted = [getattr(model[0], name)(hidden) for name in (*names, "o_proj")]
    move_to(model, torch.device("cpu"))
    found = [getattr(model[0], name) for name in (*names, "o_proj")]
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(found, kept, strict=True))
    assert all(torch.equal(layer(hidden), value) for layer, value in zip(found, wanted, strict=True))
    first = found[0].weight.data_ptr()
    use_products(model)
    fused = getattr(model[0], names[0])
    assert isinstance(fused, Slice)
    assert isinstance(fused.product, Product)
    assert fused.product.weight.data_ptr() == first, "it was copied"
    assert torch.equal(fused.product.weight, torch.cat(kept[:-1]))


def test_projections_that_lie_apart_are_stacked() -> None:
    model = Projections(has_bias=True).requires_grad_(False)
    wanted = torch.cat([model.q_proj.weight, model.k_proj.weight, model.v_proj.weight])
    bias = torch.cat([model.q_proj.bias, model.k_proj.bias, model.v_proj.bias])
    use_products(model)
    product = model.q_proj.product
    assert torch.equal(product.weight, wanted)
    assert torch.equal(product.bias, bias)


def test_a_projection_of_two_names_is_moved_once_and_stays_one(monkeypatch) -> None:
    monkeypatch.setattr(
        "engine.device_weights._bytes_elsewhere", lambda part, _: len(list(part.parameters()))
    )
    shared, same = Projections(has_bias=False), Projections(has_bias=False)
    shared.v_proj = shared.k_proj
    same.k_proj, same.v_proj = shared.k_proj, shared.k_proj
    model = nn.ModuleList([shared, same]).requires_grad_(False)
    weight = shared.k_proj.weight.clone()
    move_to(model, torch.device("cpu"))
    assert shared.v_proj is shared.k_proj is same.k_proj
    assert torch.equal(shared.k_proj.weight, weight)


def test_columns_that_lie_in_a_row_are_not_taken_for_one_weight() -> None:
    model = Projections(has_bias=False).requires_grad_(False)
    wanted = torch.arange(112.0).view(8, 14).t()
    layers = model.q_proj, model.k_proj, model.v_proj
    for layer, columns in zip(layers, wanted.split([6, 4, 4]), strict=True):
        layer.weight = nn.Parameter(columns)
    use_products(model)
    assert torch.equal(model.k_proj.product.weight, wanted)
