"""CUDA graphs of whole steps, for a ladder of shapes.

A step of a few tokens is a few hundred kernels of microseconds, and launching them from Python takes 30 ms
for 32 layers; replaying them as a graph takes a tenth of a millisecond. A graph has fixed shapes, so a step
is padded up to the next shape of the ladder. The graphs share one memory pool: no two run at once, and what a
graph computed is read before the next one runs.

Decode steps have their own ladder. Steps with chunks have another, in which every shape holds all sequences
of one token and `GRAPH_CHUNKS` chunks. Larger steps are not captured: their kernels take longer than
launching them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.long_chunks import long_chunks
from engine.step import StepPlan
from engine.step_memory import StepShape

GRAPH_CHUNKS = 32
"""Largest number of chunks in a captured step."""

MIXED_TOKENS = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Ladder of tokens for steps with chunks."""


def decode_ladder(max_batch: int) -> list[int]:
    """Return batch sizes: at most an eighth of a step is padding from 64 on, a quarter from 8 on."""
    sizes = []
    size = 1
    while size < max_batch:
        sizes.append(size)
        size += size if size < 8 else max(8, 1 << (size.bit_length() - 3))
    return [*sizes, max_batch]


def mixed_ladder(max_tokens: int) -> list[int]:
    """Return numbers of tokens for steps with chunks, up to the first that holds `max_tokens`."""
    smaller = [tokens for tokens in MIXED_TOKENS if tokens < max_tokens]
    return list(MIXED_TOKENS[: len(smaller) + 1])


class StepGraphs:
    """Owns the captured steps. Belongs to the device thread."""

    def __init__(self, run: Callable[[StepShape], None], max_batch: int, max_blocks: int) -> None:
        """Begin without graphs; `run` runs a step that lies in the step memory, and keeps its result."""
        self._run = run
        self._max_batch = max_batch
        self._max_blocks = max_blocks
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, chunk_tokens: int) -> None:
        """Capture both ladders, largest first: smaller ones then fit into its memory."""
        mixed = [
            StepShape(size, min(self._max_batch, size), GRAPH_CHUNKS, self._max_blocks)
            for size in mixed_ladder(chunk_tokens + self._max_batch)
        ]
        decode = [StepShape(size, size, 0, self._max_blocks) for size in decode_ladder(self._max_batch)]
        for shape in (*reversed(mixed), *reversed(decode)):
            # Once outside of the graph, for what compiles or allocates on first use.
            self._run(shape)
            torch.cuda.synchronize()  # capture must not overlap with other work of this thread
            graph = torch.cuda.CUDAGraph()
            # This thread's errors alone: NCCL has a thread that looks after its events.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._run(shape)
            self._graphs[shape] = graph

    def shape_of(self, plan: StepPlan) -> StepShape | None:
        """Return the smallest captured shape that holds `plan`, None if none does."""
        num_chunks = len(plan.entries) - plan.num_single
        if num_chunks > GRAPH_CHUNKS or long_chunks(plan):
            return None
        for shape in reversed(self._graphs):
            same_kind = bool(shape.num_chunks) == bool(num_chunks)
            if same_kind and shape.num_tokens >= plan.num_tokens and shape.num_single >= plan.num_single:
                return shape
        return None

    def replay(self, shape: StepShape) -> None:
        self._graphs[shape].replay()
