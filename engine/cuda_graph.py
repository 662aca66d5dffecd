"""CUDA graphs of whole steps, for a ladder of shapes.

A step of a few tokens is a few hundred kernels of microseconds, and launching them from Python takes 30 ms
for 32 layers; replaying them as a graph takes a tenth of a millisecond. A graph has fixed shapes, so a step
is padded up to the next shape of the ladder. The graphs share one memory pool: no two run at once, and what a
graph computed is read before the next one runs.

There are three ladders:

    decode steps     sequences of one token
    mixed steps      all sequences of one token and `GRAPH_CHUNKS` chunks, none long (`long_chunks.py`), or
                     few tokens beside such sequences or after a prefix that is not too long (`CAPTURED`)
    prompts          a long chunk that is alone and has nothing before it: one graph for each group of layers,
                     so that KV leaves while later layers compute (`layer_hooks.py`); others are one graph

Larger steps are not captured: their kernels take longer than launching them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from engine.layer_hooks import LayerHooks, mark_on_stream
from engine.long_chunks import MIN_TOKENS, STEP_TOKENS, LongChunk, long_chunks
from engine.step import LayerGroup, StepPlan, arrivals_of
from engine.step_memory import StepShape

GRAPH_CHUNKS = 32
"""Largest number of chunks in a captured step."""

MIXED_TOKENS = (128, 256, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096)
"""Ladder of tokens for steps with chunks. Llama-3.1-8B on one H200 takes 61 ms for 2,080 tokens in 2,560,
beside 32 sequences, and 74 for 2,112 in 3,072, beside 64."""


class Captured(NamedTuple):
    """How large a long step may be that is captured though it is no whole prompt."""

    pairs: int
    """Pairs of a query and a key."""
    tokens: int


CAPTURED = Captured(32 * 2**20, 3072)
CAPTURED_LATENTS = Captured(56 * 2**20, MIXED_TOKENS[-1])
"""The limits for K and V that are kept, and for latents. Of those a workspace has to hold all that long
chunks see (`kernels/expanded_latents.py`): 57,344 keys and the chunks themselves, of 32 heads at most.

Attention is slower where a step is captured, by a nanosecond for each pair in all layers, over latents by a
tenth of it, and its launches, which take 64 to 184 ms, take nothing. One H200, a chunk after a prefix, ms as
launched / captured:

    tokens, prefix    Qwen3-30B-A3B   Llama-3.1-8B in fp8   DeepSeek-V2-Lite
    1,024, 4,096      184/41          96/21
    1,024, 16,384     175/64          96/37
    1,024, 24,576                                           81/41
    2,048, 4,096      123/63          64/40
    2,048, 16,384     106/110         86/74
    2,048, 24,576                                           88/63

Llama-3.1-8B in bfloat16 took 73/58 ms for 1,024 tokens after 24,576, 85/82 for 1,152 and 84/86 for 1,536.
With nothing before them and 32 sequences beside, 2,080 tokens took 61/61 ms, 2,560 61/63 and 3,072 71/75, of
which launching holds the device's thread for 55 to 68, or for 2: tokens of the step before wait for that."""

PROMPT_TOKENS = range(MIN_TOKENS, 4096 + 1, STEP_TOKENS)
"""Ladder of tokens for prompts."""

PROMPT_CHUNKS = 2
"""Chunks of a prompt's step, one of them empty: of one, the compiler would make a variant."""


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
    return _up_to(MIXED_TOKENS, max_tokens)


def prompt_ladder(max_tokens: int) -> list[int]:
    """Return numbers of tokens for prompts, up to the first that holds `max_tokens`."""
    return _up_to(PROMPT_TOKENS, max_tokens) if max_tokens >= MIN_TOKENS else []


def _up_to(ladder: Sequence[int], most: int) -> list[int]:
    return list(ladder[: 1 + sum(rung < most for rung in ladder)])


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured step."""

    pieces: tuple[torch.cuda.CUDAGraph, ...]
    """One for each group of layers that is reported, and one of what follows."""
    groups: tuple[tuple[int, int], ...]
    """The first layer and the number of layers of each group that is reported."""


class StepGraphs:
    """Owns the captured steps. Belongs to the device thread."""

    def __init__(
        self,
        run: Callable[[StepShape, tuple[LongChunk, ...]], None],
        hooks: LayerHooks,
        max_batch: int,
        max_blocks: int,
        chunk_tokens: int,
        max_prompt: int,
        captured: Captured = CAPTURED,
    ) -> None:
        """Begin without graphs.

        Args:
            run: Runs a step that lies in the step memory and has these long chunks, and keeps its result.
            chunk_tokens: Tokens of all chunks of a step at most.
            max_prompt: Tokens of a prompt at most.
            captured: How large a long step with a prefix may be that is captured.
        """
        self._run = run
        self._hooks = hooks
        self._captured_most = captured
        self._decode = [StepShape(size, size, 0, max_blocks) for size in decode_ladder(max_batch)]
        self._mixed = [
            StepShape(size, min(max_batch, size), GRAPH_CHUNKS, max_blocks)
            for size in mixed_ladder(chunk_tokens + max_batch)
        ]
        prompts = prompt_ladder(min(chunk_tokens, max_prompt))
        self._prompts = [StepShape(size, 0, PROMPT_CHUNKS, max_blocks) for size in prompts]
        self._graphs: dict[StepShape, StepGraph] = {}

    def capture(self) -> None:
        """Capture all ladders, largest first: smaller ones then fit into its memory.

        cuDNN's plans belong to the thread that this runs on, which must outlive the graphs. The garbage
        collector waits: were it to free an earlier engine's graphs during a capture, the capture would fail.
        """
        gc.disable()
        try:
            self._capture_ladders(torch.cuda.graph_pool_handle())
        finally:
            gc.enable()

    def _capture_ladders(self, pool: Any) -> None:
        for ladder in (self._prompts, self._mixed, self._decode):
            for shape in reversed(ladder):
                chunks = (LongChunk(shape.num_tokens, 0, is_padded=True),) if ladder is self._prompts else ()
                # One token is a variant of the compiler's.
                is_first = shape is ladder[-1] or shape.num_tokens == 1
                self._warm_up(shape, chunks, all_layers=is_first)
                self._graphs[shape] = self._captured(shape, chunks, pool)

    def _warm_up(self, shape: StepShape, chunks: tuple[LongChunk, ...], all_layers: bool) -> None:
        """Run a step outside of its graph, for what compiles or allocates on first use."""
        with nullcontext() if all_layers else self._hooks.rehearsing():
            self._run(shape, chunks)
        torch.cuda.synchronize()  # capture must not overlap with other work of this thread

    def _captured(self, shape: StepShape, chunks: tuple[LongChunk, ...], pool: Any) -> StepGraph:
        pieces: list[torch.cuda.CUDAGraph] = []
        with ExitStack() as piece:

            def begin_piece() -> Callable[[], None]:
                piece.close()
                pieces.append(torch.cuda.CUDAGraph())
                # This thread's errors alone: NCCL has a thread that looks after its events.
                capture = torch.cuda.graph(pieces[-1], pool=pool, capture_error_mode="thread_local")
                piece.enter_context(capture)
                return torch.cuda.synchronize  # nobody waits for what is captured

            begin_piece()
            if chunks:
                self._hooks.begin(mark=begin_piece)
            self._run(shape, chunks)
            groups = self._hooks.end()
        return StepGraph(tuple(pieces), tuple((group.first, group.count) for group in groups))

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
        if long_chunks(plan) and not _is_sooner_captured(plan, self._captured_most):
            is_prompt = len(plan.entries) == 1 and not plan.entries[0].start
            return self._prompts if is_prompt else []
        return self._mixed if num_chunks <= GRAPH_CHUNKS else []

    def replay(self, shape: StepShape) -> tuple[LayerGroup, ...]:
        """Queue a step, and return the groups of layers that it reports."""
        graph = self._graphs[shape]
        groups = []
        for piece, (first, count) in zip(graph.pieces, graph.groups, strict=False):
            piece.replay()
            groups.append(LayerGroup(first, count, mark_on_stream()))
        graph.pieces[-1].replay()
        return tuple(groups)


def _is_sooner_captured(plan: StepPlan, most: Captured) -> bool:
    """Return whether launching a step of long chunks takes longer than attending to them as to short ones.

    A prefix that is still coming is not captured: each layer waits for its own part. Nor are whole prompts
    alone: their groups of layers are reported."""
    chunks = plan.entries[plan.num_single :]
    if arrivals_of(plan) or not (plan.num_single or any(entry.start for entry in chunks)):
        return False
    pairs = sum(entry.num_tokens * (entry.start + entry.num_tokens // 2) for entry in chunks)
    return pairs <= most.pairs and plan.num_tokens <= most.tokens
