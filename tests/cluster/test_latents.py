"""A cluster of a model with latents and experts says what transformers says, wherever its KV goes."""

import os
import random
import signal

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from base.config import StoreConfig
from deploy.plan import LocalModel
from tests.cluster.asking import generated, held_blocks, until
from tests.cluster.conftest import BLOCK_SIZE, running
from tests.cluster.test_restart import epochs
from tests.cluster.test_store import metric
from tests.conductor.fakes import write_model_folder
from tests.engine.builders import reference
from tests.engine.test_families import FAMILIES, SMALL

SMALL_CACHE_GIB = 0.0006
"""Some 50 blocks of 32 tokens: a few of the prompts below."""
NEW_TOKENS = 12
STOP, SPECIAL = 262, 2
FAMILY = "deepseek_v3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny random model of 12 MiB and a tokenizer, as `prepare` leaves one."""
    path = tmp_path_factory.mktemp("latents")
    write_model_folder(path)
    fields = SMALL | FAMILIES[FAMILY] | {"vocab_size": 263, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(FAMILY, **fields)).eval()
    model.generation_config = GenerationConfig(eos_token_id=STOP, pad_token_id=0)
    model.save_pretrained(path)
    return path, model.float()


@pytest.fixture(scope="module")
def local(folder):
    return LocalModel(str(folder[0]), "latents", "latents")


def prompts():
    rng = random.Random(3)
    shared = [rng.randrange(3, 262) for _ in range(130)]
    tails = [[rng.randrange(3, 262) for _ in range(size)] for size in (1, 40)]
    return [[rng.randrange(3, 262) for _ in range(size)] for size in (1, 32, 200)] + [
        shared + t for t in tails
    ]


def said(tokens):
    return [token for token in tokens if token not in (STOP, SPECIAL)]


def check(cluster, model, asked, again=True):
    """Ask for each prompt, and once more with a prefix in the cache."""
    for _ in range(1 + again):
        for prompt in asked:
            tokens, usage = generated(cluster.grpc_address, prompt, NEW_TOKENS)
            expected = reference(model, prompt, NEW_TOKENS, STOP, attention="eager")
            assert said(tokens) == said(expected)
            assert usage.prompt_tokens == len(prompt)
    until(lambda: held_blocks(cluster) == 0)


def test_disaggregated_nodes_say_what_generate_says_and_keep_1_latent_a_token(folder, local, tmp_path):
    with running(local, tmp_path, kv_cache_gib=0.01) as cluster:
        check(cluster, folder[1], prompts())
        _, usage = generated(cluster.grpc_address, prompts()[2], 2)
        assert usage.cached_tokens == 199 // BLOCK_SIZE * BLOCK_SIZE


def test_latents_come_back_from_a_store(folder, local, tmp_path):
    store = StoreConfig(dram_gib=0.05, disk_path=str(tmp_path / "disk"), disk_gib=0.2)
    with running(local, tmp_path, kv_cache_gib=SMALL_CACHE_GIB, store=store) as cluster:
        asked = prompts()[2:]
        rng = random.Random(9)
        check(cluster, folder[1], asked, again=False)
        loaded = 'kvstore_engine_blocks{what="loaded"}'
        saved = 'kvstore_engine_blocks{what="saved"}'
        until(lambda: metric(cluster, "prefill-0", saved) >= 10)
        for _ in range(8):
            generated(cluster.grpc_address, [rng.randrange(3, 262) for _ in range(400)], 2)
        check(cluster, folder[1], asked, again=False)
        assert metric(cluster, "prefill-0", loaded) + metric(cluster, "decode-0", loaded) > 0


GROUPS = {
    "stages to ranks": {"pipeline_parallel": 2, "of_decode": {"tensor_parallel": 2}},
    "ranks to one": {"tensor_parallel": 2},
}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", GROUPS)
def test_ranks_that_share_heads_and_experts_and_each_have_the_latents(folder, local, tmp_path, group):
    with running(local, tmp_path, kv_cache_gib=0.01, **GROUPS[group]) as cluster:
        check(cluster, folder[1], [prompt[:150] for prompt in prompts()[1:]])


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_node_that_starts_cold_has_latents_lent(folder, local, tmp_path):
    with running(local, tmp_path, kv_cache_gib=0.01) as cluster:
        before = epochs(cluster)["prefill-0"]
        prompt = prompts()[2]
        check(cluster, folder[1], [prompt], again=False)
        os.kill(cluster.processes["prefill-0"].pid(), signal.SIGKILL)
        until(lambda: epochs(cluster).get("prefill-0", before) != before)
        tokens, usage = generated(cluster.grpc_address, prompt, NEW_TOKENS)
        assert said(tokens) == said(reference(folder[1], prompt, NEW_TOKENS, STOP, attention="eager"))
        assert usage.cached_tokens == 199 // BLOCK_SIZE * BLOCK_SIZE
