"""Build an engine from its configuration: every `auto` is decided here, once.

What is decided (device, dtype, threads, blocks that fit) is in the returned value; the configuration is not
written to.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from base.clock import Clock
from base.config import GIB, EngineConfig
from base.errors import ConfigError
from base.grammar import Vocabulary
from base.kv_layout import KvLayout, KvPart, whole_layout
from base.logs import event
from base.tables import from_table
from engine.block_pool import BlockPool
from engine.cpu_runner import Runner
from engine.device_weights import move_to
from engine.expert_load import ExpertBalance, ExpertCounts, expert_counts
from engine.loop import EngineLoop
from engine.model import PagedModel, num_positions
from engine.model_config import model_config
from engine.packed_linear import pack_linears
from engine.paged_cache import TORCH_DTYPES, PagedCache
from engine.pipeline import Stage, split_layers
from engine.quantization import load_weights
from engine.quantized_linear import use_cpu_products
from engine.quantized_weight import FLOATS, Quantization
from engine.rank_group import GroupShape, RankGroup
from engine.ranks import Ranks, start_ranks
from engine.runner import StepRunner
from engine.scaled_kv import NOT_HEADS, scaled_layout
from engine.scheduler import Scheduler
from engine.self_check import LogitsOf, checked_blocks, eager_logits, require_faithful, require_right_kernels
from engine.stored_weights import WHOLE
from engine.swap_space import HostBlocks, SwapSpace
from engine.tensor_parallel import TensorGroup, cut_causal_model, heads_of, require_divisible
from engine.token_masks import Grammars, no_vocabulary

log = logging.getLogger(__name__)

Allocate = Callable[[int], memoryview]

CPU_CACHE_GIB = 1.0
"""Size of a CPU's cache where the configuration does not say."""

GPU_SWAP_GIB = 4.0
"""Size of the swap space beside a GPU where the configuration does not say."""

GPU_MODULES = ("torch._inductor.compile_fx", "engine.gpu_runner")
"""Modules that an engine on a GPU needs, and others do not have: Triton is 1 GB."""

GPU_HEADROOM = 0.1
"""Share of a GPU's memory that is left for activations and the allocator's waste, at least.

They go by the model and the chunk, not by what weights have left: a tenth of the 17 GB that weights of 61
leave on an H100 is too little. On a small card a tenth of all is too little too: see `step_bytes.py`."""

GPU_WASTE_BYTES = GIB // 2
"""Bytes that the allocator and CUDA's libraries take beside what steps hold."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded engine and what was found out while loading it."""

    loop: EngineLoop
    runner: StepRunner
    scheduler: Scheduler
    pool: BlockPool
    cache: PagedCache
    """The cache of this rank."""
    layout: KvLayout
    """The layout of all ranks' blocks together."""
    max_model_len: int
    """Tokens of prompt and answer: what the model takes and the cache can hold."""
    vocab_size: int
    family: str
    parts: tuple[KvPart, ...]
    """The part of a block that each rank's cache has."""
    ranks: Ranks | None = None
    """The processes that hold the rest of the model."""
    quantization: Quantization = FLOATS
    experts: ExpertBalance | None = None
    """How evenly tokens go to the experts; None: the model has none."""


def build_engine(
    config: EngineConfig,
    model_path: str,
    clock: Clock,
    allocate: Allocate | None = None,
    rank_module: str = "",
    for_ranks: dict[str, Any] | None = None,
    rounded: Path | None = None,
) -> Engine:
    """Load a prepared model and lay out its cache, as `assemble_engine`. Blocks for seconds.

    Args:
        rank_module: Module that the other ranks run; empty: the configuration has none.
        for_ranks: More for its `join_ranks` to return; JSON.
        rounded: As for `load_weights`.

    Raises ConfigError if the model cannot be served, or no block fits into the cache; ValueError if ranks
    have no module: they would end at once, and this process with them."""
    _require_fitting(config, Path(model_path))
    shape = GroupShape(config.tensor_parallel, config.pipeline_parallel)
    if shape.size > 1 and not rank_module:
        raise ValueError(f"{shape.size} ranks need a rank_module")
    num_threads = config.threads or len(os.sched_getaffinity(0))
    num_threads = max(1, num_threads // shape.size)
    torch.set_num_threads(num_threads)
    if shape.size == 1:
        model = load_rank(config, model_path, None, rounded)
        return assemble_engine(config, model, clock, allocate, tokenizer=Path(model_path))
    spec = {
        "engine": dataclasses.asdict(config),
        "model_path": model_path,
        "threads": num_threads,
        "rounded": rounded and str(rounded),
    }
    is_gpu = device_of(config).type == "cuda"
    ranks, group = start_ranks(rank_module, {**spec, **(for_ranks or {})}, shape, is_gpu)
    try:
        model = load_rank(config, model_path, group.tensor, rounded)
        engine = assemble_engine(config, model, clock, allocate, group, ranks, Path(model_path))
        ranks.is_starting = False
        return engine
    except BaseException:
        ranks.close(0.0)
        raise


def _require_fitting(config: EngineConfig, folder: Path) -> None:
    """Raise ConfigError where a folder's config.json shows that its model cannot be served as asked.

    Before ranks start and a weight is read: to round those of a large model takes minutes."""
    text = model_config(folder).get_text_config()
    if config.tensor_parallel > 1:
        require_divisible(heads_of(text), config.tensor_parallel)
    if config.pipeline_parallel > 1:
        split_layers(text.num_hidden_layers, config.pipeline_parallel, config.stage_layers)
    if config.max_model_len:
        _max_model_len(config, num_positions(text))
    if config.kv_dtype == "fp8" and getattr(text, "kv_lora_rank", None):
        raise ConfigError(NOT_HEADS)


def build_rank(
    spec: dict[str, Any], group: RankGroup, clock: Clock, allocate: Allocate | None = None
) -> Engine:
    """Build in another rank, by what `join_ranks` returned, what `build_engine` builds in the first.

    Raises ConfigError."""
    torch.set_num_threads(spec["threads"])
    config = from_table(EngineConfig, spec["engine"], ("engine",))
    rounded = Path(spec["rounded"]) if spec["rounded"] else None
    model = load_rank(config, spec["model_path"], group.tensor, rounded)
    return assemble_engine(config, model, clock, allocate, group)


def load_rank(
    config: EngineConfig, model_path: str, group: TensorGroup | None, rounded: Path | None = None
) -> PagedModel:
    """Return this rank's share of a prepared model's heads; without a group, the whole.

    `rounded` is as for `load_weights`. Raises ConfigError if the model cannot be served, or cannot be cut."""
    device = device_of(config)
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = default if config.dtype == "auto" else TORCH_DTYPES[config.dtype]
    part = (group.rank, group.size) if group is not None else WHOLE
    weights = load_weights(config, Path(model_path), dtype, device, rounded, part)
    if group is not None:
        cut_causal_model(weights.module, group)
    with _importing(GPU_MODULES if device.type == "cuda" else ()):
        move_to(weights.module, device)
    weights.compute_source()
    if device.type == "cpu":
        use_cpu_products(weights.module)
    if device.type == "cpu" and dtype == torch.float32:
        pack_linears(weights.module)
    model = PagedModel(weights.module)
    model.quantization = weights.stated(model)
    return model


@contextmanager
def _importing(modules: tuple[str, ...]) -> Iterator[None]:
    """Import modules beside the body, which may import nothing itself.

    To copy the weights of an 8B model takes three seconds without Python; these imports take five."""
    with ThreadPoolExecutor(1, "imports") as pool:
        imported = pool.submit(lambda: [importlib.import_module(module) for module in modules])
        yield
        imported.result()


def assemble_engine(
    config: EngineConfig,
    model: PagedModel,
    clock: Clock,
    allocate: Allocate | None = None,
    group: RankGroup | None = None,
    ranks: Ranks | None = None,
    tokenizer: Path | None = None,
) -> Engine:
    """Put an engine around a model that is loaded.

    Args:
        model: Belongs to the engine from here on; on a GPU its modules are changed.
        allocate: Gives that many writable bytes for a CPU cache to lie in; None: the engine's own memory.
        group: The ranks that hold the model, of which `model` is this one's share; each calls this.
        ranks: The others, on rank 0.
        tokenizer: The folder of the model's tokenizer, for grammars; None: sequences have none.

    Raises ConfigError if the model cannot be served, or no block fits into the cache."""
    config = _sized(config, on_gpu=model.device.type == "cuda")
    load_vocabulary = partial(Vocabulary.load, tokenizer, model.vocab_size) if tokenizer else no_vocabulary
    stage = group.stage if group is not None else None
    split = split_layers(model.shape.num_layers, config.pipeline_parallel, config.stage_layers)
    parts = _parts(split, model.shape.num_heads, config.tensor_parallel)
    layout, expected = _checked_layout(model, config, stage, split)
    cache = _cache(layout, config, model, allocate, group)
    max_model_len = min(_max_model_len(config, model.max_model_len), cache.num_blocks * config.block_size)
    pool = BlockPool(cache.num_blocks)
    host_blocks = _host_blocks(config, cache) if group is None else None
    counts = expert_counts(model.module)
    if model.device.type == "cpu":
        if counts is not None:
            counts.count_all()
        runner: StepRunner = Runner(model, cache, clock, ranks, host_blocks, stage, split)
    elif stage is not None:
        runner = _gpu_stage_runner(config, model, cache, max_model_len, stage, split, ranks, counts)
    else:
        gpu = runner = _gpu_runner(config, model, cache, max_model_len, group, ranks, host_blocks, counts)
        _check_kernels(gpu.logits_of, model, cache, expected, config.max_batch, max_model_len)
    scheduler = Scheduler(
        pool, config.block_size, config.chunk_tokens, config.max_batch, max_model_len, model.vocab_size,
        chunk_attention=max(config.chunk_attention, 0.0),
        # Measured last: until then its memory is being pinned.
        swap_space=SwapSpace(host_blocks.num_slots, host_blocks.measure(clock)) if host_blocks else None,
    )  # fmt: skip
    return Engine(
        loop=EngineLoop(runner, scheduler, pool, clock, grammars=Grammars(load_vocabulary)),
        runner=runner,
        scheduler=scheduler,
        pool=pool,
        cache=cache,
        layout=whole_layout(layout, parts),
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        family=model.family,
        parts=parts,
        ranks=ranks,
        quantization=model.quantization,
        experts=None if counts is None else ExpertBalance(counts, clock),
    )


def _sized(config: EngineConfig, on_gpu: bool) -> EngineConfig:
    """Return the configuration of an engine whose steps' sizes are decided."""
    max_batch, chunk_tokens = config.sequences(on_gpu), config.prompt_tokens(on_gpu)
    return dataclasses.replace(config, max_batch=max_batch, chunk_tokens=chunk_tokens)


def _checked_layout(
    model: PagedModel, config: EngineConfig, stage: Stage | None, split: tuple[int, ...]
) -> tuple[KvLayout, torch.Tensor]:
    """Cut a model to its stage, if it has one; return its blocks' layout, and the logits it was checked by.

    Raises ConfigError if the model cannot be cut, or says something else than it did whole."""
    expected = eager_logits(model)
    if stage is not None:
        first = sum(split[: stage.index])
        model.keep_stage(stage, range(first, first + split[stage.index]))
    layout = dataclasses.replace(model.shape, block_size=config.block_size)
    require_faithful(model, layout, expected)
    if config.kv_dtype == "fp8":
        layout = scaled_layout(layout)
        error = require_faithful(model, layout, expected)
        event(log, "KV of 8 bits", logits_off_by=round(error, 4))
    return layout, expected


def _parts(split: tuple[int, ...], num_heads: int, tensor: int) -> tuple[KvPart, ...]:
    """Return the part of a block that each rank has, if each rank of a stage has `num_heads` KV heads."""
    group = GroupShape(tensor, len(split))
    places = [group.place(rank) for rank in range(group.size)]
    return tuple(
        KvPart(sum(split[:stage]), split[stage], place * num_heads, num_heads) for stage, place in places
    )


def _gpu_runner(
    config: EngineConfig,
    model: PagedModel,
    cache: PagedCache,
    max_model_len: int,
    group: RankGroup | None,
    ranks: Ranks | None,
    host_blocks: HostBlocks | None,
    counts: ExpertCounts | None,
) -> Any:
    from engine.gpu_model import GpuModel  # noqa: PLC0415
    from engine.gpu_runner import GpuRunner  # noqa: PLC0415

    gpu_model = GpuModel(model.module, cache, layer_groups=config.layer_groups, counts=counts)
    tensor = group.tensor if group is not None else None
    send_step = ranks.send_step if ranks is not None else None
    return GpuRunner(gpu_model, config, max_model_len, tensor, send_step, host_blocks)


def _gpu_stage_runner(
    config: EngineConfig,
    model: PagedModel,
    cache: PagedCache,
    max_model_len: int,
    stage: Stage,
    split: tuple[int, ...],
    ranks: Ranks | None,
    counts: ExpertCounts | None,
) -> StepRunner:
    from engine.gpu_model import GpuModel  # noqa: PLC0415
    from engine.gpu_runner import GpuPipelineRunner  # noqa: PLC0415

    gpu_model = GpuModel(model.module, cache, stage=stage, counts=counts)
    sizes = config.chunk_tokens, config.max_batch, cache.layout.num_blocks(max_model_len)
    return GpuPipelineRunner(gpu_model, stage, config.block_size, sizes, split, ranks)


def _check_kernels(
    logits_of: LogitsOf,
    model: PagedModel,
    cache: PagedCache,
    expected: torch.Tensor,
    max_batch: int,
    max_model_len: int,
) -> None:
    """Raise ConfigError if a GPU's steps say something else than the model's family does.

    Where a sequence or the cache has no place for the checked tokens, nothing is checked."""
    if max_model_len >= len(expected) and cache.num_blocks >= checked_blocks(cache.layout):
        error = require_right_kernels(model, cache.layout, expected, logits_of, max_batch)
        event(log, "kernels", logits_off_by=round(error, 4))


def device_of(config: EngineConfig) -> torch.device:
    """Return the device that the engine will run on; raises ConfigError if there is none."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("device: cuda is asked for, and torch finds no GPU")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def _cache(
    layout: KvLayout,
    config: EngineConfig,
    model: PagedModel,
    allocate: Allocate | None,
    group: RankGroup | None,
) -> PagedCache:
    device = model.device
    if config.kv_cache_gib or device.type == "cpu":
        size = int((config.kv_cache_gib or CPU_CACHE_GIB) * GIB)
    else:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        size = gpu_cache_bytes(free_bytes, total_bytes, _step_bytes(layout, config, model, free_bytes))
    num_blocks = size // layout.block_bytes
    if group is not None:
        num_blocks = group.world.least(num_blocks, device)
    if not num_blocks:
        raise ConfigError(
            f"kv_cache_gib: {size / GIB:.3g} GiB is less than one block ({layout.block_bytes / GIB:.3g} GiB)"
        )
    memory = allocate(num_blocks * layout.block_bytes) if allocate and device.type == "cpu" else None
    return PagedCache(layout, num_blocks, device, memory)


def gpu_cache_bytes(free_bytes: int, total_bytes: int, step_bytes: int = 0) -> int:
    """Return the bytes of a GPU's cache, where weights have left `free_bytes`: half of these at least.

    `step_bytes`: what steps hold beside weights and KV, as far as that is known."""
    headroom = max(int(GPU_HEADROOM * total_bytes), step_bytes + GPU_WASTE_BYTES)
    return max(free_bytes - headroom, free_bytes // 2)


def _step_bytes(layout: KvLayout, config: EngineConfig, model: PagedModel, free_bytes: int) -> int:
    from engine.step_bytes import step_bytes  # noqa: PLC0415

    longest = min(_max_model_len(config, model.max_model_len), free_bytes // layout.token_bytes)
    return step_bytes(model.module.config.get_text_config(), layout, config, model.dtype, longest)


def _host_blocks(config: EngineConfig, cache: PagedCache) -> HostBlocks | None:
    gib = config.swap_gib
    if gib < 0:
        gib = GPU_SWAP_GIB if cache.tensor.device.type == "cuda" else 0.0
    # More than the cache has would never be used.
    num_slots = min(int(gib * GIB) // cache.layout.block_bytes, cache.num_blocks)
    return HostBlocks(cache, num_slots) if num_slots else None


def _max_model_len(config: EngineConfig, most: int) -> int:
    if config.max_model_len > most:
        raise ConfigError(f"max_model_len: {config.max_model_len} is asked for, and the model takes {most}")
    return config.max_model_len or most
