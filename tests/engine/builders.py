"""Engines, sequences and a way to run them, with defaults, for the tests of the engine."""

import asyncio
from collections.abc import Sequence as Items
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from base.block_hash import chain_root
from base.clock import SystemClock
from base.request import RequestId, SampledToken, SamplingParams, StopParams
from engine.block_pool import BlockPool
from engine.cpu_runner import Runner
from engine.loop import EngineLoop
from engine.model import PagedModel
from engine.paged_cache import PagedCache
from engine.scaled_kv import scaled_layout
from engine.scheduler import Scheduler
from engine.self_check import eager_logits, require_faithful
from engine.sequence import Sequence
from engine.step import SequenceOutput

ROOT = chain_root("model", "layout")
GREEDY = SamplingParams(temperature=0.0)


def make_sequence(name: str, token_ids: Items[int], max_tokens: int = 8, **fields) -> Sequence:
    stop = fields.pop("stop", StopParams(max_tokens))
    sampling = fields.pop("sampling", GREEDY)
    return Sequence(RequestId(name), list(token_ids), len(token_ids), ROOT, sampling, stop, **fields)


def make_loop(
    model: PagedModel,
    num_blocks: int = 256,
    block_size: int = 16,
    chunk_tokens: int = 48,
    max_batch: int = 16,
    kv_dtype: str = "auto",
) -> EngineLoop:
    shape = model.shape
    layout = replace(shape, block_size=block_size)
    if kv_dtype == "fp8":
        layout = scaled_layout(layout)
    cache = PagedCache(layout, num_blocks, model.device)
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(pool, block_size, chunk_tokens, max_batch, model.max_model_len)
    return EngineLoop(Runner(model, cache, SystemClock()), scheduler, pool, SystemClock())


def make_model(model: PreTrainedModel) -> PagedModel:
    """Wrap a model as `build_engine` does, self-check included."""
    paged = PagedModel(model)
    shape = paged.shape
    require_faithful(paged, replace(shape, block_size=16), eager_logits(paged))
    return paged


async def run_sequences(loop: EngineLoop, sequences: Items[Sequence]) -> dict[str, list[SampledToken]]:
    """Run sequences to their end and return what was sampled; nothing stays held."""
    results = {sequence.request_id: [] for sequence in sequences}
    all_ended = asyncio.Event()
    running = set(results)

    def listen(output: SequenceOutput) -> None:
        results[output.sequence.request_id] += output.tokens
        if output.finish_reason is not None:
            running.discard(output.sequence.request_id)
            loop.release(output.sequence)
        if not running:
            all_ended.set()

    for sequence in sequences:
        loop.add(sequence, listen)
    steps = asyncio.create_task(loop.run())
    await asyncio.wait([steps, asyncio.create_task(all_ended.wait())], return_when=asyncio.FIRST_COMPLETED)
    steps.cancel()
    with pytest.raises(asyncio.CancelledError):
        await steps
    loop.scheduler.check()
    loop.pool.check()
    assert loop.pool.num_held == 0
    return results


async def greedy(loop: EngineLoop, prompts: Items[Items[int]], max_tokens: int, **fields) -> list[list[int]]:
    """Return the tokens that the engine generates for each prompt, all added at once."""
    names = [f"r{index:03}" for index in range(len(prompts))]
    sequences = [
        make_sequence(name, prompt, max_tokens, **fields) for name, prompt in zip(names, prompts, strict=True)
    ]
    results = await run_sequences(loop, sequences)
    return [[token.token_id for token in results[name]] for name in names]


def reference(
    model: PreTrainedModel,
    prompt: Items[int],
    max_tokens: int,
    eos: int | None = None,
    attention: str = "eager",
) -> list[int]:
    """Return the tokens that transformers' `generate` makes, with its own attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        output = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=eos,
            pad_token_id=0,
        )
    finally:
        model.set_attn_implementation(before)
    return output[0, len(prompt) :].tolist()
