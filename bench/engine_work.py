"""The work that `bench/engine.py` times: prompts, and three ways to run them through an engine.

Prompts are random and never repeat, so the prefix cache finds nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import torch

from base.block_hash import BlockHash
from base.lifetime import spare_collector
from base.request import RequestId, SamplingParams, StopParams
from engine.build import Engine
from engine.loop import EngineLoop
from engine.paged_cache import PagedCache
from engine.sequence import Sequence
from engine.step import SequenceOutput

GREEDY = SamplingParams(temperature=0.0)
ROOT = BlockHash(bytes(16))


def randomize(cache: PagedCache) -> None:
    """Fill all blocks with random numbers: a GPU multiplies zeros faster."""
    for field in cache.layout.fields:
        for rows in cache.field(field.name).unbind(1):
            rows.copy_(torch.randn(rows.shape, dtype=torch.bfloat16, device=rows.device))


class Prompts:
    """Random prompts that never repeat."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._made = 0

    def uniform_lens(self, count: int, low: int, high: int) -> list[tuple[int, int]]:
        """Return (prompt, output) tokens of `count` requests, each uniform in [low, high]."""
        draw = self._random.randint
        return [(draw(low, high), draw(low, high)) for _ in range(count)]

    def sequence(self, num_tokens: int, max_tokens: int, sampling: SamplingParams = GREEDY) -> Sequence:
        """Return a sequence with a random prompt."""
        self._made += 1
        token_ids = self._random.choices(range(self._vocab_size), k=num_tokens)
        name = RequestId(f"{self._made:06}")
        return Sequence(name, token_ids, num_tokens, ROOT, sampling, StopParams(max_tokens))


class Worker(Protocol):
    """What does the work of the table: an engine (`Driver`), or a server that has one (`bench/server.py`)."""

    async def throughput_s(self, lens: list[tuple[int, int]]) -> float: ...

    async def prefill_s(self, length: int, count: int) -> float: ...

    async def decode_step_s(self, batch: int, context: int, steps: int) -> float: ...


@asynccontextmanager
async def stepping(loop: EngineLoop) -> AsyncIterator[None]:
    """Have an engine's loop run in the body."""
    steps = asyncio.create_task(loop.run())
    try:
        yield
    finally:
        steps.cancel()
        await asyncio.gather(steps, return_exceptions=True)


async def run_to_end(
    loop: EngineLoop,
    sequences: list[Sequence],
    heard: Callable[[SequenceOutput], None] = lambda output: None,
) -> None:
    """Add sequences at once; return when all have ended and are released. `heard` takes each output."""
    remaining = set(sequences)
    ended = asyncio.Event()

    def listen(output: SequenceOutput) -> None:
        heard(output)
        if output.finish_reason is not None:
            remaining.discard(output.sequence)
            loop.release(output.sequence)
            if not remaining:
                ended.set()

    for sequence in sequences:
        loop.add(sequence, listen)
    await ended.wait()


class Driver:
    """Runs work through an engine whose loop keeps running, as in a node.

    One device thread for all of it matters: cuDNN's plans belong to a thread, and making
    one takes 30 ms.
    """

    def __init__(self, engine: Engine, prompts: Prompts) -> None:
        self._engine = engine
        self._prompts = prompts
        spare_collector()
        # what a sequence finds in blocks that count as computed
        randomize(engine.cache)
        self._steps = asyncio.create_task(engine.loop.run())

    async def close(self) -> None:
        self._steps.cancel()
        await asyncio.gather(self._steps, return_exceptions=True)

    async def throughput_s(self, lens: list[tuple[int, int]]) -> float:
        """Return seconds from adding requests of (prompt, output) tokens at once to their last token."""
        return (await self._run([self._prompts.sequence(prompt, output) for prompt, output in lens]))[-1]

    async def prefill_s(self, length: int, count: int, prefix: int = 0) -> float:
        """Return seconds from adding `count` prompts at once to the first token of the last one.

        Args:
            length: Tokens to compute.
            prefix: Tokens before them that count as computed; whole blocks.
        """
        sequences = [self._prompts.sequence(prefix + length, 1) for _ in range(count)]
        for sequence in sequences:
            sequence.block_table += self._engine.pool.allocate(self._engine.layout.num_blocks(prefix))
            sequence.num_computed_tokens = prefix
        return (await self._run(sequences))[-1]

    async def decode_step_s(
        self,
        batch: int,
        context: int,
        steps: int,
        sampling: SamplingParams = GREEDY,
        change: Callable[[int, Sequence], None] | None = None,
    ) -> float:
        """Return the mean seconds of a decode step of `batch` sequences.

        Their first `context` tokens count as computed, as after a hand-off from another
        node; the KV is whatever the blocks hold. The first step is left out. `change` is called with each
        sequence and its place, before it is added.
        """
        sequences = [self._prompts.sequence(context, steps + 1, sampling) for _ in range(batch)]
        for at, sequence in enumerate(sequences):
            if change is not None:
                change(at, sequence)
            blocks = self._engine.layout.num_blocks(context)
            sequence.block_table += self._engine.pool.allocate(blocks)
            sequence.num_computed_tokens = context - 1
        times = await self._run(sequences)
        return (times[-1] - times[0]) / steps

    async def chunk_step_s(
        self, chunk_tokens: int, prefix: int, batch: int, context: int, steps: int
    ) -> float:
        """Return the mean seconds of a step of `chunk_tokens`: `batch` sequences and a part of a prompt.

        The prompt's `prefix` counts as computed, and so does what the sequences have. The first of `steps`
        is left out, so the chunks come after `prefix + (chunk_tokens - batch) * steps / 2` in the mean.
        """
        pool, layout, scheduler = self._engine.pool, self._engine.layout, self._engine.scheduler
        prompt = self._prompts.sequence(prefix + (chunk_tokens - batch) * steps, 1)
        prompt.block_table += pool.allocate(layout.num_blocks(prefix))
        prompt.num_computed_tokens = prefix
        sequences = [self._prompts.sequence(context, steps) for _ in range(batch)]
        for sequence in sequences:
            sequence.block_table += pool.allocate(layout.num_blocks(context))
            sequence.num_computed_tokens = context - 1
        usual, scheduler.chunk_tokens = scheduler.chunk_tokens, chunk_tokens
        try:
            times = await self._run([*sequences, prompt])
        finally:
            scheduler.chunk_tokens = usual
        assert len(times) == steps, "every step has a chunk and all sequences"
        return (times[-1] - times[0]) / (steps - 1)

    async def _run(self, sequences: list[Sequence]) -> list[float]:
        """Run sequences to their end; return when each step notified its last listener, seconds."""
        loop = self._engine.loop
        at: dict[int, float] = {}
        started_s = time.perf_counter()

        def heard(output: SequenceOutput) -> None:
            at[loop.num_steps] = time.perf_counter() - started_s

        waiting = asyncio.create_task(run_to_end(loop, sequences, heard))
        done, _ = await asyncio.wait([self._steps, waiting], return_when=asyncio.FIRST_COMPLETED)
        if waiting not in done:
            waiting.cancel()
            self._steps.result()  # raises what ended the engine's loop
        waiting.result()  # raises what a sequence was refused with
        return [at[step] for step in sorted(at)]
