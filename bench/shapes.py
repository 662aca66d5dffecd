"""Clusters of a given shape for benches: so many prefill and decode nodes, or colocated ones.

The processes are those of a real cluster, started without Ray (`bench/local_cluster.py`). Models have
a real model's shape and random weights, which each node draws on its own device: nothing is
downloaded or read. Their tokenizer gives every token id a word of its own, so that text
streams as a real model's does.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig

from base.config import (
    KV_DTYPES,
    WEIGHT_FORMATS,
    ClusterConfig,
    EngineConfig,
    PoolConfig,
    SchedulerConfig,
    ServerConfig,
    TransferConfig,
)
from base.errors import ConfigError
from bench.about_run import current_commit, today
from bench.engine_shapes import SHAPES
from bench.local_cluster import LocalCluster, local_cluster
from deploy.plan import LocalModel

TINY = LlamaConfig(
    vocab_size=32_768,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
)
"""A shape to try on a CPU."""

PREFILL_CHUNK = 4096
COLOCATED_CHUNK = 8192
"""The most that a step takes where budgets say how much it may."""
DECODE_CHUNK = 512
"""A decode node computes what it lost, and no prompts."""
PREFILL_BATCH = 8
"""Prompts that a prefill node computes at once."""

PROFILES = {"8b": "h200-llama8b", "0.6b": "h200-llama8b", "tiny": "cpu-smollm2"}
"""Names of profiles by model; that of 8b on another card than an H200 stands in `CARDS`."""
CARDS = {"NVIDIA H200": "h200-llama8b", "NVIDIA H100 80GB HBM3": "h100-llama8b"}
"""Profiles of 8b by the name that CUDA gives a card."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How many nodes of which roles, and how long their chunks are."""

    name: str
    prefill: int
    decode: int
    """0: the prefill pool's nodes have both roles."""
    chunk_tokens: int
    """Longest chunk of the nodes that compute prompts."""
    has_budgets: bool = True
    """Whether steps follow the slack of those who decode; False: whole chunks."""

    @property
    def num_nodes(self) -> int:
        return self.prefill + self.decode


def parse_shape(text: str) -> Shape:
    """Read `1p1d`, `2p2d`, or `2c` for two colocated nodes; `@1024` behind sets the chunk.

    A chunk that is set for colocated nodes is a step's, whoever decodes in it; without one steps have
    budgets.

    Raises:
        ValueError: something else stands there.
    """
    found = re.fullmatch(r"(?:(\d+)p(\d+)d|(\d+)c)(?:@(\d+))?", text)
    if not found:
        raise ValueError(f"{text!r} is no shape: 1p1d, 2p2d or 2c is wanted, or 2c@1024")
    prefill, decode, colocated, chunk = (int(part or 0) for part in found.groups())
    usual = COLOCATED_CHUNK if colocated else PREFILL_CHUNK
    return Shape(text, prefill or colocated, decode, chunk or usual, not (colocated and chunk))


def model_config(name: str) -> PreTrainedConfig:
    """Return the configuration of one of SHAPES or of `tiny`; raises KeyError."""
    return {**SHAPES, "tiny": TINY}[name]


def profile_of(model: str) -> str:
    """Return the name of a model's profile on this machine's first card.

    Raises:
        ConfigError: none comes with us.
    """
    card = torch.cuda.get_device_name(0) if model == "8b" and torch.cuda.is_available() else ""
    if model not in PROFILES:
        measured = f"conductor profile --shape {model}"
        raise ConfigError(f"--profile: {model} has none yet; `{measured}` measures it here")
    return CARDS.get(card, PROFILES[model])


def write_model(name: str, folder: Path, max_model_len: int = 0) -> LocalModel:
    """Write the folder of a model without weights, which takes `max_model_len` tokens at least."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model_config(name))
    config.max_position_embeddings = max(config.max_position_embeddings, max_model_len)
    config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(config.vocab_size)))
    return LocalModel(str(folder), f"random-{name}", name)


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds every node of a cluster."""

    max_batch: int = 0
    """0: as nodes have it."""
    max_model_len: int = 0
    kv_cache_gib: float = 0.0
    """0: what is free."""
    layer_groups: int = EngineConfig().layer_groups
    follows_load: bool = False
    """Whether roles follow the load: then nodes of both pools are alike."""
    ahead_s: float = 0.5
    stages: int = 1
    """Stages of each prefill node's pipeline."""
    shared_gpu: bool = False
    """All nodes on one GPU, or on none; otherwise each has its own."""
    transports: tuple[str, ...] = TransferConfig().transports
    quantization: str = "none"
    """Format of the weights."""
    kv_dtype: str = "auto"
    profile: str = ""
    """Name or path; empty: the card's."""

    def engine(self, chunk_tokens: int, max_batch: int) -> EngineConfig:
        """Return the configuration of an engine with random weights."""
        return EngineConfig(
            kv_cache_gib=self.kv_cache_gib,
            chunk_tokens=chunk_tokens,
            max_batch=max_batch,
            max_model_len=self.max_model_len,
            layer_groups=self.layer_groups,
            quantization=self.quantization,
            kv_dtype=self.kv_dtype,
            random_weights=True,
        )


def cluster_config(model: str, shape: Shape, limits: Limits) -> ClusterConfig:
    """Return the configuration of a cluster. `model`: as for `model_config`."""
    gpus = 0 if limits.shared_gpu else 1
    prompts_only = PREFILL_BATCH if shape.decode else limits.max_batch
    if limits.follows_load:
        prompts_only = limits.max_batch
    computing = replace(limits.engine(shape.chunk_tokens, prompts_only), pipeline_parallel=limits.stages)
    return ClusterConfig(
        profile=limits.profile or profile_of(model),
        server=ServerConfig(http_port=0, grpc_port=0),
        scheduler=SchedulerConfig(
            roles="follow" if limits.follows_load and shape.has_budgets else "fixed",
            ahead_s=limits.ahead_s,
            step_budgets=shape.has_budgets,
        ),
        transfer=TransferConfig(transports=limits.transports),
        prefill=PoolConfig(
            nodes=shape.prefill,
            gpus_per_node=gpus * limits.stages,
            engine=computing,
        ),
        decode=PoolConfig(
            nodes=shape.decode,
            gpus_per_node=gpus,
            engine=computing if limits.follows_load else limits.engine(DECODE_CHUNK, limits.max_batch),
        ),
    )


def options_parser(description: str | None, max_model_len: int) -> argparse.ArgumentParser:
    """Return a parser of the options of every bench of a cluster; `limits_of` reads the bounds.

    Args:
        max_model_len: Default; 0 is the model's own.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="8b", choices=[*SHAPES, "tiny"])
    add("--max-batch", type=int, default=0, help="sequences in a step at most; 0: as nodes have it")
    groups = EngineConfig().layer_groups
    add("--layer-groups", type=int, default=groups, help="parts that a long chunk's KV is sent in")
    add("--roles", choices=["follow", "fixed"], default="fixed", help="whether they follow the load")
    add("--stages", type=int, default=1, help="of each prefill node, a pipeline with a GPU for each")
    add("--ahead-s", type=float, default=0.5, help="of work that a node is given before it asks for more")
    add("--max-model-len", type=int, default=max_model_len, help="0: the model's own")
    add("--kv-cache-gib", type=float, default=0.0, help="of each node; 0: what is free")
    add(
        "--transports",
        default=",".join(TransferConfig().transports),
        help="tcp: as between hosts; with shm GPUs have cuda_ipc as well",
    )
    add("--quantization", choices=WEIGHT_FORMATS, default="none", help="of the weights")
    add("--kv-dtype", choices=KV_DTYPES, default="auto", help="of K and V")
    add("--profile", default="", help="a name, or the file of one that was measured; empty: the card's")
    add("--shared-gpu", action="store_true", help="all nodes on one GPU, or on none")
    add(
        "--logs", type=Path, help="the processes' configurations, logs, decisions and timelines are kept here"
    )
    add("--commit", default="", help="where the checkout has no .git")
    add("--out", type=Path)
    return parser


def limits_of(options: argparse.Namespace) -> Limits:
    """Return the bounds that `options_parser` read for every node."""
    return Limits(
        max_batch=options.max_batch,
        max_model_len=options.max_model_len,
        kv_cache_gib=options.kv_cache_gib,
        layer_groups=options.layer_groups,
        follows_load=options.roles == "follow",
        ahead_s=options.ahead_s,
        stages=options.stages,
        shared_gpu=options.shared_gpu,
        transports=tuple(options.transports.split(",")),
        quantization=options.quantization,
        kv_dtype=options.kv_dtype,
        profile=options.profile,
    )


@contextmanager
def running(model: str, shape: Shape, limits: Limits, logs: Path | None = None) -> Iterator[LocalCluster]:
    """Run a cluster in the body, once all its nodes are attached.

    Args:
        logs: Where the processes' configurations, logs, decisions and timelines are kept.
    """
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as made:
        prepared = write_model(model, Path(made) / "model", limits.max_model_len)
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        # A new one each time: a supervisor would go on with the configuration of an earlier run.
        folder = Path(tempfile.mkdtemp(prefix=f"{shape.name}-", dir=logs or made))
        config = cluster_config(model, shape, limits)
        if logs is not None:
            scheduler = replace(config.scheduler, decision_log=str(folder / "decisions.jsonl"))
            config = replace(config, scheduler=scheduler, trace_out=str(folder))
        with local_cluster(config, prepared, folder) as cluster:
            cluster.wait_nodes(shape.num_nodes)
            print(f"{shape.name}: start-up {time.perf_counter() - started_s:.1f} s", flush=True)
            yield cluster


def about(named_commit: str) -> dict[str, Any]:
    """Return what a reader of results must know of the machine and the versions."""
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "commit": named_commit or current_commit(),
        "date": today(),
    }


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
