"""KV of 8 bits goes from node to node with its scales: two nodes say what one engine says."""

import asyncio

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from base.clock import SystemClock
from base.config import EngineConfig
from deploy.plan import LocalModel
from engine.build import build_engine
from tests.cluster.asking import generated, held_blocks, until
from tests.cluster.conftest import BLOCK_SIZE, running
from tests.cluster.test_latents import NEW_TOKENS, STOP, prompts, said
from tests.conductor.fakes import write_model_folder
from tests.engine.builders import greedy
from tests.engine.test_families import SMALL


@pytest.fixture
def folder(tmp_path):
    """A folder with a tiny random Llama and a tokenizer, as `prepare` leaves one."""
    path = tmp_path / "model"
    path.mkdir()
    write_model_folder(path)
    fields = SMALL | {"vocab_size": 263, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields)).eval()
    model.generation_config = GenerationConfig(eos_token_id=STOP, pad_token_id=0)
    model.save_pretrained(path)
    return path


def test_nodes_that_hand_over_8_bits_say_what_one_engine_says(folder, tmp_path):
    kind = {"kv_dtype": "fp8"}
    config = EngineConfig(block_size=BLOCK_SIZE, kv_cache_gib=0.01, chunk_tokens=50, threads=1, **kind)
    engine = build_engine(config, str(folder), SystemClock())
    assert [field.name for field in engine.layout.fields] == ["key", "value", "scale"]
    asked = prompts()
    expected = asyncio.run(greedy(engine.loop, asked, NEW_TOKENS))
    model = LocalModel(str(folder), "llama", "llama")
    with running(model, tmp_path, kv_cache_gib=0.01, of_decode=kind, **kind) as cluster:
        for _ in range(2):
            for prompt, tokens in zip(asked, expected, strict=True):
                found, _ = generated(cluster.grpc_address, prompt, NEW_TOKENS)
                assert said(found) == said(tokens[: len(found)])
                assert found
        until(lambda: held_blocks(cluster) == 0)
