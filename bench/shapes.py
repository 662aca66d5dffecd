"""Clusters of a given shape for benches: so many prefill and decode nodes, or colocated ones.

The processes are those of a real cluster, started without Ray (`deploy/local.py`). Models have
a real model's shape and random weights, which each node draws on its own device: nothing is
downloaded or read. Their tokenizer gives every token id a word of its own, so that text
streams as a real model's does.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import LlamaConfig, PreTrainedConfig

from base.config import ClusterConfig, EngineConfig, PoolConfig, ServerConfig
from bench.engine import CONFIGS
from deploy.plan import PreparedModel

TINY = LlamaConfig(
    vocab_size=2048,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
)
"""For a try on a CPU."""

PROFILES = {"8b": "h200-llama8b", "0.6b": "h200-llama8b", "tiny": "cpu-smollm2"}


@dataclass(frozen=True, slots=True)
class Shape:
    """How many nodes of which roles."""

    prefill: int
    decode: int
    """0: the prefill pool's nodes have both roles."""

    @property
    def num_nodes(self) -> int:
        return self.prefill + self.decode


def parse_shape(text: str) -> Shape:
    """Read `1p1d`, `2p2d`, or `2c` for two colocated nodes; raises ValueError."""
    if found := re.fullmatch(r"(\d+)p(\d+)d", text):
        return Shape(int(found[1]), int(found[2]))
    if found := re.fullmatch(r"(\d+)c", text):
        return Shape(int(found[1]), 0)
    raise ValueError(f"{text!r} is no shape: 1p1d, 2p2d or 2c is wanted")


def model_config(name: str) -> PreTrainedConfig:
    """Return the configuration of `8b`, `0.6b` or `tiny`; raises KeyError."""
    return {**CONFIGS, "tiny": TINY}[name]


def write_model(name: str, folder: Path) -> PreparedModel:
    """Write the folder of a model without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(name)
    config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(config.vocab_size)))
    return PreparedModel(str(folder), f"random-{name}", name)


def cluster_config(
    name: str, shape: Shape, prefill: EngineConfig, decode: EngineConfig, shared_gpu: bool
) -> ClusterConfig:
    """Return the configuration of a cluster of models with random weights.

    Args:
        name: As for `model_config`.
        prefill: Of the prefill pool, which is all nodes where there is no decode pool.
        shared_gpu: All nodes on one GPU, or on none; otherwise each has its own.
    """
    gpus = 0 if shared_gpu else 1

    def pool(nodes: int, engine: EngineConfig) -> PoolConfig:
        return PoolConfig(nodes=nodes, gpus_per_node=gpus, engine=replace(engine, random_weights=True))

    return ClusterConfig(
        profile=PROFILES[name],
        server=ServerConfig(http_port=0, grpc_port=0),
        prefill=pool(shape.prefill, prefill),
        decode=pool(shape.decode, decode),
    )


def _tokenizer(vocab_size: int) -> dict[str, object]:
    """Return a byte-level tokenizer.json with a word for each token id."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    # U+0120 is how byte-level vocabularies spell the space.
    vocab = {f"\u0120w{token_id}": token_id for token_id in range(vocab_size)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [],
        },
    }
