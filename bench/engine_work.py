"""The work that `bench/engine.py` times: prompts, and three ways to run them through an engine.

Each function returns seconds and leaves the engine empty. Prompts are random and never
repeat, so the prefix cache finds nothing.
"""

from __future__ import annotations

import asyncio
import random
import time

from base.block_hash import BlockHash
from base.request import RequestId, SamplingParams, StopParams
from engine.build import Engine
from engine.sequence import Sequence
from engine.step import SequenceOutput

GREEDY = SamplingParams(temperature=0.0)
ROOT = BlockHash(bytes(16))


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

    def sequence(self, num_tokens: int, max_tokens: int) -> Sequence:
        """Return a greedy sequence with a random prompt."""
        self._made += 1
        token_ids = self._random.choices(range(self._vocab_size), k=num_tokens)
        name = RequestId(f"{self._made:06}")
        return Sequence(name, token_ids, num_tokens, ROOT, GREEDY, StopParams(max_tokens))


def throughput_s(engine: Engine, prompts: Prompts, lens: list[tuple[int, int]]) -> float:
    """Return seconds from adding all requests at once to the last token of the last one."""
    sequences = [prompts.sequence(prompt, output) for prompt, output in lens]
    times = asyncio.run(_run(engine, sequences))
    return times[-1]


def prefill_s(engine: Engine, prompts: Prompts, length: int, count: int) -> float:
    """Return seconds from adding `count` prompts at once to the first token of the last one."""
    return throughput_s(engine, prompts, [(length, 1)] * count)


def decode_step_s(engine: Engine, prompts: Prompts, batch: int, context: int, steps: int) -> float:
    """Return the mean seconds of a decode step of `batch` sequences.

    Their first `context` tokens count as computed, as after a hand-off from another node;
    the KV is whatever the blocks hold. The first step is left out.
    """
    sequences = [prompts.sequence(context, steps + 1) for _ in range(batch)]
    for sequence in sequences:
        sequence.block_table += engine.pool.allocate(engine.layout.num_blocks(context))
        sequence.num_computed_tokens = context - 1
    times = asyncio.run(_run(engine, sequences))
    return (times[-1] - times[0]) / steps


async def _run(engine: Engine, sequences: list[Sequence]) -> list[float]:
    """Run sequences to their end; return when each step told its last listener, seconds from the start."""
    loop = engine.loop
    remaining = set(sequences)
    ended = asyncio.Event()
    at: dict[int, float] = {}
    started_s = time.perf_counter()

    def listen(output: SequenceOutput) -> None:
        at[loop.num_steps] = time.perf_counter() - started_s
        if output.finish_reason is not None:
            remaining.discard(output.sequence)
            loop.release(output.sequence)
            if not remaining:
                ended.set()

    for sequence in sequences:
        loop.add(sequence, listen)
    steps = asyncio.create_task(loop.run())
    await asyncio.wait([steps, asyncio.create_task(ended.wait())], return_when=asyncio.FIRST_COMPLETED)
    steps.cancel()
    await asyncio.gather(steps, return_exceptions=True)
    assert engine.pool.num_held == 0
    return [at[step] for step in sorted(at)]
