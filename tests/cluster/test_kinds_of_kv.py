"""A cluster says what one process says, whatever its blocks keep of a token and wherever they go.

Latents, of a model with experts, are held to transformers' own answers; K and V in 8 bits, with their
scales, to those of one engine that keeps them so.
"""

import asyncio
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from base.clock import SystemClock
from base.config import EngineConfig, StoreConfig
from deploy.plan import LocalModel
from engine.build import build_engine
from protos.inference_pb2_grpc import InferenceStub
from tests.cluster.asking import PATIENCE_S, generate_request, generated, held_blocks, until
from tests.cluster.conftest import BLOCK_SIZE, running
from tests.cluster.test_restart import epochs
from tests.cluster.test_store import metric
from tests.conductor.fakes import write_model_folder
from tests.engine.builders import greedy, reference
from tests.engine.test_families import FAMILIES, SMALL

SMALL_CACHE_GIB = 0.0006
"""Some 50 blocks of 32 tokens: a few of the prompts below."""
NEW_TOKENS = 12
MOST_TRIES = 10
"""Answers that may be over before the nodes that are to be killed stand still."""
STOP, SPECIAL = 262, 2
FIELDS = {
    "latents": ("deepseek_v3", {}, {}, ["latent", "rotary_key"]),
    "8 bits": ("llama", {"num_key_value_heads": 4}, {"kv_dtype": "fp8"}, ["key", "value", "scale"]),
}
"""Of each kind of KV: the family, what is changed in it, the engine's keys, the fields of a block."""


@dataclass
class Kind:
    """A tiny random model that keeps one kind of KV, and what it says to each prompt."""

    folder: Path
    engine: dict[str, str]
    answers: dict[tuple[int, ...], list[int]]

    def running(self, folder, of_decode=None, **fields):
        """Run a cluster in the body all of whose nodes keep this kind of KV."""
        model = LocalModel(str(self.folder), "tiny", "tiny")
        of_decode = self.engine | (of_decode or {})
        return running(model, folder, of_decode=of_decode, **{"kv_cache_gib": 0.01} | self.engine | fields)

    def answer(self, prompt):
        return self.answers[tuple(prompt)]


@pytest.fixture(
    scope="module",
    params=[kind if kind == "latents" else pytest.param(kind, marks=pytest.mark.full) for kind in FIELDS],
)
def kind(request, tmp_path_factory):
    """A folder with a tiny random model and a tokenizer, as `prepare` leaves one, and what it should say."""
    family, changed, engine, names = FIELDS[request.param]
    path = tmp_path_factory.mktemp("kind")
    write_model_folder(path)
    fields = SMALL | FAMILIES[family] | changed | {"vocab_size": 263, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields)).eval()
    model.generation_config = GenerationConfig(eos_token_id=STOP, pad_token_id=0)
    model.save_pretrained(path)
    config = EngineConfig(block_size=BLOCK_SIZE, kv_cache_gib=0.01, chunk_tokens=50, threads=1, **engine)
    alone = build_engine(config, str(path), SystemClock())
    assert [field.name for field in alone.layout.fields] == names
    asked = [*prompts(), *shorter_prompts()]
    if engine:
        said_alone = asyncio.run(greedy(alone.loop, asked, NEW_TOKENS))
    else:
        said_alone = [
            reference(model.float(), prompt, NEW_TOKENS, STOP, attention="eager") for prompt in asked
        ]
    answers = {tuple(prompt): said(tokens) for prompt, tokens in zip(asked, said_alone, strict=True)}
    return Kind(path, engine, answers)


def prompts():
    rng = random.Random(3)
    shared = [rng.randrange(3, 262) for _ in range(130)]
    tails = [[rng.randrange(3, 262) for _ in range(size)] for size in (1, 40)]
    return [[rng.randrange(3, 262) for _ in range(size)] for size in (1, 32, 200)] + [
        shared + t for t in tails
    ]


def shorter_prompts():
    """Return prompts for nodes of several ranks, of which each step takes a while."""
    return [prompt[:150] for prompt in prompts()[1:]]


def said(tokens):
    """Return the tokens up to the end of the answer, as they are shown."""
    end = tokens.index(STOP) if STOP in tokens else len(tokens)
    return [token for token in tokens[:end] if token != SPECIAL]


def check(cluster, kind, asked, again=True):
    """Ask for each prompt, and once more with a prefix in the cache."""
    for _ in range(1 + again):
        for prompt in asked:
            tokens, usage = generated(cluster.grpc_address, prompt, NEW_TOKENS)
            assert said(tokens) == kind.answer(prompt)
            assert usage.prompt_tokens == len(prompt)
    until(lambda: held_blocks(cluster) == 0)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_disaggregated_nodes_without_a_store_say_what_one_process_says(kind, tmp_path):
    with kind.running(tmp_path) as cluster:
        check(cluster, kind, prompts())
        _, usage = generated(cluster.grpc_address, prompts()[2], 2)
        assert usage.cached_tokens == 199 // BLOCK_SIZE * BLOCK_SIZE


def test_disaggregated_nodes_say_what_one_process_says_of_blocks_back_from_a_store_too(kind, tmp_path):
    store = StoreConfig(dram_gib=0.05, disk_path=str(tmp_path / "disk"), disk_gib=0.2)
    with kind.running(tmp_path, kv_cache_gib=SMALL_CACHE_GIB, store=store) as cluster:
        asked = prompts()[2:]
        rng = random.Random(9)
        check(cluster, kind, prompts(), again=False)
        loaded = 'kvstore_engine_blocks{what="loaded"}'
        saved = 'kvstore_engine_blocks{what="saved"}'
        until(lambda: metric(cluster, "prefill-0", saved) >= 10)
        for _ in range(8):
            generated(cluster.grpc_address, [rng.randrange(3, 262) for _ in range(400)], 2)
        check(cluster, kind, asked, again=False)
        _, usage = generated(cluster.grpc_address, asked[0], 2)
        assert usage.cached_tokens == 199 // BLOCK_SIZE * BLOCK_SIZE
        assert metric(cluster, "prefill-0", loaded) + metric(cluster, "decode-0", loaded) > 0


GROUPS = {
    "stages to ranks": {"pipeline_parallel": 2, "of_decode": {"tensor_parallel": 2}},
    "ranks to one": {"tensor_parallel": 2},
}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", GROUPS)
def test_ranks_that_share_layers_heads_and_experts(kind, tmp_path, group):
    with kind.running(tmp_path, **GROUPS[group]) as cluster:
        check(cluster, kind, shorter_prompts())


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_node_that_starts_cold_is_lent_a_prefix(kind, tmp_path):
    with kind.running(tmp_path) as cluster:
        before = epochs(cluster)["prefill-0"]
        prompt = prompts()[2]
        check(cluster, kind, [prompt], again=False)
        os.kill(cluster.processes["prefill-0"].pid(), signal.SIGKILL)
        until(lambda: epochs(cluster).get("prefill-0", before) != before)
        tokens, usage = generated(cluster.grpc_address, prompt, NEW_TOKENS)
        assert said(tokens) == kind.answer(prompt)
        assert usage.cached_tokens == 199 // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_decode_node_that_dies_under_a_stream_costs_it_no_token(kind, tmp_path, num_tokens):
    prompt = next(prompt for prompt in prompts()[2:] if len(kind.answer(prompt)) > num_tokens + 2)
    with kind.running(tmp_path, decode=2) as cluster:
        for _ in range(MOST_TRIES):
            tokens, killed = [], None
            with grpc.insecure_channel(cluster.grpc_address) as channel:
                request = generate_request(prompt, NEW_TOKENS)
                for response in InferenceStub(channel).Generate(request, timeout=PATIENCE_S):
                    tokens += response.token_ids
                    if len(tokens) >= num_tokens and killed is None:
                        killed = kill_at_work(cluster)
            assert said(tokens) == kind.answer(prompt)
            if killed:
                break
        assert killed
        until(lambda: held_blocks(cluster) == 0)


def kill_at_work(cluster):
    """Kill the decode nodes that have a request, once they stand still, and return their names."""
    decode = {name: each.pid() for name, each in cluster.processes.items() if name.startswith("decode")}
    for pid in decode.values():
        os.kill(pid, signal.SIGSTOP)
    busy = [each["id"] for each in cluster.status()["nodes"] if each["id"] in decode and each["requests"]]
    for name, pid in decode.items():
        os.kill(pid, signal.SIGKILL if name in busy else signal.SIGCONT)
    return busy
