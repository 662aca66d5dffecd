"""What nodes take of a host, what it has left, and what is said where they do not fit."""

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest

from base.config import GIB, ClusterConfig, EngineConfig, PoolConfig, StoreConfig
from deploy.capacity import (
    CPU_CACHE_GIB,
    GPU_SWAP_GIB,
    PROCESS_BYTES,
    Need,
    Offer,
    needs,
    offer_of_host,
    refusal,
    weights_bytes,
)
from engine.model_store import prepare

NEED = {"prefill": Need(kv_cache=GIB, processes=0), "decode": Need(kv_cache=3 * GIB, processes=0)}
MANY = Offer(100 * GIB, 1000)


def test_what_fits_is_not_refused():
    assert refusal({"prefill": 1, "decode": 3}, NEED, Offer(10 * GIB, 1), 0) == ""
    assert refusal({"prefill": 0, "decode": 0}, NEED, Offer(0, 1), 99) == ""


@pytest.mark.parametrize(
    ("added", "offer", "running", "told"),
    [
        (
            {"prefill": 998, "decode": 0},
            dataclasses.replace(MANY, memory=int(9.1 * GIB)),
            2,
            "prefill: at most 9 more fit in 9.1 GiB of free memory, each takes 1.0 GiB (KV cache 1.0",
        ),
        (
            {"prefill": 0, "decode": 1},
            dataclasses.replace(MANY, memory=0),
            0,
            "decode: at most 0 more fit in 0.0 GiB",
        ),
        (
            {"prefill": 9, "decode": 0},
            dataclasses.replace(MANY, cores=2),
            5,
            "at most 3 more fit in 3 places left on 2",
        ),
        (
            {"prefill": 9, "decode": 0},
            dataclasses.replace(MANY, cores=2),
            9,
            "prefill: at most 0 more fit in 0 places",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(added, offer, running, told):
    assert told in refusal(added, NEED, offer, running)


def test_gpus_are_counted():
    need = {"prefill": Need(gpus=2), "decode": Need()}
    told = refusal({"prefill": 3, "decode": 1}, need, dataclasses.replace(MANY, gpus=5), 2)
    assert "prefill: at most 2 more fit in 5 free GPUs" in told
    assert "decode: at most" not in told
    assert refusal({"prefill": 2, "decode": 1}, need, dataclasses.replace(MANY, gpus=5), 2) == ""


def test_a_pool_that_fits_is_not_blamed_for_the_other():
    need = {"prefill": Need(kv_cache=400 * GIB), "decode": Need(kv_cache=GIB)}
    (told,) = refusal({"prefill": 1, "decode": 1}, need, Offer(18 * GIB, 9), 0).splitlines()
    assert told.startswith("prefill: at most 0 more fit in 18.0 GiB")


def test_both_pools_are_counted_together():
    told = refusal({"prefill": 4, "decode": 3}, NEED, Offer(12 * GIB, 9), 0)
    assert "prefill: at most 12 more" in told
    assert "decode: at most 4 more" in told
    assert "both pools together" in told


def test_a_node_takes_its_weights_its_cache_its_store_and_a_process_for_each_rank(tmp_path):
    header = json.dumps(
        {"__metadata__": {}, "a": {"shape": [10, 20], "dtype": "F32"}, "b": {"shape": [], "dtype": "F32"}}
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"data")
    engine = EngineConfig(kv_cache_gib=2.0, tensor_parallel=2, dtype="bfloat16")
    config = ClusterConfig(
        prefill=PoolConfig(engine=engine), decode=PoolConfig(gpus_per_node=1), store=StoreConfig(dram_gib=3.0)
    )
    need = needs(config, str(tmp_path))
    assert need["prefill"] == Need(402, 4 * GIB, 3 * GIB, 2 * PROCESS_BYTES, 0)
    assert need["decode"] == Need(0, 0, int((3.0 + GPU_SWAP_GIB) * GIB), PROCESS_BYTES, 1)


@pytest.mark.parametrize(
    "text", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x0b" + bytes(7) + b'{"a": null}']
)
def test_weights_that_cannot_be_read_are_not_counted(text, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(text)
    assert weights_bytes(tmp_path, EngineConfig()) == 0


def test_defaults_are_the_engines():
    from engine import build  # noqa: PLC0415 - seconds to import

    assert (build.CPU_CACHE_GIB, build.GPU_SWAP_GIB) == (CPU_CACHE_GIB, GPU_SWAP_GIB)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def host(tmp_path):
    """A root whose /proc says that 8 GiB are available, in a cgroup v2 without limits."""
    write(tmp_path / "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    return tmp_path


def test_a_host_offers_what_is_available_and_its_processors(host):
    assert offer_of_host(host) == Offer(8 * GIB, len(os.sched_getaffinity(0)), math.inf)


def test_the_tightest_cgroup_is_the_limit(host):
    group = host / "sys/fs/cgroup/a"
    write(group / "memory.max", str(4 * GIB))
    write(group / "memory.current", str(3 * GIB))
    write(group / "memory.stat", f"anon 1\ninactive_file {GIB // 2}\n")
    write(group / "b/memory.max", "max")
    write(host / "sys/fs/cgroup/cpu.max", "50000 100000")
    assert offer_of_host(host) == Offer(GIB + GIB // 2, 1)


def test_cgroups_of_the_first_version_are_known(host):
    write(host / "proc/self/cgroup", "4:memory:/a\n0::/\n")
    group = host / "sys/fs/cgroup/memory/a"
    write(group / "memory.limit_in_bytes", str(2 * GIB))
    write(group / "memory.usage_in_bytes", str(GIB))
    write(group / "memory.stat", "total_inactive_file 0\n")
    assert offer_of_host(host).memory == GIB


def test_memory_that_a_running_node_has_yet_to_touch_is_not_offered():
    before = offer_of_host().memory
    memory = os.memfd_create("conductor-segment")
    try:
        os.ftruncate(memory, before * 2)  # nothing of it is touched
        assert offer_of_host().memory == 0
    finally:
        os.close(memory)


def write_weights(folder, **tensors):
    """Write the header of a safetensors file: each tensor's dtype and shape."""
    header = {name: {"dtype": dtype, "shape": shape} for name, (dtype, *shape) in tensors.items()}
    text = json.dumps(header).encode()
    (folder / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def test_the_weights_of_a_file_are_counted_by_the_engines_dtype(tmp_path):
    write_weights(tmp_path, a=("F32", 3))
    sizes = {
        dtype: weights_bytes(tmp_path, EngineConfig(dtype=dtype)) for dtype in ("auto", "bfloat16", "float32")
    }
    assert sizes == {"auto": 12, "bfloat16": 6, "float32": 12}


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_weights_of_smollm2_are_counted_before_it_is_there(quantization):
    engine = EngineConfig(quantization=quantization)
    prepared = prepare("smollm2", Path("~/.cache/conductor-cluster"), print)
    assert weights_bytes(Path("smollm2"), engine) == weights_bytes(Path(prepared.path), engine) > 0


@pytest.mark.parametrize(("quantization", "size"), [("none", 4), ("int8", 1), ("int4", 1), ("fp8", 4)])
def test_weights_that_are_quantised_at_load_are_counted_by_their_levels(tmp_path, quantization, size):
    write_weights(tmp_path, q_proj=("F32", 10, 20), norm=("F32", 10), embed_tokens=("F32", 5, 4))
    embedding = 20 * 4 + (20 * size if quantization != "none" else 0)
    expected = 200 * size + 10 * 4 + embedding
    assert weights_bytes(tmp_path, EngineConfig(quantization=quantization)) == expected


@pytest.mark.parametrize(("dtype", "size"), [("F8_E4M3", 200), ("I8", 200), ("I32", 800)])
def test_published_levels_of_experts_are_counted_as_they_are(tmp_path, dtype, size):
    names = {"layers.0.mlp.experts.0.up_proj.weight": (dtype, 10, 20)}
    write_weights(tmp_path, **names, **{"layers.0.mlp.experts.0.up_proj.weight_scale": ("F32", 10)})
    assert weights_bytes(tmp_path, EngineConfig()) == size + 10 * 4


@pytest.mark.parametrize(
    ("quantization", "size"), [("none", 3200), ("fp8", 800), ("int8", 800), ("int4", 400)]
)
def test_experts_that_are_quantised_at_load_are_counted_by_their_levels(tmp_path, quantization, size):
    write_weights(tmp_path, **{"layers.0.mlp.experts.gate_up_proj": ("BF16", 4, 10, 20)})
    assert weights_bytes(tmp_path, EngineConfig(quantization=quantization)) == size


def test_published_levels_are_counted_as_a_cpu_keeps_them(tmp_path):
    write_weights(
        tmp_path, packed=("I32", 10, 20), levels=("I8", 10), scale=("BF16", 3), floats=("F8_E4M3", 5)
    )
    assert weights_bytes(tmp_path, EngineConfig()) == 10 * 20 * 8 + 10 + 3 * 4 + 5 * 4
