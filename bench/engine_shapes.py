"""Models with the shape of known ones and random weights, made on the GPU: nothing is downloaded."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

SHAPES: dict[str, PreTrainedConfig] = {
    "8b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    ),
    "0.6b": Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    ),
    "deepseek-v2-lite": DeepseekV2Config(
        vocab_size=102_400,
        hidden_size=2048,
        intermediate_size=10_944,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=False,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
}


def build_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model with random weights, made on the GPU."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    try:
        with torch.device("cuda"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            return model.eval()
    finally:
        torch.set_default_dtype(before)
