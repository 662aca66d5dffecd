"""Layers of few bits on a GPU: fused, compiled once, and by the kernel or cuBLAS."""

import copy

import pytest
import torch

from engine.compiled import compile_layers
from engine.fused_projections import QuantizedProduct, use_products
from engine.kernels.nibble_product import MAX_ROWS
from engine.quantized_linear import quantize_linears
from engine.quantized_weight import WeightFormat
from engine.shared_product import Slice
from tests.engine.kernels.paged import DEVICE
from tests.engine.test_gpu_model import make_family


@pytest.mark.parametrize("family", ["llama", "phi"])  # phi has biases
@pytest.mark.parametrize("weight_format", WeightFormat)
def test_a_fused_model_says_what_its_weights_written_out_say(
    family: str, weight_format: WeightFormat
) -> None:
    model = make_family(family).to(DEVICE)
    quantize_linears(model, weight_format, model.get_output_embeddings())
    for module in model.modules():
        module.rounds_rows = False  # as the kernel for few rows
    fused = copy.deepcopy(model)
    use_products(fused)
    token_ids = torch.arange(7, device=DEVICE)[None]
    with torch.no_grad():
        torch.testing.assert_close(fused(token_ids).logits, model(token_ids).logits, rtol=1e-3, atol=1e-3)
    query = fused.model.layers[0].self_attn.q_proj
    assert isinstance(query, Slice)
    assert isinstance(query.product, QuantizedProduct)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # a GPU's: products are of float32 here
@pytest.mark.parametrize("weight_format", WeightFormat)
def test_a_compiled_layer_multiplies_once_for_each_input(weight_format: WeightFormat, monkeypatch) -> None:
    model = make_family("llama").to(DEVICE)
    quantize_linears(model, weight_format, model.get_output_embeddings())
    use_products(model)
    expected = copy.deepcopy(model)
    token_ids = torch.arange(7, device=DEVICE)[None]
    compile_layers(model.model.layers)
    with torch.no_grad():
        torch.testing.assert_close(model(token_ids).logits, expected(token_ids).logits, rtol=1e-3, atol=1e-3)


def test_many_rows_are_multiplied_by_the_weight_written_out() -> None:
    model = make_family("llama").to(DEVICE)
    quantize_linears(model, WeightFormat.INT4, None)
    fused = copy.deepcopy(model)
    use_products(fused)
    token_ids = (torch.arange(2 * MAX_ROWS, device=DEVICE) % 60).view(8, -1)
    assert token_ids.numel() > MAX_ROWS
    with torch.no_grad():
        torch.testing.assert_close(fused(token_ids).logits, model(token_ids).logits, rtol=1e-3, atol=1e-3)
