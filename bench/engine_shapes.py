"""Models with the shape of known ones and random weights, made on the GPU: nothing is downloaded."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

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
