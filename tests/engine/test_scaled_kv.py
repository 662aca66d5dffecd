"""KV of 8 bits on a CPU: what it costs is small, said at start, and the same however a prompt is computed."""

from dataclasses import replace

import pytest
import torch

from base.errors import ConfigError
from engine.batch import build_batch
from engine.model import PagedModel
from engine.paged_cache import PagedCache
from engine.scaled_kv import scaled_layout
from engine.self_check import eager_logits, require_faithful
from engine.step import StepEntry, StepPlan
from tests.engine.builders import make_sequence
from tests.engine.test_families import FAMILIES, random_model

TOKENS = [(31 * index + 7) % 211 for index in range(70)]


def blocks_of(paged: PagedModel, ends: list[int]) -> torch.Tensor:
    """Return the bytes of a prompt's blocks, computed in chunks that end there."""
    cache = PagedCache(scaled_layout(replace(paged.shape, block_size=16)), 6, paged.device)
    sequence, start = make_sequence("a", TOKENS), 0
    for end in ends:
        entry = StepEntry(sequence, start, end - start, (5, 0, 3, 1, 4), samples=True)
        plan = StepPlan((entry,), num_single=int(end - start == 1))
        paged.forward(build_batch(plan, 16, paged.device), cache)
        start = end
    return cache.tensor[[5, 0, 3, 1, 4]]


def test_a_block_has_the_same_first_layer_whatever_chunks_wrote_it() -> None:
    """Deeper layers see the others' rounding of sums, so their bytes may differ in a last bit."""
    paged = PagedModel(random_model("llama"))
    whole = blocks_of(paged, [70])
    layer = scaled_layout(replace(paged.shape, block_size=16)).layer_bytes
    for ends in ([1, 2, 70], [16, 33, 69, 70], list(range(1, 71))):
        same = (blocks_of(paged, ends)[:, :layer] == whole[:, :layer]).float().mean()
        assert same > 0.999


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_the_error_is_small_and_returned(family: str) -> None:
    paged = PagedModel(random_model(family, **FAMILIES[family]))
    layout = replace(paged.shape, block_size=16)
    expected = eager_logits(paged)
    assert require_faithful(paged, layout, expected) < 1e-4
    assert 1e-4 < require_faithful(paged, scaled_layout(layout), expected) < 0.3


def test_half_the_bytes_and_a_little() -> None:
    layout = replace(PagedModel(random_model("llama")).shape, block_size=64)
    wide = replace(layout, fields=tuple(replace(field, dtype="bfloat16") for field in layout.fields))
    assert scaled_layout(wide).block_bytes / wide.block_bytes == pytest.approx(0.5 + 16 / (2 * 2 * 64 * 16))


def test_latents_have_no_8_bit_form() -> None:
    paged = PagedModel(random_model("deepseek_v3", **FAMILIES["deepseek_v3"]))
    with pytest.raises(ConfigError, match="kv_dtype: fp8 is for K and V of heads"):
        scaled_layout(paged.shape)
