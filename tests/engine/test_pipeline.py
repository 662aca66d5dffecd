"""Stages that have some of the layers each say what one process says, token for token."""

import asyncio
import copy
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from base.block_hash import hash_chain
from base.clock import SystemClock
from base.config import EngineConfig
from base.errors import ConfigError, LostError
from base.request import FinishReason, SamplingParams
from engine.arrivals import PrefixArrivals
from engine.build import build_engine
from engine.model import PagedModel
from engine.pipeline import Stage, cut_to_stage, layers_of, split_layers
from engine.rank_group import GroupShape
from engine.runner import StepRunner
from tests.engine.builders import ROOT, make_loop, make_sequence, run_sequences
from tests.engine.stages import Stages, deep_llama
from tests.engine.test_families import random_model
from tests.engine.test_gpu_model import make_family
from tests.kinds_of_kv import KINDS

SMALL = EngineConfig(device="cpu", block_size=16, kv_cache_gib=0.001, max_batch=6, threads=1)


def make_sequences():
    """Eight, greedy and sampled; two begin alike, so that prefixes are matched."""
    rng = random.Random(3)
    prompts = [[rng.randrange(211) for _ in range(rng.randint(1, 150))] for _ in range(6)]
    prompts += [[5], [*prompts[1], 7]]
    return [
        make_sequence(
            f"{index:02}", prompt, 4, sampling=SamplingParams(temperature=0.8 * (index % 2), seed=index)
        )
        for index, prompt in enumerate(prompts)
    ]


def said(results):
    return {name: [token.token_id for token in tokens] for name, tokens in results.items()}


@pytest.fixture(scope="module")
def family():
    return deep_llama()


@pytest.fixture(scope="module")
def alone(family):
    """What one process says."""
    tokens = said(asyncio.run(run_sequences(make_loop(PagedModel(family)), make_sequences())))
    assert sum(map(len, tokens.values())) == 8 * 4
    return tokens


@pytest.mark.parametrize(
    ("split", "chunk_tokens", "num_blocks"),
    [
        ((3, 2), 48, 64),
        ((2, 1, 1, 1), 200, 12),
        *(pytest.param(*row, marks=pytest.mark.full) for row in (((1, 4), 17, 64), ((1, 3, 1), 16, 64))),
    ],
)
async def test_stages_generate_the_tokens_of_one_process(family, alone, split, chunk_tokens, num_blocks):
    """In 12 blocks some sequences wait for others, or lose theirs and are computed again."""
    with Stages(family, split, chunk_tokens, num_blocks).running() as loop:
        assert said(await run_sequences(loop, make_sequences())) == alone


@pytest.mark.parametrize("kind", list(KINDS)[1:])
async def test_stages_keep_any_kind_of_kv(kind):
    family, kv_dtype = KINDS[kind]
    model = make_family(family, num_hidden_layers=3)
    single = make_loop(PagedModel(copy.deepcopy(model)), kv_dtype=kv_dtype)
    alone = said(await run_sequences(single, make_sequences()))
    with Stages(model, (2, 1), 17, 12, kv_dtype=kv_dtype).running() as loop:
        assert said(await run_sequences(loop, make_sequences())) == alone


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_stages_on_gpus_generate_the_tokens_of_one_process(family):
    """In Triton's interpreter, which takes seconds for a step."""

    def some():
        return [make_sequence("a", range(40), 2), make_sequence("b", range(60, 93), 2)]

    expected = said(await run_sequences(make_loop(PagedModel(family)), some()))
    with Stages(family, (3, 2), 32, on_gpu=True).running() as loop:
        assert said(await run_sequences(loop, some())) == expected


class OrderedRunner(StepRunner):
    """Refuses to begin a step in the last stage before the first has run the next one."""

    is_pipelined = True

    def __init__(self, runner, ranks, num_chunks):
        self._runner = runner
        self._ranks = ranks
        self._num_chunks = num_chunks
        self._num_resolved = 0
        self.max_steps = runner.max_steps

    def launch(self, plan):
        step = self._runner.launch(plan)
        return replace(step, resolve=lambda: self._resolved(step))

    def _resolved(self, step):
        self._num_resolved += 1
        if self._num_resolved < self._num_chunks:
            # That is rank 1 of stage 0: an engine that waits for a chunk before it begins with the
            # next one stands still here, and fails.
            self._ranks.wait_ran([1], self._num_resolved + 1)
        return step.resolve()


async def test_the_first_stage_is_a_chunk_ahead_of_the_last(family):
    def ordered(runner, ranks):
        return OrderedRunner(runner, ranks, num_chunks=6)

    prompts = [[3] * 96, [4] * 60, [5] * 30]
    sequences = [make_sequence(f"{index}", prompt, 1) for index, prompt in enumerate(prompts)]
    expected = said(await run_sequences(make_loop(PagedModel(family)), sequences))
    # 186 tokens are 6 chunks: the second and the third prompt begin in the chunk that ends the one before.
    with Stages(family, (3, 2), chunk_tokens=32, make_runner=ordered).running() as loop:
        sequences = [make_sequence(f"{index}", prompt, 1) for index, prompt in enumerate(prompts)]
        assert said(await run_sequences(loop, sequences)) == expected
    assert loop.num_steps == 6


def watch_layers(stages, block_ids):
    """Return a list to which each layer that computes adds whether these blocks have KV of it."""
    was_there = []
    for model, cache in zip(stages.models, stages.caches, strict=True):
        for index, watched in enumerate(layers_of(model.module)):

            def look(*_, index=index, cache=cache):
                was_there.append(bool(cache.heads()[block_ids, index].any()))

            watched.layer.register_forward_pre_hook(look)
    return was_there


@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_a_stage_computes_when_its_own_layers_of_a_prefix_are_there(family, on_gpu):
    """Those of the stage after it are not: who waited for all would stand still."""
    prompt = list(range(60, 112))
    stages = Stages(family, (3, 2), 32, num_blocks=12, on_gpu=on_gpu)
    first_cache, last_cache = stages.caches
    with stages.running() as loop:
        running = asyncio.create_task(loop.run())
        tokens = await generated(loop, make_sequence("first", prompt, 2))
        chain = hash_chain(prompt, 16, ROOT)
        computed = stages.pool.match(chain)
        kept = [cache.heads()[computed].clone() for cache in stages.caches]
        assert len(computed) == 3
        stages.pool.release(computed)
        stages.pool.release(stages.pool.allocate(stages.pool.num_available))
        for cache in stages.caches:
            cache.heads().zero_()

        sequence = make_sequence("again", prompt, 2)
        block_ids = stages.pool.allocate(3)
        sequence.block_table += block_ids
        sequence.num_computed_tokens = sequence.num_matched_tokens = 48
        sequence.num_published_blocks = 3
        sequence.arrivals = PrefixArrivals((1, 1), SystemClock(), block_ids[0])
        elsewhere = stages.ranks.arriving[1]
        elsewhere.begin(block_ids[0])
        was_there = watch_layers(stages, block_ids)
        num_sent_steps = stages.ranks.num_sent_steps
        answer = asyncio.create_task(generated(loop, sequence))
        while stages.ranks.num_sent_steps == num_sent_steps:
            await asyncio.sleep(0)
        for layer in range(3):
            first_cache.heads()[block_ids, layer] = kept[0][:, layer]
            elsewhere.arrived(block_ids[0], layer + 1)
        elsewhere.end(block_ids[0])
        await asyncio.to_thread(stages.ranks.wait_ran, [1], num_sent_steps + 1)
        assert not answer.done()
        for layer in range(2):
            last_cache.heads()[block_ids, layer] = kept[1][:, layer]
            sequence.arrivals.arrived(layer + 1)
        assert await answer == tokens
        assert was_there == [True] * 5 * 2
        assert sequence.num_matched_tokens == 48
        running.cancel()
        await asyncio.wait([running])
    stages.pool.check()
    assert stages.pool.num_held == 0


async def test_a_sequence_that_is_released_while_its_chunks_are_under_way_leaks_nothing(family):
    stages = Stages(family, (2, 2, 1), chunk_tokens=16)
    with stages.running() as loop:
        running = asyncio.create_task(loop.run())
        launched = asyncio.Event()
        sequence = make_sequence("r", [7] * 150, 1)
        loop.add(sequence, lambda output: None, lambda chunk: launched.set())
        await launched.wait()
        loop.release(sequence)
        assert stages.pool.num_held, "steps under way write to its blocks"
        after = make_sequence("after", [9] * 40, 2)
        tokens = await generated(loop, after)
        running.cancel()
        await asyncio.wait([running])
    assert len(tokens) == 2
    stages.pool.check()
    assert stages.pool.num_held == 0


async def generated(loop, sequence):
    """Run one more sequence on a loop that runs already; return its tokens."""
    ended = asyncio.Event()
    tokens = []

    def listen(output):
        tokens.extend(output.tokens)
        if output.finish_reason is not None:
            loop.release(sequence)
            ended.set()

    loop.add(sequence, listen)
    await ended.wait()
    return tokens


async def test_each_stage_tells_when_its_layers_are_computed(family):
    stages = Stages(family, (2, 2, 1), chunk_tokens=64)
    chunks = []
    with stages.running() as loop:
        running = asyncio.create_task(loop.run())
        sequence = make_sequence("r", [7] * 150, 1)
        all_told = asyncio.Event()

        def on_launch(chunk):
            chunks.append(chunk)
            if len(chunks) == 3:
                all_told.set()

        loop.add(sequence, lambda output: None, on_launch)
        await all_told.wait()
        for chunk in chunks:
            assert [(group.first, group.count) for group in chunk.groups] == [(0, 2), (2, 2), (4, 1)]
            for group in chunk.groups:
                # Not on the event loop, which has to land the last of them.
                await asyncio.to_thread(group.wait)
        loop.release(sequence)
        running.cancel()
        await asyncio.wait([running])
    assert [chunk.entry.context_len for chunk in chunks] == [64, 128, 150]


def test_layers_are_split_as_wanted_or_as_equally_as_can_be():
    assert split_layers(7, 3) == (3, 2, 2)
    assert split_layers(7, 3, (1, 2, 4)) == (1, 2, 4)
    for wanted in ((1, 2, 3), (7, 0, 0), (3, 4)):
        with pytest.raises(ConfigError, match="not a split"):
            split_layers(7, 3, wanted)
    with pytest.raises(ConfigError, match="3 stages of 2 layers"):
        split_layers(2, 3)


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (1, 3), (2, 3), (4, 2)])
def test_every_rank_has_one_place_and_rank_0_is_in_the_last_stage(tensor, stages):
    shape = GroupShape(tensor, stages)
    places = [shape.place(rank) for rank in range(shape.size)]
    assert sorted(places) == [(stage, place) for stage in range(stages) for place in range(tensor)]
    assert places[0] == (stages - 1, 0)
    assert [shape.rank(*place) for place in places] == list(range(shape.size))


def engine_of(folder: Path, **fields):
    return build_engine(replace(SMALL, **fields), str(folder), SystemClock(), rank_module="bench.built_rank")


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stages", "tensor", "chunk_tokens"), [(2, 1, 48), (3, 1, 17), (1, 2, 48), (2, 2, 17), (3, 2, 200)]
)
def test_processes_over_gloo_generate_the_tokens_of_one(
    family, alone, tmp_path, stages, tensor, chunk_tokens
):
    family.save_pretrained(tmp_path)
    engine = engine_of(tmp_path, pipeline_parallel=stages, tensor_parallel=tensor, chunk_tokens=chunk_tokens)
    try:
        assert said(asyncio.run(run_sequences(engine.loop, make_sequences()))) == alone
    finally:
        engine.ranks.close()
        torch.distributed.destroy_process_group()


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_stage_that_dies_ends_its_steps_as_failed_and_whoever_waits_is_told(family, tmp_path, lost):
    family.save_pretrained(tmp_path)
    engine = engine_of(tmp_path, pipeline_parallel=3)

    async def run():
        loop = asyncio.get_running_loop()
        is_lost, failed = asyncio.Event(), asyncio.Event()
        engine.ranks.on_lost(lambda: loop.call_soon_threadsafe(is_lost.set))
        running = asyncio.create_task(engine.loop.run())
        assert len(await generated(engine.loop, make_sequence("before", [3] * 60, 2))) == 2
        os.kill(engine.ranks.pids()[lost], signal.SIGKILL)
        await is_lost.wait()
        with pytest.raises(LostError):
            engine.ranks.wait_ran([1, 2], engine.ranks.num_sent_steps + 1)
        sequence = make_sequence("after", [4] * 60, 2)
        reasons = []
        engine.loop.add(sequence, lambda output: (reasons.append(output.finish_reason), failed.set()))
        await failed.wait()
        engine.loop.release(sequence)
        running.cancel()
        await asyncio.wait([running])
        return reasons

    try:
        assert asyncio.run(run()) == [FinishReason.ERROR]
        assert engine.pool.num_held == 0
    finally:
        engine.ranks.close()
        torch.distributed.destroy_process_group()


def test_a_family_whose_layers_cannot_be_cut_out_is_refused_by_name():
    with pytest.raises(ConfigError, match="'gpt2' has no `layers`"):
        cut_to_stage(make_family("gpt2"), range(1))


def test_a_family_whose_layers_attend_twice_is_refused_by_name():
    latents = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    sizes = {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2}
    more = {**latents, **sizes, "n_routed_experts": 4, "zero_expert_num": 0, "num_key_value_heads": 4}
    model = PagedModel(random_model("longcat_flash", q_lora_rank=32, head_dim=8, **more))
    with pytest.raises(ConfigError, match="'longcat_flash' attends 2 times in 1 layers"):
        model.keep_stage(Stage(0, None, None), range(1))
