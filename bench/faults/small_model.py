"""A Llama of four narrow layers that nobody trained, with SmolLM2's tokenizer: real KV, little work.

What it says is drawn (temperature 1, a seed), so that each position has a text of its own: a
token that is lost, repeated or of another position shows in the comparison, where a greedy
answer of an untrained model would be one token for ever.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.faults.asking import SMALL_MODEL, VOCAB
from bench.local_cluster import CACHE_DIR, smollm2
from deploy.plan import LocalModel
from engine.model_store import prepare

MAX_MODEL_LEN = 4096


def small_model(folder: Path, vocab_size: int = VOCAB) -> LocalModel:
    """Write the model into `folder` and return it; for grammars it has all tokens of the tokenizer."""
    tokenizer = Path(smollm2().path)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, folder / name)
    return LocalModel(str(folder), prepare(str(folder), CACHE_DIR, lambda line: None).model_id, SMALL_MODEL)
