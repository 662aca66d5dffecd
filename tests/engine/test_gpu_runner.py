"""On a GPU, compiled, captured and launched ahead, the engine says what transformers says."""

import asyncio
import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from base.clock import SystemClock
from base.config import EngineConfig
from base.grammar import Vocabulary
from base.request import Pooling, SampledToken, SamplingParams, StopParams
from engine.build import Engine, assemble_engine
from engine.cuda_graph import MIXED_TOKENS, decode_ladder, mixed_ladder, prompt_ladder
from engine.model import PagedModel
from engine.prefix_groups import PrefixGroups
from engine.sequence import Sequence
from tests.conductor.fakes import write_model_folder
from tests.engine.builders import make_sequence, run_sequences
from tests.engine.grammars import (
    GRAMMARS,
    VOCAB_SIZE,
    constrained_reference,
    constrained_sequence,
    make_spelling_model,
)
from tests.engine.test_gpu_model import last_state, make_family

GPU_FAMILIES = [
    "llama", "qwen3", "mistral", "gemma2", "phi", "gpt_oss", "mixtral", "deepseek_v2", "deepseek_v3"
]  # fmt: skip

pytestmark = [
    # What inductor would rather have: the tests compare float32, and complex numbers are DeepSeek-V2's.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled"),  # of a router's experts
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex"),
]


def test_the_decode_ladder_holds_every_batch_and_wastes_at_most_a_quarter() -> None:
    for max_batch in (1, 2, 7, 8, 64, 100, 256):
        ladder = decode_ladder(max_batch)
        assert ladder == sorted(set(ladder))
        assert ladder[-1] == max_batch
        assert len(ladder) <= 32
        for batch in range(9, max_batch + 1):
            size = next(size for size in ladder if size >= batch)
            assert size - batch < max(8, batch / 4)


def test_the_ladder_of_mixed_steps_ends_with_one_that_holds_the_largest() -> None:
    assert mixed_ladder(100) == [128]
    assert mixed_ladder(512 + 64) == [128, 256, 512, 768]
    assert mixed_ladder(100_000) == list(MIXED_TOKENS)


def make_engine(family: str, **fields) -> tuple[Engine, torch.nn.Module]:
    reference = make_family(family).cuda()
    config = EngineConfig(
        device="cuda", dtype="float32", block_size=16, kv_cache_gib=0.02, chunk_tokens=48, max_batch=16
    )
    return assemble_engine(config, PagedModel(make_family(family).cuda()), SystemClock()), reference


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(211) for _ in range(rng.randint(1, 150))] for _ in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    engine, reference = make_engine(family)
    texts = prompts(24, 1)
    sequences = [make_sequence(f"{i:02}", text, 5 + i) for i, text in enumerate(texts)]
    results = asyncio.run(run_sequences(engine.loop, sequences))
    same = total = 0
    for index, text in enumerate(texts):
        expected = list(text)
        for _ in range(5 + index):
            with torch.no_grad():
                logits = reference(input_ids=torch.tensor([expected], device="cuda"), use_cache=False).logits
            expected.append(int(logits[0, -1].argmax()))
        got = [token.token_id for token in results[f"{index:02}"]]
        assert len(got) == 5 + index
        same += got == expected[len(text) :]
        total += 1
    assert same == total


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss", "mixtral"])
def test_sequences_that_begin_alike_say_what_transformers_says(family: str, monkeypatch) -> None:
    fields = {"max_position_embeddings": 2048}
    reference = make_family(family, **fields).cuda()
    config = EngineConfig(
        device="cuda", dtype="float32", block_size=16, kv_cache_gib=0.1, chunk_tokens=512, max_batch=16
    )
    engine = assemble_engine(config, PagedModel(make_family(family, **fields).cuda()), SystemClock())
    numbers, shared = PrefixGroups.numbers, []

    def recorded(groups: PrefixGroups) -> NDArray[np.int32]:
        found = numbers(groups)
        shared.append(np.count_nonzero(found[0]))
        return found

    monkeypatch.setattr(PrefixGroups, "numbers", recorded)
    rng = random.Random(5)
    begins = [[rng.randrange(211) for _ in range(length)] for length in (640, 300)]
    tails = [[rng.randrange(211) for _ in range(rng.randint(1, 90))] for _ in range(20)]
    texts = [begins[index % 3 == 0] + tail for index, tail in enumerate(tails)]

    async def run() -> dict[str, list[SampledToken]]:
        await run_sequences(engine.loop, [make_sequence(f"begin-{at}", begins[at], 1) for at in range(2)])
        asked = [make_sequence(f"{at:02}", text, 5 + 2 * at) for at, text in enumerate(texts)]
        return await run_sequences(engine.loop, asked)

    results = asyncio.run(run())
    assert max(shared) >= 10, "sequences of both families in groups"
    for index, text in enumerate(texts):
        expected = list(text)
        for _ in range(5 + 2 * index):
            with torch.no_grad():
                logits = reference(input_ids=torch.tensor([expected], device="cuda"), use_cache=False).logits
            expected.append(int(logits[0, -1].argmax()))
        assert [token.token_id for token in results[f"{index:02}"]] == expected[len(text) :]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3"])
def test_vectors_of_the_last_token_are_of_transformers_states_beside_sequences_that_decode(
    family: str,
) -> None:
    engine, reference = make_engine(family)
    texts = prompts(24, 1)
    asked = [
        make_sequence(f"{attempt}-{at}", text, 1, pooling=Pooling.LAST)
        for attempt in range(2)
        for at, text in enumerate(texts)
    ]
    others = [make_sequence(f"{at}-text", text, 9) for at, text in enumerate(texts[:8])]

    async def run_twice() -> None:
        await run_sequences(engine.loop, [*asked[: len(texts)], *others])
        await run_sequences(engine.loop, asked[len(texts) :])

    asyncio.run(run_twice())
    for sequence in asked:
        wanted = last_state(reference, sequence.token_ids).cpu()
        found = torch.frombuffer(bytearray(sequence.vector()), dtype=torch.float32)
        assert (found - wanted).norm() < 1e-3 * wanted.norm(), sequence.request_id
    assert any(sequence.num_matched_tokens for sequence in asked[len(texts) :])


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "deepseek_v3"])
def test_whole_prompts_that_are_captured_give_the_tokens_of_transformers_and_report_their_layers(
    family: str,
) -> None:
    fields = {"max_position_embeddings": 8192}
    reference = make_family(family, **fields).cuda()
    config = EngineConfig(
        device="cuda", dtype="float32", block_size=16, kv_cache_gib=0.1, chunk_tokens=4096, max_batch=16
    )
    engine = assemble_engine(config, PagedModel(make_family(family, **fields).cuda()), SystemClock())
    launch, groups = engine.runner.launch, []

    def recorded(plan):
        launched = launch(plan)
        if plan.entries and plan.entries[0].num_tokens > 1:
            groups.append([(group.first, group.count) for group in launched.layer_groups])
            for group in launched.layer_groups:
                group.wait()
        return launched

    engine.runner.launch = recorded
    rng = random.Random(3)
    texts = [[rng.randrange(211) for _ in range(length)] for length in (2048, 2049, 3000, 4096)]

    async def run_one_by_one() -> list[list[int]]:
        found = []
        for text in texts:
            results = await run_sequences(engine.loop, [make_sequence("a", text, 3)])
            found.append([token.token_id for token in results["a"]])
        return found

    for text, found in zip(texts, asyncio.run(run_one_by_one()), strict=True):
        expected = list(text)
        for _ in range(3):
            with torch.no_grad():
                logits = reference(input_ids=torch.tensor([expected], device="cuda"), use_cache=False).logits
            expected.append(int(logits[0, -1].argmax()))
        assert found == expected[len(text) :]
    assert groups == [[(0, 1), (1, 1)]] * len(texts)


WIDE = {
    "llama": {"head_dim": 128},
    "gemma3_text": {"head_dim": 128, "sliding_window": 512},
    "deepseek_v3": {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}
"""Heads of the widths of published models, which cuDNN takes."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [("llama", "auto"), ("llama", "fp8"), ("gemma3_text", "auto"), ("deepseek_v3", "auto")],
)
def test_captured_prompts_of_bfloat16_among_other_steps_give_the_states_of_those_that_are_not(
    family: str, kv_dtype: str, monkeypatch
) -> None:
    lengths = [2048, 700, 2049, 3000, 40, 4096, 3500]
    rng = random.Random(4)
    texts = [[rng.randrange(211) for _ in range(length)] for length in lengths]
    tails = [[rng.randrange(211) for _ in range(17)] for _ in lengths]

    def states(ladder: list[int]) -> list[torch.Tensor]:
        monkeypatch.setattr("engine.cuda_graph.prompt_ladder", lambda most: ladder)
        module = make_family(family, max_position_embeddings=8192, initializer_range=0.1, **WIDE[family])
        config = EngineConfig(
            device="cuda", block_size=16, kv_cache_gib=0.3, chunk_tokens=4096, max_batch=16, kv_dtype=kv_dtype
        )
        engine = assemble_engine(config, PagedModel(module.to("cuda", torch.bfloat16)), SystemClock())

        async def run_all() -> list[torch.Tensor]:
            found = []
            for turn in range(2):
                for at, (text, tail) in enumerate(zip(texts, tails, strict=True)):
                    asked = make_sequence("asked", text + tail * turn, 1, pooling=Pooling.LAST)
                    others = [make_sequence(f"{n}", tail[: 9 + n], 4) for n in range(at % 3)]
                    await run_sequences(engine.loop, [asked])
                    await run_sequences(engine.loop, others or [make_sequence("last", tail, 2)])
                    found.append(torch.frombuffer(bytearray(asked.vector()), dtype=torch.float32))
            return found

        return asyncio.run(run_all())

    captured, launched = states(list(prompt_ladder(4096))), states([])
    apart = [float((a - b).norm() / b.norm()) for a, b in zip(captured, launched, strict=True)]
    assert max(apart) < 0.02, apart


@pytest.mark.gpu
def test_sequences_under_grammars_say_the_same_launched_ahead_beside_others_and_alone(tmp_path) -> None:
    vocabulary = Vocabulary.load(write_model_folder(tmp_path), VOCAB_SIZE)
    reference = make_spelling_model().cuda()
    config = EngineConfig(
        device="cuda", dtype="float32", block_size=16, kv_cache_gib=0.02, chunk_tokens=48, max_batch=16
    )
    engine = assemble_engine(config, PagedModel(make_spelling_model().cuda()), SystemClock())
    texts = [[70 + index, 80, 90, 100 + index] for index in range(6)]
    expected = [
        constrained_reference(reference, vocabulary, text, GRAMMARS[at % 3]) for at, text in enumerate(texts)
    ]

    def asked(**fields) -> list[Sequence]:
        return [
            constrained_sequence(vocabulary, f"r{at}", text, GRAMMARS[at % 3], **fields)
            for at, text in enumerate(texts)
        ]

    async def run_twice() -> None:
        free = [make_sequence(f"free{at}", text, 40) for at, text in enumerate(texts)]
        together = await run_sequences(engine.loop, [*asked(), *free])
        assert [[token.token_id for token in together[f"r{at}"]] for at in range(6)] == expected
        alone = await run_sequences(engine.loop, asked(num_logprobs=2))
        assert [[token.token_id for token in alone[f"r{at}"]] for at in range(6)] == expected
        bias = SamplingParams(temperature=0.9, logit_bias=((70, 3.0),), seed=7)
        drawn = [await run_sequences(engine.loop, asked(sampling=bias)) for _ in range(2)]
        assert drawn[0] == drawn[1]

    asyncio.run(run_twice())


@pytest.mark.gpu
def test_sampling_stop_tokens_and_penalties_do_not_depend_on_who_else_runs() -> None:
    engine, _ = make_engine("llama")
    params = [
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.9, seed=4),
        SamplingParams(temperature=0.7, repetition_penalty=1.3, seed=5),
        SamplingParams(temperature=0.0),
    ]
    texts = prompts(len(params), 2)

    async def run(indices: list[int]) -> dict[str, list[int]]:
        sequences = [
            make_sequence(
                str(i),
                texts[i],
                sampling=params[i],
                stop=StopParams(40, stop_token_ids=(1, 2, 3, 4, 5, 6, 7)),
            )
            for i in indices
        ]
        results = await run_sequences(engine.loop, sequences)
        return {name: [token.token_id for token in tokens] for name, tokens in results.items()}

    async def run_alone_and_together() -> None:
        alone = {}
        for index in range(len(params)):
            alone |= await run([index])
        assert await run(list(range(len(params)))) == alone

    # In one event loop, whose the engine's own is.
    asyncio.run(run_alone_and_together())
