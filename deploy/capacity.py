"""Capacity of this host: what nodes take and what it has left, looked at before any is started.

What a node takes is known beforehand: its weights, its KV cache, its part of the store, its swap space, and
what a process of this program is by itself. What the host has is what the kernel and the cgroups say is
available, less what running nodes have allocated and not touched yet. So a start or a `conductor scale` that
does not fit is refused, and says what would; the kernel would kill for it.

In a Ray that is joined nothing of this is known of the hosts, some of which its autoscaler has yet to start:
there Ray's own resources decide, and nodes wait for them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.config import GIB, ClusterConfig, EngineConfig, PoolConfig, StoreConfig

PROCESS_BYTES = int(0.4 * GIB)
"""Memory of a node without weights and KV, with Ray's worker that supervises it.

Measured on a CPU by smaps_rollup, less the weights of SmolLM2: 0.31 and 0.05 GiB that are private to the two
after 17 requests at once, one of 1,500 tokens; 0.26 and 0.05 before any. Libraries are shared.
"""

CPU_CACHE_GIB = 1.0
GPU_SWAP_GIB = 4.0
"""Defaults as in `engine/build.py`, which imports torch; a test compares."""

NODES_PER_CORE = 4
"""The most that start. Sharing a core halves what each does, or worse; with more, heartbeats wait."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "auto": 4}
"""Bytes of a weight on a CPU."""

LEVEL_BYTES = {"int8": 1, "int4": 1, "fp8": 4}
"""Bytes that a quantised weight has there: 4 bits are widened, 8-bit floats are computed in float32."""

STORED_BYTES = {"I8": 1, "U8": 1, "I32": 8, "F8_E4M3": 4}
"""Bytes that a number of a published file has there; 32 bits are 8 levels at most."""

EXPERT = ".experts."
"""Part of the names of experts' weights, whose levels stay what they are on a CPU too."""

EXPERT_BYTES = {"int8": 1.0, "int4": 0.5, "fp8": 1.0}
"""Bytes of such a level."""

MAX_HEADER_BYTES = 100_000_000
"""The longest header of a safetensors file, as safetensors itself has it."""

SMOLLM2 = {
    "embed_tokens": {"shape": [49152, 576], "dtype": "F32"},
    "layers": {"shape": [30, 3538944], "dtype": "F32"},
    "norms": {"shape": [61 * 576], "dtype": "F32"},
}
"""Weights of the model of that name, which is a folder only once it is prepared; a test compares."""

OWN_MEMORY = "/memfd:conductor-"
"""The prefix of our shared memory's name among a process's descriptors."""


@dataclass(frozen=True, slots=True)
class Need:
    """Memory in bytes, and GPUs, that one node takes of its host."""

    weights: int = 0
    kv_cache: int = 0
    store: int = 0
    """The node's part of the store, and its swap space."""
    processes: int = PROCESS_BYTES
    gpus: int = 0

    @property
    def memory(self) -> int:
        return self.weights + self.kv_cache + self.store + self.processes

    def __str__(self) -> str:
        parts = {"weights": self.weights, "KV cache": self.kv_cache, "store and swap": self.store}
        parts["process"] = self.processes
        listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
        gpus = f" and {self.gpus} GPUs" if self.gpus else ""
        return f"{self.memory / GIB:.1f} GiB ({listed}){gpus}"


@dataclass(frozen=True, slots=True)
class Offer:
    """Memory in bytes, processors and GPUs that a host has left."""

    memory: int
    cores: int
    gpus: float = math.inf
    """Infinite where somebody else counts them."""

    def __str__(self) -> str:
        return f"{self.memory / GIB:.1f} GiB of memory, {self.cores} cores, {self.gpus:g} GPUs"


def needs(config: ClusterConfig, model_path: str) -> dict[str, Need]:
    """Return what a node of each pool takes."""
    pools = {"prefill": config.prefill, "decode": config.decode}
    return {name: _need(pool, config.store, model_path) for name, pool in pools.items()}


def _need(pool: PoolConfig, store: StoreConfig, model_path: str) -> Need:
    engine = pool.engine
    ranks = engine.tensor_parallel * engine.pipeline_parallel
    on_gpu = pool.gpus_per_node > 0
    swap = engine.swap_gib if engine.swap_gib >= 0 else GPU_SWAP_GIB if on_gpu else 0.0
    kv = 0.0 if on_gpu else engine.kv_cache_gib or CPU_CACHE_GIB
    return Need(
        weights=0 if on_gpu else weights_bytes(Path(model_path), engine),
        kv_cache=int(kv * ranks * GIB),
        store=int((store.dram_gib + (swap if ranks == 1 else 0.0)) * GIB),
        processes=PROCESS_BYTES * ranks,
        gpus=pool.gpus_per_node,
    )


def weights_bytes(folder: Path, engine: EngineConfig) -> int:
    """Return what a model takes in a CPU's memory: its files' headers say which weights it has.

    0 where there is no such file: nothing is known then, and nothing is refused for it.
    """
    if folder == Path("smollm2"):
        return sum(_tensor_bytes(name, each, engine) for name, each in SMOLLM2.items())
    return sum(_file_bytes(path, engine) for path in folder.glob("*.safetensors"))


def _file_bytes(path: Path, engine: EngineConfig) -> int:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= MAX_HEADER_BYTES else {}
        return sum(
            _tensor_bytes(name, each, engine) for name, each in header.items() if name != "__metadata__"
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def _tensor_bytes(name: str, header: Mapping[str, Any], engine: EngineConfig) -> int:
    """Return what one tensor of a file takes once it is loaded."""
    count: int = math.prod(header["shape"])
    of_float = DTYPE_BYTES[engine.dtype]
    stored = STORED_BYTES.get(header["dtype"])
    if EXPERT in name and stored is not None:
        return count * (4 if header["dtype"] == "I32" else 1)
    if EXPERT in name and engine.quantization != "none" and len(header["shape"]) > 1:
        return int(count * EXPERT_BYTES[engine.quantization])
    if stored is not None:
        return count * stored
    if engine.quantization == "none" or len(header["shape"]) < 2:
        return count * of_float
    # Embeddings stay floats, and the output head may be tied to them and has levels of its own.
    is_looked_up = "embed" in name
    return count * (LEVEL_BYTES[engine.quantization] + (of_float if is_looked_up else 0))


def refusal(added: Mapping[str, int], need: Mapping[str, Need], offer: Offer, num_running: int) -> str:
    """Return why nodes cannot be added, with what would fit; empty: they fit.

    `added`: how many of each pool are to come; `num_running`: those that share the host's cores already.
    """
    problems = []
    places = max(offer.cores * NODES_PER_CORE - num_running, 0)
    each_takes = {pool: f"each takes {each}" for pool, each in need.items()}
    a_core_has = dict.fromkeys(need, f"{NODES_PER_CORE} nodes to a core")
    memory = {pool: each.memory for pool, each in need.items()}
    gpus = {pool: each.gpus for pool, each in need.items()}
    for has, takes, amount, why in (
        (offer.memory, memory, f"{offer.memory / GIB:.1f} GiB of free memory", each_takes),
        (offer.gpus, gpus, f"{offer.gpus:g} free GPUs", each_takes),
        (places, dict.fromkeys(need, 1), f"{places} places left on {offer.cores} cores", a_core_has),
    ):
        if sum(number * takes[pool] for pool, number in added.items()) > has:
            alone = [pool for pool, number in added.items() if number * takes[pool] > has]
            for pool in alone or [pool for pool, number in added.items() if number and takes[pool]]:
                fit = int(has // takes[pool])
                problems.append(f"{pool}: at most {fit} more fit in {amount}, {why[pool]}")
            if not alone:
                problems.append("both pools together have no more than that")
    return "\n".join(problems)


def offer_of_host(root: Path = Path("/"), gpus: float = math.inf) -> Offer:
    """Return what this host, whose /proc and /sys are in `root`, has left for us."""
    return Offer(max(_available(root) - _promised(root), 0), _cores(root), gpus)


def _available(root: Path) -> int:
    """Return the bytes that may be taken: of the host, and of each cgroup that this process is in."""
    rows = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    available = {row[0]: int(row[1]) * 1024 for row in rows}["MemAvailable:"]
    return min([available, *_memory_left(root)])


def _memory_left(root: Path) -> Iterator[int]:
    files = (("memory.max", "memory.current", "inactive_file"),)
    older = (("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),)
    for controller, (limit_name, used_name, cached_name) in (("", *files), ("memory", *older)):
        for group in _groups(root, controller):
            with contextlib.suppress(OSError, ValueError):  # "max"; the root has no such file
                limit = int((group / limit_name).read_text())
                used = int((group / used_name).read_text())
                rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield limit - used + int(rows.get(cached_name, 0))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those that it is in; "": of cgroup v2."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                mount = root / "sys/fs/cgroup" / controller
                inner = Path(path.lstrip("/"))
                yield from (mount / each for each in (inner, *inner.parents))


def _promised(root: Path) -> int:
    """Return the bytes of our processes' shared memory that are theirs and that nobody has touched yet."""
    untouched = {}
    for descriptor in (root / "proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(descriptor).startswith(OWN_MEMORY):
                seen = descriptor.stat()
                untouched[seen.st_ino] = max(seen.st_size - seen.st_blocks * 512, 0)
    return sum(untouched.values())


def _cores(root: Path) -> int:
    """Return the processors that this process may use, by affinity and by its cgroups' quotas."""
    cores = float(len(os.sched_getaffinity(0)))
    for group in _groups(root, ""):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            cores = min(cores, int(quota) / int(period))
    return max(math.ceil(cores), 1)
