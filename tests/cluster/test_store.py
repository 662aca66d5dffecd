"""KV that left the engines' caches comes back from host memory, from disk and from storage nodes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from base.config import StoreConfig
from base.kv_layout import head_layout
from kvstore.context import ContextCache, connected
from tests.cluster.asking import generated, until
from tests.cluster.conftest import BLOCK_SIZE, running
from tests.cluster.test_restart import epochs

SMALL_CACHE_GIB = 0.025
"""18 blocks of 32 tokens: two of the prompts below."""
LENGTH = 200
PROMPT = list(range(1000, 1000 + LENGTH))
OTHERS = [list(range(2000 + 300 * number, 2000 + 300 * number + LENGTH)) for number in range(4)]
FULL_BLOCKS = (LENGTH - 1) // BLOCK_SIZE


def metric(cluster, name, line):
    """Return the value of one of a node's metrics; 0 where it has none."""
    port = cluster.processes[name].wait_ready()["metrics_port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return next((float(row.split()[-1]) for row in text.splitlines() if row.startswith(line + " ")), 0.0)


def saved(cluster, name):
    return metric(cluster, name, 'kvstore_engine_blocks{what="saved"}')


def loaded(cluster, name):
    return metric(cluster, name, 'kvstore_engine_blocks{what="loaded"}')


def push_out(cluster):
    """Ask for so much else that nothing of PROMPT is left in an engine's cache."""
    for other in OTHERS:
        generated(cluster.grpc_address, other, 2)


@pytest.fixture(scope="module")
def stored(smollm2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    store = StoreConfig(dram_gib=0.3, disk_path=str(folder / "disk"), disk_gib=1.0)
    with running(smollm2, folder, store=store, kv_cache_gib=SMALL_CACHE_GIB) as cluster:
        yield cluster


@pytest.mark.full
def test_the_next_turn_finds_the_answer_of_the_last_one(stored):
    prompt = PROMPT[::-1][:80]
    answer, _ = generated(stored.grpc_address, prompt, 60)
    turn = [*prompt, *answer, *range(5000, 5020)]
    blocks = (len(prompt) + len(answer) - 1) // BLOCK_SIZE
    assert blocks > len(prompt) // BLOCK_SIZE
    expected, usage = generated(stored.grpc_address, turn, 8)
    assert usage.cached_tokens >= blocks * BLOCK_SIZE
    until(lambda: saved(stored, "decode-0") >= blocks)
    push_out(stored)
    tokens, usage = generated(stored.grpc_address, turn, 8)
    assert tokens == expected
    assert usage.cached_tokens >= blocks * BLOCK_SIZE


@pytest.mark.full
def test_a_prefix_comes_back_from_memory_and_after_a_restart_from_disk(stored):
    address = stored.grpc_address
    expected, usage = generated(address, PROMPT, 8)
    assert usage.cached_tokens == 0
    until(lambda: saved(stored, "prefill-0") >= FULL_BLOCKS)
    push_out(stored)
    before = loaded(stored, "prefill-0")
    tokens, usage = generated(address, PROMPT, 8)
    assert tokens == expected
    assert usage.cached_tokens == FULL_BLOCKS * BLOCK_SIZE
    assert loaded(stored, "prefill-0") - before == FULL_BLOCKS

    old = epochs(stored)
    for name in old:
        os.kill(stored.processes[name].pid(), signal.SIGTERM)
    until(lambda: epochs(stored).keys() == old.keys() and not epochs(stored).items() & old.items())
    tokens, usage = generated(address, PROMPT, 8)
    assert tokens == expected
    assert usage.cached_tokens == FULL_BLOCKS * BLOCK_SIZE
    assert loaded(stored, "prefill-0") == FULL_BLOCKS
    assert metric(stored, "prefill-0", 'kvstore_unaccounted_blocks{tier="disk"}') == 0


@contextmanager
def storage_process(folder, **settings):
    """A `python -m kvstore` in the body; yields what it said when it was ready."""
    config = folder / "storage.json"
    # smollm2: 30 layers, K and V, 3 heads of 64, 4 bytes
    block_bytes = 30 * 2 * BLOCK_SIZE * 3 * 64 * 4
    config.write_text(json.dumps({"node_id": "storage-0", "block_bytes": block_bytes, **settings}))
    command = [sys.executable, "-m", "kvstore", "--config", str(config)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdin=pipe, stdout=pipe) as child:
        try:
            yield json.loads(child.stdout.readline())
        finally:
            child.send_signal(signal.SIGTERM)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_nodes_without_memory_of_their_own_keep_their_blocks_on_a_storage_node(smollm2, tmp_path):
    disk = {"folder": str(tmp_path / "disk"), "gib": 1.0}
    with storage_process(tmp_path, pool_gib=0.3, disk=disk) as said:
        store = StoreConfig(peers=(said["address"],))
        with running(smollm2, tmp_path, store=store, kv_cache_gib=SMALL_CACHE_GIB) as cluster:
            expected, _ = generated(cluster.grpc_address, PROMPT, 8)
            until(lambda: saved(cluster, "prefill-0") + saved(cluster, "decode-0") >= FULL_BLOCKS)
            push_out(cluster)
            tokens, usage = generated(cluster.grpc_address, PROMPT, 8)
            assert (tokens, usage.cached_tokens) == (expected, FULL_BLOCKS * BLOCK_SIZE)
            assert loaded(cluster, "prefill-0") >= FULL_BLOCKS
            found = asyncio.run(tokens_known_outside(said["address"], smollm2.model_id, PROMPT))
            assert found == LENGTH // BLOCK_SIZE * BLOCK_SIZE


async def tokens_known_outside(address, model_id, token_ids):
    """Ask as another program would: by token ids, of a storage process."""
    layout = head_layout(num_layers=30, num_heads=3, head_dim=64, block_size=BLOCK_SIZE, dtype="float32")
    async with connected([address]) as cache:
        context = ContextCache(cache, model_id, layout, tenant="", tenant_salt="")
        into = context.segment(len(token_ids))
        assert await context.match(token_ids) == await context.get(token_ids, into)
        assert any(into.memory[: layout.block_bytes])
        return await context.match(token_ids)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_storage_node_that_attaches_lends_what_is_on_its_disk(smollm2, tmp_path):
    disk = {"folder": str(tmp_path / "disk"), "gib": 1.0}
    with storage_process(tmp_path, pool_gib=0.3, disk=disk) as said:
        store = StoreConfig(peers=(said["address"],))
        with running(smollm2, tmp_path, store=store) as cluster:
            expected, _ = generated(cluster.grpc_address, PROMPT, 8)
            until(lambda: saved(cluster, "prefill-0") + saved(cluster, "decode-0") >= FULL_BLOCKS)
    with running(smollm2, tmp_path / "second") as cluster:
        with storage_process(
            tmp_path, pool_gib=0.3, disk=disk, conductor_addresses=(cluster.attach_address,)
        ):
            until(lambda: "storage-0" in epochs(cluster))
            tokens, usage = generated(cluster.grpc_address, PROMPT, 8)
            assert (tokens, usage.cached_tokens) == (expected, FULL_BLOCKS * BLOCK_SIZE)
        until(lambda: "storage-0" not in epochs(cluster))
        assert generated(cluster.grpc_address, PROMPT[::-1], 8)[1].cached_tokens == 0
