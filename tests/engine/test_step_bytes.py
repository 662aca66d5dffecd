"""Memory that steps hold of a GPU beside weights and KV, by calculation."""

import pytest
import torch
from transformers import DeepseekV2Config, LlamaConfig

from base.config import GIB, EngineConfig
from base.kv_layout import KvField, KvLayout, head_layout
from bench.engine_shapes import SHAPES
from engine.model import PagedModel
from engine.step_bytes import layer_width, step_bytes
from tests.engine.test_families import FAMILIES
from tests.engine.test_gpu_model import make_family

GPU = EngineConfig(chunk_tokens=8192, max_batch=256)
CPU_SIZED = EngineConfig(chunk_tokens=512, max_batch=256)
LLAMA = SHAPES["8b"]
LAYOUT = head_layout(32, 8, 128, 64, "bfloat16")


def bytes_of(config: EngineConfig, vocab_size: int = 128_256, context_tokens: int = 32_768) -> int:
    text = LlamaConfig(**LLAMA.to_dict() | {"vocab_size": vocab_size})
    return step_bytes(text, LAYOUT, config, torch.bfloat16, context_tokens)


def test_steps_of_8192_tokens_of_an_8b_model_hold_three_gib_and_of_512_little_more_than_one() -> None:
    assert 2.8 * GIB < bytes_of(GPU) < 3.1 * GIB
    assert 1.1 * GIB < bytes_of(CPU_SIZED) < 1.3 * GIB


def test_a_chunk_adds_no_rows_of_the_vocabulary_but_those_of_the_graphs_it_fills() -> None:
    """All positions of 8,192 tokens would be 2.1 GB of this vocabulary, in 16 bits."""
    longest, longer, shorter = (
        bytes_of(EngineConfig(chunk_tokens=tokens, max_batch=256), 256_512)
        - bytes_of(EngineConfig(chunk_tokens=tokens, max_batch=256), 128_256)
        for tokens in (65_536, 8192, 512)
    )
    assert longest == longer
    assert 0 < longer - shorter < 0.5 * GIB


def test_ranks_divide_what_a_layer_is_wide() -> None:
    whole, halves = (
        layer_width(LLAMA, LAYOUT, 1),
        layer_width(LLAMA, head_layout(32, 4, 128, 64, "bfloat16"), 2),
    )
    assert (whole, halves) == (3 * 14_336 + 4 * 4096, 3 * 7168 + 4 * 4096)


def test_experts_count_as_often_as_a_token_goes_to_them() -> None:
    text = SHAPES["qwen3-30b-a3b"]
    layout = head_layout(48, 4, 128, 64, "bfloat16")
    assert layer_width(text, layout, 1) == 8 * (3 * 768 + 2 * 2048) + 4 * 2048


@pytest.mark.parametrize("is_long", [False, True])
def test_a_long_chunk_sees_latents_as_heads(is_long: bool) -> None:
    text = SHAPES["deepseek-v2-lite"]
    assert isinstance(text, DeepseekV2Config)
    fields = tuple(
        KvField(name, width, "bfloat16", has_heads=False)
        for name, width in (("latent", text.kv_lora_rank), ("rotary_key", text.qk_rope_head_dim))
    )
    layout = KvLayout(27, text.num_attention_heads, 64, fields)
    config = GPU if is_long else CPU_SIZED
    more = step_bytes(text, layout, config, torch.bfloat16, 65_536) - step_bytes(
        text, layout, config, torch.bfloat16, 32_768
    )
    width = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
    assert more == (32_768 * text.num_attention_heads * width * 2 if is_long else 0)
    # what chunks of any length see of eight contexts, within a GiB
    more = step_bytes(text, layout, CPU_SIZED, torch.bfloat16, 2048) - step_bytes(
        text, layout, CPU_SIZED, torch.bfloat16, 1024
    )
    made = text.qk_nope_head_dim + text.v_head_dim
    assert more == 8 * 1024 * text.num_attention_heads * made * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_any_family_are_counted_by_its_configuration(family: str) -> None:
    model = PagedModel(make_family(family))
    text = model.module.config.get_text_config()
    found = [step_bytes(text, model.shape, config, torch.float32, 512) for config in (CPU_SIZED, GPU)]
    assert 0 < found[0] < found[1]
    assert layer_width(text, model.shape, 1) > text.hidden_size
