"""Layers with weights of few bits compute what their weights say, on a CPU, cut and stacked."""

import copy
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from base.errors import ConfigError
from engine.integer_product import IntegerLinear
from engine.kernels.cpu_product import FLUSHED, LARGEST, MOST_THREADS
from engine.quantized_linear import (
    QuantizedLinear,
    RoundedLinear,
    quantize_linears,
    rounded_rows,
    use_cpu_products,
)
from engine.quantized_weight import QuantizedWeight, WeightFormat, quantized
from engine.shared_product import Slice
from engine.tensor_parallel import TensorGroup, cut_model
from tests.engine.test_families import LATENTS, random_model
from tests.engine.test_gpu_model import make_family


def plain_layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(256, 96, bias=bias)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_an_integer_product_errs_by_its_weight_alone(num_rows: int, bias: bool) -> None:
    plain = plain_layer(bias)
    weight = quantized(plain.weight.detach(), WeightFormat.INT8)
    rows = torch.randn(1, num_rows, 256)
    with torch.inference_mode():
        expected = nn.functional.linear(rows, weight.dequantized(), plain.bias)
        output = IntegerLinear(weight, plain.bias)(rows)
    assert (output - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_rows_product_does_not_depend_on_the_rows_beside_it(threads: int, monkeypatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    layer = IntegerLinear(quantized(plain_layer().weight.detach(), WeightFormat.INT8), None)
    rows = torch.randn(33, 256)
    with torch.inference_mode():
        alone = torch.cat([layer(row[None]) for row in rows])
        for count in (2, 3, 4, 7, 8, 15, 33):
            assert torch.equal(layer(rows[:count]), alone[:count])


@pytest.mark.skipif(MOST_THREADS < 2, reason="numba has one thread")
def test_a_product_that_may_use_one_thread_starts_no_others(monkeypatch) -> None:
    layer = IntegerLinear(quantized(plain_layer().weight.detach(), WeightFormat.INT8), None)

    def started() -> set[str]:
        before = set(os.listdir("/proc/self/task"))
        layer(torch.ones(1, 256))
        return set(os.listdir("/proc/self/task")) - before

    counts = []
    for threads in (1, 2):
        monkeypatch.setattr("torch.get_num_threads", lambda: threads)  # noqa: B023 called before the next
        with ThreadPoolExecutor(1) as pool:  # OpenMP starts threads for each that calls it
            counts.append(len(pool.submit(started).result()))
    assert counts == [0, 1]


@pytest.mark.parametrize("num_inputs", [1, 15, 17, 100, 16 * FLUSHED + 3])
def test_any_number_of_inputs_of_the_largest_size_is_summed(num_inputs: int) -> None:
    signs = torch.arange(num_inputs) % 2 * 2.0 - 1
    weight = torch.stack([signs, -signs, torch.ones_like(signs)])
    layer = IntegerLinear(quantized(weight, WeightFormat.INT8), None)
    output = layer(torch.stack([signs, torch.ones_like(signs)]))
    expected = torch.tensor([[num_inputs, -num_inputs, signs.sum()], [signs.sum(), -signs.sum(), num_inputs]])
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=num_inputs / LARGEST)


def test_a_row_that_is_no_number_gives_none_and_leaves_the_others_as_they_are() -> None:
    layer = IntegerLinear(quantized(plain_layer().weight.detach(), WeightFormat.INT8), None)
    rows = torch.randn(3, 256)
    expected = layer(rows)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        spoilt = rows.clone()
        spoilt[1, 7] = wrong
        output = layer(spoilt)
        assert not output[1].isfinite().any()
        assert torch.equal(output[::2], expected[::2])


def test_rows_of_sixteen_bits_and_rows_apart_in_memory_are_multiplied() -> None:
    layer = IntegerLinear(quantized(plain_layer().weight.detach(), WeightFormat.INT8), plain_layer().bias)
    rows = torch.randn(256, 5).t()
    assert torch.equal(layer(rows), layer(rows.contiguous()))
    halves = rows.bfloat16()
    assert layer(halves).dtype is torch.bfloat16
    assert torch.equal(layer(halves), layer(halves.float()).bfloat16())


def test_rows_of_zeros_and_of_any_size_are_multiplied() -> None:
    layer = IntegerLinear(quantized(plain_layer().weight.detach(), WeightFormat.INT8), None)
    rows = torch.stack([torch.zeros(256), torch.full((256,), 1e20), torch.full((256,), -1e-20)])
    output = layer(rows)
    assert not output[0].any()
    torch.testing.assert_close(output[1] / 1e20, output[2] / -1e-20)


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_no_rows_give_none(weight_format: WeightFormat) -> None:
    model = nn.ModuleDict({"layer": QuantizedLinear(quantized(torch.ones(96, 256), weight_format), None)})
    assert model["layer"](torch.empty(1, 0, 256)).shape == (1, 0, 96)
    use_cpu_products(model)
    assert model["layer"](torch.empty(1, 0, 256)).shape == (1, 0, 96)


def test_four_bits_are_widened_to_eight() -> None:
    weight = quantized(plain_layer().weight.detach(), WeightFormat.INT4)
    rows = torch.randn(3, 256)
    expected = rows @ weight.dequantized().t()
    assert (IntegerLinear(weight, None)(rows) - expected).norm() < 0.02 * expected.norm()


def test_rows_are_rounded_to_8_bit_floats_by_their_own_scale() -> None:
    rows = torch.tensor([[448.0, 1.0, 17.0], [4480.0, 10.0, 170.0]])
    assert rounded_rows(rows, 3).tolist() == [[448.0, 1.0, 16.0], [4480.0, 10.0, 160.0]]


def test_rows_are_rounded_by_the_groups_of_the_weight() -> None:
    rows = torch.cat([torch.full((1, 128), 1000.0), torch.full((1, 64), 0.001)], 1)
    torch.testing.assert_close(rounded_rows(rows, 128), rows)


def test_a_layer_of_8_bit_floats_rounds_rows_as_a_gpu_does() -> None:
    weight = quantized(plain_layer().weight.detach(), WeightFormat.FP8)
    rows = torch.randn(3, 256)
    expected = rounded_rows(rows, 256) @ weight.dequantized().t()
    torch.testing.assert_close(RoundedLinear(weight, None)(rows), expected)
    torch.testing.assert_close(QuantizedLinear(weight, None)(rows), expected)


# Untrained weights make much of little.
@pytest.mark.parametrize(
    ("weight_format", "most"), [(WeightFormat.FP8, 0.5), (WeightFormat.INT8, 0.1), (WeightFormat.INT4, 0.9)]
)
def test_a_model_keeps_its_form_and_says_nearly_the_same(weight_format: WeightFormat, most: float) -> None:
    model = make_family("llama")
    token_ids = torch.arange(20)[None]
    with torch.inference_mode():
        expected = model(token_ids).logits
        quantize_linears(model, weight_format, model.get_output_embeddings())
        written_out = model(token_ids).logits
        use_cpu_products(model)
        output = model(token_ids).logits
    assert 0 < (output - expected).norm() < most * expected.norm()
    assert (output - written_out).norm() < most / 2 * expected.norm()
    assert isinstance(model.model.layers[0].self_attn.q_proj, Slice)


def test_an_output_head_has_eight_bits_at_least() -> None:
    model = make_family("llama")
    head = model.get_output_embeddings()
    quantize_linears(model, WeightFormat.INT4, head)
    assert model.get_output_embeddings().quantized.format is WeightFormat.INT8


@pytest.mark.parametrize(
    ("family", "weight_format", "reason"),
    [
        ("gpt_oss", WeightFormat.FP8, "experts, with biases or a gate.*quantization: none"),
        ("gpt_oss", WeightFormat.INT4, "experts, with biases or a gate.*quantization: none"),
    ],
)
def test_experts_of_other_kinds_are_refused_by_name(family, weight_format, reason) -> None:
    with pytest.raises(ConfigError, match=reason):
        quantize_linears(make_family(family), weight_format, None)


def test_experts_that_a_family_computes_by_itself_are_refused_by_name() -> None:
    sizes = {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "n_routed_experts": 4, "moe_topk": 2}
    model = random_model("longcat_flash", **LATENTS | sizes | {"q_lora_rank": 32, "zero_expert_num": 0})
    with pytest.raises(ConfigError, match=r"experts, with biases or a gate.*quantization: none"):
        quantize_linears(model, WeightFormat.INT8, None)


def test_shared_products_follow_their_input() -> None:
    weight = quantized(plain_layer().weight.detach(), WeightFormat.INT8)
    model = nn.ModuleDict({name: QuantizedLinear(weight, None) for name in ("gate_proj", "up_proj")})
    alone = copy.deepcopy(model["gate_proj"])
    use_cpu_products(model)
    first, second = torch.randn(2, 256), torch.randn(2, 256)
    for rows in (first, second, first):
        torch.testing.assert_close(model["gate_proj"](rows), alone(rows), rtol=1e-3, atol=1e-3)
    assert torch.equal(model["up_proj"](first), model["gate_proj"](first))


@pytest.mark.parametrize("weight_format", [WeightFormat.FP8, WeightFormat.INT8])
def test_ranks_have_shares_of_the_very_levels_of_the_whole(weight_format: WeightFormat) -> None:
    whole = make_family("llama")
    quantize_linears(whole, weight_format, None)
    ranks = [copy.deepcopy(whole) for _ in range(2)]
    config = whole.config
    heads = (config.num_attention_heads, config.num_key_value_heads)
    for rank, model in enumerate(ranks):
        # No collective runs, so the group is its name alone.
        group = TensorGroup(SimpleNamespace(group_name="two"), rank, 2)
        cut_model(model.model, config.base_model_tp_plan, heads, group)
    layer = whole.model.layers[0]
    parts = [model.model.layers[0] for model in ranks]
    columns = [part.mlp.up_proj.quantized.dequantized() for part in parts]
    assert torch.equal(torch.cat(columns), layer.mlp.up_proj.quantized.dequantized())
    rows = [part.mlp.down_proj.linear.quantized.dequantized() for part in parts]
    assert torch.equal(torch.cat(rows, 1), layer.mlp.down_proj.quantized.dequantized())


def test_levels_of_any_groups_are_served() -> None:
    weight = QuantizedWeight(
        WeightFormat.INT8, torch.randint(-127, 127, (96, 256), dtype=torch.int8), torch.rand(96, 2) + 0.1, 128
    )
    rows = torch.randn(3, 256)
    model = nn.ModuleDict({"layer": QuantizedLinear(weight, None)})
    use_cpu_products(model)
    expected = rows @ weight.dequantized().t()
    assert (model["layer"](rows) - expected).norm() < 0.02 * expected.norm()
