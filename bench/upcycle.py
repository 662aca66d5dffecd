"""`python -m bench.upcycle FOLDER`: SmolLM2 as a mixture of eight equal experts, which says what it said.

No package carries weights of a mixture. Of equal experts it does not matter which two a random router
chooses, and their weights sum to one: so each token's answer is the dense model's, and real text goes
through routing, grouped products and the cutting of experts.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from bench.local_cluster import smollm2
from engine.weights import load_model

NUM_EXPERTS = 8
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Fields that a Llama's configuration and a Mixtral's have alike."""


def upcycled(dense: LlamaForCausalLM, num_experts: int = NUM_EXPERTS) -> MixtralForCausalLM:
    """Return a mixture of equal experts that shares the memory of `dense`, its router random."""
    fields = {name: getattr(dense.config, name) for name in SHARED_FIELDS}
    config = MixtralConfig(
        **fields, num_local_experts=num_experts, num_experts_per_tok=2, sliding_window=None
    )
    config.head_dim = dense.config.hidden_size // dense.config.num_attention_heads
    with torch.device("meta"):
        mixture = MixtralForCausalLM(config)
    mixture.lm_head, mixture.model.embed_tokens = dense.lm_head, dense.model.embed_tokens
    mixture.model.norm, mixture.model.rotary_emb = dense.model.norm, dense.model.rotary_emb
    generator = torch.Generator().manual_seed(0)
    for ours, theirs in zip(mixture.model.layers, dense.model.layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(ours.self_attn, name, getattr(theirs.self_attn, name))
        ours.input_layernorm = theirs.input_layernorm
        ours.post_attention_layernorm = theirs.post_attention_layernorm
        mlp, experts = theirs.mlp, ours.mlp.experts
        both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()
        experts.gate_up_proj = _repeated(both, num_experts)
        experts.down_proj = _repeated(mlp.down_proj.weight.detach(), num_experts)
        router = torch.randn(num_experts, both.shape[1], generator=generator).to(both)
        ours.mlp.gate.weight = nn.Parameter(router, requires_grad=False)
    return mixture.eval()


def _repeated(weight: torch.Tensor, count: int) -> nn.Parameter:
    return nn.Parameter(weight.expand(count, *weight.shape), requires_grad=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.upcycle", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    source = Path(smollm2().path)
    dense = load_model(source, torch.bfloat16)
    assert isinstance(dense, LlamaForCausalLM)
    mixture = upcycled(dense)
    for layer in mixture.model.layers:
        for parameter in layer.mlp.experts.parameters():
            parameter.data = parameter.data.contiguous()
    mixture.save_pretrained(folder)
    for file in source.glob("*token*"):
        shutil.copy(file, folder)
    print(f"{folder}: {sum(parameter.numel() for parameter in mixture.parameters()):,} weights")


if __name__ == "__main__":
    main()
