"""A built engine: what is decided at start, KV that moves as bytes, and what is refused."""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from base.clock import SystemClock
from base.config import EngineConfig
from base.errors import ConfigError
from base.kv_layout import head_layout
from base.request import SamplingParams
from engine import weights
from engine.build import Engine, build_engine, gpu_cache_bytes
from tests.engine.builders import greedy, make_sequence, reference, run_sequences

PROMPT = [(7 * index) % 61 for index in range(75)]
SMALL = EngineConfig(device="cpu", block_size=16, kv_cache_gib=0.001, threads=1, chunk_tokens=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        max_position_embeddings=4096,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_the_engine_says_what_it_found(folder: Path) -> None:
    engine = build_engine(SMALL, str(folder), SystemClock())
    layout = engine.layout
    assert layout == head_layout(2, 2, 16, block_size=16, dtype="float32")
    assert engine.pool.num_blocks == engine.cache.num_blocks == int(0.001 * (1 << 30)) // layout.block_bytes
    assert engine.max_model_len == engine.pool.num_blocks * 16 < 4096
    assert engine.family == "llama"


def test_one_thread_makes_a_model_at_a_time(folder: Path, monkeypatch) -> None:
    """Of two at once transformers would leave a method of all models replaced."""
    held = []

    def recorded(make):
        def call(*args, **kwargs):
            held.append(weights.ONE_AT_A_TIME.locked())
            return make(*args, **kwargs)

        return call

    for name in ("from_pretrained", "from_config"):
        monkeypatch.setattr(weights.AutoModelForCausalLM, name, recorded(getattr(AutoModelForCausalLM, name)))
    weights.load_model(folder, torch.float32)
    weights.random_model(folder, torch.float32, torch.device("cpu"))
    assert held == [True, True]
    assert not weights.ONE_AT_A_TIME.locked()


def test_a_step_on_a_cpu_has_512_tokens_of_prompts_and_64_sequences_where_nobody_says_it(
    folder: Path,
) -> None:
    engine = build_engine(dataclasses.replace(SMALL, chunk_tokens=0), str(folder), SystemClock())
    assert (engine.scheduler.chunk_tokens, engine.scheduler.max_batch) == (512, 64)


async def test_a_cpu_cache_lies_in_the_memory_it_is_given(folder: Path) -> None:
    given = []

    def allocate(size: int) -> memoryview:
        given.append(bytearray(size))
        return memoryview(given[-1])

    engine = build_engine(SMALL, str(folder), SystemClock(), allocate)
    await greedy(engine.loop, [PROMPT], 2)
    (memory,) = given
    assert len(memory) == engine.pool.num_blocks * engine.layout.block_bytes
    for block_id in range(engine.pool.num_blocks):
        start = engine.layout.offset(block_id)
        expected = bytes(memory[start : start + engine.layout.block_bytes])
        assert bytes(engine.cache.block_bytes_view(block_id)) == expected
    assert any(memory)


async def test_kv_handed_off_as_bytes_gives_the_same_tokens(folder: Path) -> None:
    """What a prefill and a decode node do, without the network between."""
    expected = reference(LlamaForCausalLM.from_pretrained(folder), PROMPT, 20)
    prefill, decode = (build_engine(SMALL, str(folder), SystemClock()) for _ in range(2))
    decode.pool.allocate(5)  # so that block ids differ
    sequence = make_sequence("r", PROMPT, 20)
    sequence.block_table = decode.pool.allocate(decode.layout.num_blocks(len(PROMPT)))
    first = await prefill_and_send(prefill, decode, sequence.block_table)
    assert first == expected[0]
    sequence.token_ids.append(first)
    sequence.num_computed_tokens = len(PROMPT)
    held = decode.pool.num_held
    tokens = await decode_to_end(decode, sequence)
    assert [first, *tokens] == expected
    assert decode.pool.num_held == held - 5


@pytest.mark.parametrize("weights", ["fp8", "int8", "int4"])
async def test_a_quantised_model_handed_off_says_what_one_process_says(folder: Path, weights: str) -> None:
    config = dataclasses.replace(SMALL, quantization=weights)
    alone, prefill, decode = (build_engine(config, str(folder), SystemClock()) for _ in range(3))
    (expected,) = await greedy(alone.loop, [PROMPT], 20)
    sequence = make_sequence("r", PROMPT, 20)
    sequence.block_table = decode.pool.allocate(decode.layout.num_blocks(len(PROMPT)))
    first = await prefill_and_send(prefill, decode, sequence.block_table)
    sequence.token_ids.append(first)
    sequence.num_computed_tokens = len(PROMPT)
    assert [first, *await decode_to_end(decode, sequence)] == expected
    assert alone.quantization == decode.quantization
    assert alone.quantization.format == weights
    assert 0 < alone.quantization.error < 1


def test_the_error_of_quantised_weights_is_told(folder: Path, caplog) -> None:
    caplog.set_level("INFO")
    build_engine(dataclasses.replace(SMALL, quantization="int8"), str(folder), SystemClock())
    (line,) = [record.getMessage() for record in caplog.records if "quantised" in record.getMessage()]
    assert "format=int8" in line
    assert "logits_off_by=0.0" in line


async def prefill_and_send(prefill: Engine, decode: Engine, target: list[int]) -> int:
    ended = asyncio.get_running_loop().create_future()

    def listen(output) -> None:
        if output.tokens:
            ended.set_result(output.tokens[0].token_id)

    sequence = make_sequence("r", PROMPT, 1)
    prefill.loop.add(sequence, listen)
    steps = asyncio.create_task(prefill.loop.run())
    first = await ended
    for source_id, target_id in zip(sequence.block_table, target, strict=True):
        decode.cache.block_bytes_view(target_id)[:] = prefill.cache.block_bytes_view(source_id)
    prefill.loop.release(sequence)
    steps.cancel()
    await asyncio.gather(steps, return_exceptions=True)
    return first


async def decode_to_end(engine: Engine, sequence) -> list[int]:
    tokens = []
    ended = asyncio.Event()

    def listen(output) -> None:
        tokens.extend(token.token_id for token in output.tokens)
        if output.finish_reason is not None:
            engine.loop.release(sequence)
            ended.set()

    engine.loop.add(sequence, listen)
    steps = asyncio.create_task(engine.loop.run())
    await ended.wait()
    steps.cancel()
    await asyncio.gather(steps, return_exceptions=True)
    return tokens


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(device="cpu", kv_cache_gib=1e-6), "kv_cache_gib"),
        (EngineConfig(device="cpu", max_model_len=5000), "max_model_len"),
    ],
)
def test_a_configuration_that_cannot_be_met_is_refused_by_key(folder: Path, config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_engine(config, str(folder), SystemClock())


LATENT = {"model_type": "deepseek_v3"}


@pytest.mark.parametrize(
    ("more", "asked", "message"),
    [
        ({}, {"tensor_parallel": 4}, "^tensor_parallel: .*4 ranks; choose a divisor of 2$"),
        ({}, {"pipeline_parallel": 3}, "^pipeline_parallel: 3 stages of 2 layers; choose 2 at most$"),
        (
            {},
            {"pipeline_parallel": 2, "stage_layers": (2, 1)},
            r"^stage_layers: \[2, 1\] is not a split of 2 layers into 2 stages; their sum has to be 2$",
        ),
        ({}, {"max_model_len": 5000}, "^max_model_len: 5000 is asked for, and the model takes 4096$"),
        (LATENT, {"kv_dtype": "fp8"}, "^kv_dtype: fp8 is for K and V of heads"),
    ],
    ids=["heads", "stages", "layers of stages", "positions", "latents"],
)
def test_what_config_json_shows_is_refused_before_a_weight_is_read(
    folder: Path, tmp_path: Path, more: dict[str, object], asked: dict[str, object], message: str
) -> None:
    """The folder has none: to round those of a large model takes minutes."""
    table = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(table | more))
    config = dataclasses.replace(SMALL, quantization="int4", **asked)
    with pytest.raises(ConfigError, match=message):
        build_engine(config, str(tmp_path), SystemClock())


def test_an_odd_number_of_inputs_is_served_in_the_eight_bits_that_its_refusal_names(
    folder: Path, tmp_path: Path
) -> None:
    table = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(table | {"intermediate_size": 33}))
    config = dataclasses.replace(SMALL, quantization="int4", random_weights=True)
    with pytest.raises(ConfigError, match=r"int4: 33 inputs are no even number; say quantization: int8$"):
        build_engine(config, str(tmp_path), SystemClock())
    config = dataclasses.replace(config, quantization="int8")
    assert build_engine(config, str(tmp_path), SystemClock()).quantization.format == "int8"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="cuda"):
        build_engine(EngineConfig(device="cuda"), str(folder), SystemClock())


async def test_a_seeded_sequence_draws_the_same_in_company_and_alone(folder: Path) -> None:
    engine = build_engine(SMALL, str(folder), SystemClock())

    async def drawn(count: int) -> list[int]:
        sequences = [
            make_sequence(f"r{index}", [*PROMPT, index], 30, sampling=SamplingParams(seed=index, top_p=0.9))
            for index in range(count)
        ]
        results = await run_sequences(engine.loop, sequences)
        return [token.token_id for token in results["r0"]]

    assert await drawn(1) == await drawn(6)


@pytest.mark.parametrize(("free_gib", "cache_gib"), [(124.0, 110.0), (20.0, 10.0), (15.0, 7.5), (0.0, 0.0)])
def test_a_gpus_cache_leaves_a_tenth_of_all_its_memory_whatever_weights_take(free_gib, cache_gib):
    gib = 1 << 30
    assert gpu_cache_bytes(int(free_gib * gib), 140 * gib) == pytest.approx(cache_gib * gib)


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "step_gib", "cache_gib"),
    [(140, 124.0, 3.5, 110.0), (24, 16.0, 3.5, 12.0), (24, 16.0, 1.0, 13.6), (24, 6.0, 3.5, 3.0)],
)
def test_a_small_gpus_cache_leaves_what_steps_hold(total_gib, free_gib, step_gib, cache_gib):
    gib = 1 << 30
    found = gpu_cache_bytes(int(free_gib * gib), total_gib * gib, int(step_gib * gib))
    assert found == pytest.approx(cache_gib * gib)


def test_random_weights_have_the_dtype_that_is_asked_for(folder: Path, tmp_path: Path) -> None:
    table = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(table | {"dtype": "bfloat16"}))
    model = weights.random_model(tmp_path, torch.float32, torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
