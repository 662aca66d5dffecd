"""CUDA graphs of whole steps, for a ladder of shapes.

A step of a few tokens is a few hundred kernels of microseconds, and launching them from Python takes 30 ms
for 32 layers; replaying them as a graph takes a tenth of a millisecond. A graph has fixed shapes, so a step
is padded up to the next shape of the ladder. The graphs share one memory pool: no two run at once, and what a
graph computed is read before the next one runs.

There are three ladders:

    decode steps     sequences of one token
    mixed steps      all sequences of one token and `GRAPH_CHUNKS` chunks, none long (`long_chunks.py`)
    whole prompts    one prompt that is a long chunk: one graph for each group of layers, so that KV leaves
                     while later layers compute (`layer_hooks.py`); other steps are one graph

Larger steps are not captured: their kernels take longer than launching them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.layer_hooks import LayerHooks, mark_on_stream
from engine.long_chunks import MIN_TOKENS, STEP_TOKENS, LongChunk, long_chunks
from engine.step import LayerGroup, StepPlan
from engine.step_memory import StepShape

GRAPH_CHUNKS = 32
"""Largest number of chunks in a captured step."""

MIXED_TOKENS = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Ladder of tokens for steps with chunks."""

PROMPT_TOKENS = range(MIN_TOKENS, 4096 + 1, STEP_TOKENS)
"""Ladder of tokens for whole prompts."""

PROMPT_CHUNKS = 2
"""Chunks of a step that is a whole prompt, one of them empty: of one, the compiler would make a variant."""


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


def prompt_ladder(max_tokens: int) -> list[int]:
    """Return numbers of tokens for whole prompts, up to the first that holds `max_tokens`."""
    if max_tokens < MIN_TOKENS:
        return []
    smaller = [tokens for tokens in PROMPT_TOKENS if tokens < max_tokens]
    return list(PROMPT_TOKENS[: len(smaller) + 1])


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured step."""

    pieces: tuple[torch.cuda.CUDAGraph, ...]
    """One for each group of layers that is reported, and one of what follows."""
    groups: tuple[LayerGroup, ...]


class StepGraphs:
    """Owns the captured steps. Belongs to the device thread."""

    def __init__(
        self,
        run: Callable[[StepShape, tuple[LongChunk, ...]], None],
        hooks: LayerHooks,
        max_batch: int,
        max_blocks: int,
        max_chunk: int,
    ) -> None:
        """Begin without graphs.

        Args:
            run: Runs a step that lies in the step memory, and keeps its result.
            max_chunk: Tokens of a chunk at most.
        """
        self._run = run
        self._hooks = hooks
        self._decode = [StepShape(size, size, 0, max_blocks) for size in decode_ladder(max_batch)]
        self._mixed = [
            StepShape(size, min(max_batch, size), GRAPH_CHUNKS, max_blocks)
            for size in mixed_ladder(max_chunk + max_batch)
        ]
        self._prompts = [StepShape(size, 0, PROMPT_CHUNKS, max_blocks) for size in prompt_ladder(max_chunk)]
        self._graphs: dict[StepShape, StepGraph] = {}

    def capture(self) -> None:
        """Capture all ladders, largest first: smaller ones then fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        for shape in (*reversed(self._prompts), *reversed(self._mixed), *reversed(self._decode)):
            # Once outside of the graph, for what compiles or allocates on first use.
            self._run(shape, prompt_chunks(shape))
            torch.cuda.synchronize()  # capture must not overlap with other work of this thread
            self._graphs[shape] = self._captured(shape, pool)

    def _captured(self, shape: StepShape, pool: Any) -> StepGraph:
        pieces: list[torch.cuda.CUDAGraph] = []
        with ExitStack() as piece:

            def begin_piece() -> Callable[[], None]:
                piece.close()
                pieces.append(torch.cuda.CUDAGraph())
                # This thread's errors alone: NCCL has a thread that looks after its events.
                capture = torch.cuda.graph(pieces[-1], pool=pool, capture_error_mode="thread_local")
                piece.enter_context(capture)
                return torch.cuda.synchronize

            begin_piece()
            chunks = prompt_chunks(shape)
            if chunks:
                self._hooks.begin(mark=begin_piece)
            self._run(shape, chunks)
            groups = self._hooks.end()
        return StepGraph(tuple(pieces), groups)

    def shape_of(self, plan: StepPlan) -> StepShape | None:
        """Return the smallest captured shape that holds `plan`, None if none does."""
        num_tokens, num_single = plan.num_tokens, plan.num_single
        for shape in self._ladder_of(plan):
            if shape.num_tokens >= num_tokens and shape.num_single >= num_single:
                return shape
        return None

    def _ladder_of(self, plan: StepPlan) -> list[StepShape]:
        num_chunks = len(plan.entries) - plan.num_single
        if not num_chunks:
            return self._decode
        if long_chunks(plan):
            is_prompt = len(plan.entries) == 1 and not plan.entries[0].start
            return self._prompts if is_prompt else []
        return self._mixed if num_chunks <= GRAPH_CHUNKS else []

    def replay(self, shape: StepShape) -> tuple[LayerGroup, ...]:
        """Queue a step, and return the groups of layers that it reports."""
        graph = self._graphs[shape]
        groups = []
        for piece, group in zip(graph.pieces, graph.groups, strict=False):
            piece.replay()
            groups.append(replace(group, wait=mark_on_stream()))
        graph.pieces[-1].replay()
        return tuple(groups)


def prompt_chunks(shape: StepShape) -> tuple[LongChunk, ...]:
    """Return the chunk of a shape for whole prompts; none: it is for other steps."""
    if shape.num_single or shape.num_chunks != PROMPT_CHUNKS:
        return ()
    return (LongChunk(shape.num_tokens, 0, is_padded=True),)
