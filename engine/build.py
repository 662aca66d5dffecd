"""Build an engine from its configuration: every `auto` is decided here, once.

What is decided (device, dtype, threads, blocks that fit) is in the returned value; the
configuration is not written to.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from base.clock import Clock
from base.config import GIB, EngineConfig
from base.errors import ConfigError
from base.kv_layout import KvLayout
from engine.block_pool import BlockPool
from engine.loop import EngineLoop, LaunchingRunner
from engine.model import PagedModel
from engine.packed_linear import pack_linears
from engine.paged_cache import TORCH_DTYPES, PagedCache
from engine.ranks import Ranks, start_ranks
from engine.runner import Runner, Tell
from engine.scheduler import Scheduler
from engine.self_check import require_faithful
from engine.tensor_parallel import TensorGroup, cut_causal_model
from engine.weights import load_model, random_model

CPU_CACHE_GIB = 1.0
"""On a CPU, where the configuration does not say."""

GPU_HEADROOM = 0.1
"""Share of the free GPU memory that is left for activations and the allocator's waste."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded engine and what was found out while loading it."""

    loop: EngineLoop
    runner: Runner | LaunchingRunner
    scheduler: Scheduler
    pool: BlockPool
    cache: PagedCache
    layout: KvLayout
    max_model_len: int
    """Tokens of prompt and answer: what the model takes and the cache can hold."""
    vocab_size: int
    family: str
    num_threads: int
    ranks: Ranks | None = None
    """The processes that hold the rest of the model."""


def build_engine(
    config: EngineConfig,
    model_path: str,
    clock: Clock,
    allocate: Callable[[int], memoryview] | None = None,
    nodes_on_host: int = 1,
) -> Engine:
    """Load a prepared model and lay out its cache. Blocks for seconds.

    Args:
        nodes_on_host: Nodes that share this host's cores, where `threads` is 0.
        allocate: as for `assemble_engine`.

    Raises:
        ConfigError: the model cannot be served, or the cache has no room for a block.
    """
    num_threads = config.threads or max(1, len(os.sched_getaffinity(0)) // nodes_on_host)
    num_threads = max(1, num_threads // config.tensor_parallel)
    torch.set_num_threads(num_threads)
    if config.tensor_parallel == 1:
        model, dtype = load_rank(config, model_path, None)
        return assemble_engine(config, model, dtype, clock, allocate)
    spec = {"engine": dataclasses.asdict(config), "model_path": model_path, "threads": num_threads}
    is_gpu = device_of(config).type == "cuda"
    ranks, group = start_ranks("engine.rank", spec, config.tensor_parallel, is_gpu)
    try:
        model, dtype = load_rank(config, model_path, group)
        return assemble_engine(config, model, dtype, clock, allocate, group, ranks)
    except ConfigError:
        ranks.close()
        raise


def load_rank(config: EngineConfig, model_path: str, group: TensorGroup | None) -> tuple[PagedModel, str]:
    """Return this rank's share of a prepared model, and its dtype; of one rank, the whole.

    Raises:
        ConfigError: the model cannot be served, or cannot be cut.
    """
    device = device_of(config)
    dtype = _dtype_name(config.dtype, device)
    load = random_model if config.random_weights else load_model
    weights = load(Path(model_path), TORCH_DTYPES[dtype], device)
    if group is not None:
        cut_causal_model(weights, group)
    if device.type == "cpu" and dtype == "float32":
        pack_linears(weights)
    return PagedModel(weights), dtype


def assemble_engine(
    config: EngineConfig,
    model: PagedModel,
    dtype: str,
    clock: Clock,
    allocate: Callable[[int], memoryview] | None = None,
    group: TensorGroup | None = None,
    ranks: Ranks | None = None,
) -> Engine:
    """Put an engine around a model that is loaded.

    Args:
        model: Belongs to the engine from here on; on a GPU its modules are changed.
        dtype: The model's, and the cache's.
        allocate: Gives that many writable bytes for a CPU cache to lie in; None: the
            engine's own memory.
        group: The ranks that hold the model, of which `model` is this one's share; each calls this.
        ranks: The others, on rank 0.

    Raises:
        ConfigError: the model cannot be served, or the cache has no room for a block.
    """
    shape = model.shape
    layout = KvLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, config.block_size, dtype)
    require_faithful(model, layout)
    cache = _cache(layout, config.kv_cache_gib, model.device, allocate, group)
    max_model_len = min(_max_model_len(config, model), cache.num_blocks * config.block_size)
    pool = BlockPool(cache.num_blocks)
    scheduler = Scheduler(
        pool, config.block_size, config.chunk_tokens, config.max_batch, max_model_len, model.vocab_size
    )
    runner = _runner(config, model, cache, max_model_len, clock, group, ranks.tell if ranks else None)
    return Engine(
        loop=EngineLoop(runner, scheduler, pool, clock),
        runner=runner,
        scheduler=scheduler,
        pool=pool,
        cache=cache,
        layout=layout,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        family=model.family,
        num_threads=torch.get_num_threads(),
        ranks=ranks,
    )


def _runner(
    config: EngineConfig,
    model: PagedModel,
    cache: PagedCache,
    max_model_len: int,
    clock: Clock,
    group: TensorGroup | None,
    tell: Tell | None,
) -> Runner | LaunchingRunner:
    if model.device.type == "cpu":
        return Runner(model, cache, tell)
    # Triton is 1 GB and only machines with a GPU have it.
    from engine.gpu_model import GpuModel  # noqa: PLC0415
    from engine.gpu_runner import GpuRunner  # noqa: PLC0415

    gpu_model = GpuModel(model.module, cache, layer_groups=config.layer_groups)
    return GpuRunner(gpu_model, config, max_model_len, clock, group, tell)


def device_of(config: EngineConfig) -> torch.device:
    """Return the device that the engine will run on; raises ConfigError if there is none."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("device: cuda is asked for, and torch finds no GPU")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def _dtype_name(wanted: str, device: torch.device) -> str:
    if wanted != "auto":
        return wanted
    return "bfloat16" if device.type == "cuda" else "float32"


def _cache(
    layout: KvLayout,
    kv_cache_gib: float,
    device: torch.device,
    allocate: Callable[[int], memoryview] | None,
    group: TensorGroup | None,
) -> PagedCache:
    size = int(kv_cache_gib * GIB) or _default_cache_bytes(device)
    num_blocks = size // layout.block_bytes
    if group is not None:
        num_blocks = group.least(num_blocks, device)
    if not num_blocks:
        raise ConfigError(
            f"kv_cache_gib: {size / GIB:.3g} GiB is less than one block ({layout.block_bytes / GIB:.3g} GiB)"
        )
    memory = allocate(num_blocks * layout.block_bytes) if allocate and device.type == "cpu" else None
    return PagedCache(layout, num_blocks, device, memory)


def _default_cache_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return int(CPU_CACHE_GIB * GIB)
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * (1 - GPU_HEADROOM))


def _max_model_len(config: EngineConfig, model: PagedModel) -> int:
    if config.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is asked for, and the model takes {model.max_model_len}"
        )
    return config.max_model_len or model.max_model_len
