"""Runners on GPUs: each launches a step without waiting for it, and waits for it later.

The device must never wait for Python between two decode steps. So `launch` only queues work, and the tokens
of a step stay on the device, where the next step finds them; the host gets its copy when it resolves the
step, while the next one already runs. Two host buffers take turns: one is written while the other is still
being copied.

Of a pipeline, every rank queues each step's share on its own GPU, as `cpu_runner.py` has it, but the host
waits for nothing: what a stage takes in and hands on is in the order of its GPU's stream, so the first rank's
share is queued at launch too. Its steps are not captured: a chunk's kernels take longer than launching them,
and links between stages are no part of a graph. Tokens are sampled as on a CPU: a prompt samples once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from base.config import EngineConfig
from base.request import Pooling
from engine.arrivals import PrefixArrivals, prefix_parts
from engine.cpu_runner import WaitForMasks, masks_of, stage_groups
from engine.cuda_graph import (
    CAPTURED,
    CAPTURED_LATENTS,
    GRAPH_CHUNKS,
    MIXED_TOKENS,
    StepGraphs,
    decode_ladder,
)
from engine.drawing import Drawer
from engine.gpu_attention import HEADER_NUMBERS, step_header
from engine.gpu_model import GpuModel
from engine.kernels.sample_rows import sample_rows
from engine.layer_hooks import Mark, mark_on_stream
from engine.long_chunks import MIN_PREFIX, MIN_TOKENS, LongChunk, long_chunks, padded_tokens
from engine.pipeline import Stage
from engine.prefix_groups import PrefixGroups
from engine.ranks import Ranks
from engine.runner import SendStep, Share, StepRunner
from engine.sampler import sample
from engine.sequence import Sequence
from engine.step import (
    LaunchedStep,
    LayerGroup,
    StepPlan,
    StepResult,
    arrivals_of,
    loads_of,
    result_of,
    wait_for_prefixes,
)
from engine.step_memory import StepShape, StepWriter, carve, write_padding
from engine.swap_space import HostBlocks
from engine.tensor_parallel import TensorGroup
from engine.token_masks import TokenMasks

LEAST_ROWS = 16
"""Rows of logits of a step that is not captured, at least."""


class StepEnd(NamedTuple):
    """The rows that a step ends with, one for each sequence."""

    logits: torch.Tensor
    states: torch.Tensor
    """Last hidden states, [num_rows, hidden_size]."""


class GpuRunner(StepRunner):
    """Owns the model's steps on one GPU. Belongs to the device thread.

    Args:
        group: The ranks that a model is cut into; None: one alone.
        send_step: Reaches the other ranks, on the first.
        host_blocks: Memory that preempted sequences' blocks go to; None: plans move none.
    """

    max_steps = 2
    poolings = (Pooling.LAST,)

    def __init__(
        self,
        model: GpuModel,
        config: EngineConfig,
        max_model_len: int,
        group: TensorGroup | None = None,
        send_step: SendStep | None = None,
        host_blocks: HostBlocks | None = None,
    ) -> None:
        block_size, max_batch, chunk_tokens = config.block_size, config.max_batch, config.chunk_tokens
        self._model = model
        self._group = group
        self._send_step = send_step
        self._host_blocks = host_blocks
        self._chunk_tokens, self._max_model_len, self._max_batch = chunk_tokens, max_model_len, max_batch
        self._max_blocks = -(-max_model_len // block_size)
        max_tokens = max(padded_tokens(chunk_tokens + max_batch), MIXED_TOKENS[-1])
        self._batches = (0, *decode_ladder(max_batch))
        self._max_chunks = max(max_batch, GRAPH_CHUNKS)
        largest = StepShape(max_tokens, max_batch, self._max_chunks, self._max_blocks)
        model.take_steps(largest.num_tokens)
        self._memory = torch.zeros(largest.size, dtype=torch.int32, device=model.device)
        self._last_tokens = torch.zeros(largest.num_rows, dtype=torch.int64, device=model.device)
        self._drawer = Drawer(self._memory, self._last_tokens)
        self._ended: dict[StepShape, StepEnd] = {}
        groups = PrefixGroups(block_size, model.most_members)
        self._writers = [StepWriter(largest.size, block_size, True, groups) for _ in range(2)]
        self._copied = [torch.Event("cuda") for _ in range(2)]
        self._rows_of: dict[Sequence, int] = {}
        if group is None:
            self.prefix_parts = prefix_parts(model.hooks.num_layers)
        self._graphs = StepGraphs(
            self._run_captured,
            model.hooks,
            max_batch,
            self._max_blocks,
            chunk_tokens,
            max_model_len,
            CAPTURED_LATENTS if model.has_latents else CAPTURED,
        )
        self._graphs.capture()

    def begin(self) -> None:
        """Make what cuDNN keeps for each thread, and compile what the graphs do not run."""
        self._model.make_plans(self._chunk_tokens, self._max_model_len)
        self._run_long_steps()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step. Tokens it needs may still be on the device, sampled by the step before."""
        if self._host_blocks is not None:
            self._host_blocks.move(plan.swaps)
        if not plan.entries:
            ended = _ended()
            return LaunchedStep(partial(_moved, ended.synchronize), is_over=ended.query)
        shape, header, captured = self._laid_out(plan)
        share: Share = nullcontext()
        if self._send_step is not None:
            share = self._send_step(torch.cat([torch.tensor([captured]), header]))
        with share:
            if captured:
                wait_for_prefixes(plan)
            else:
                self._model.hooks.begin(arrivals_of(plan))
            end, groups = self._compute(shape, header, captured)
        rows = _rows(plan, shape)
        self._rows_of = dict(zip(plan.sampling, rows, strict=True))
        states = self._pooled_states(plan, shape, end)
        # Its mark comes behind the copy of the states.
        resolve = self._drawer.draw(plan, shape, end.logits, rows)
        if states is not None:
            resolve = partial(_with_states, plan, resolve, states)
        return LaunchedStep(resolve, groups, _ended().query)

    def logits_of(self, plan: StepPlan) -> torch.Tensor:
        """Compute a step before the first one is launched; return logits [num_entries, vocab_size].

        Every rank calls this with the same plan, all of whose entries sample."""
        shape, header, captured = self._laid_out(plan)
        end, _ = self._compute(shape, header, captured)
        return end.logits[list(_rows(plan, shape))]

    def _laid_out(self, plan: StepPlan) -> tuple[StepShape, torch.Tensor, bool]:
        """Write a plan to the step memory; return its shape and header, and whether a graph computes it."""
        shape = self._graphs.shape_of(plan)
        captured = shape is not None
        if shape is None:
            shape = self._long_shape(plan.num_tokens, plan.num_single, len(plan.entries) - plan.num_single)
        header = step_header(shape, () if captured else long_chunks(plan), plan.num_single)
        self._send(plan, shape)
        return shape, header, captured

    def follow(self, numbers: torch.Tensor, arrivals: list[PrefixArrivals]) -> None:
        """Run this rank's share of a step that the first rank launches, which has waited for prefixes."""
        captured, header = bool(numbers[0]), numbers[1:]
        self._compute(StepShape(*header[:4].tolist()), header, captured)

    def _pooled_states(self, plan: StepPlan, shape: StepShape, end: StepEnd) -> torch.Tensor | None:
        """Begin to copy the states of the last tokens that are pooled to the host; None: there are none."""
        rows = [row for row, entry in zip(_all_rows(plan, shape), plan.entries, strict=True) if entry.pooled]
        if not rows:
            return None
        index = torch.tensor(rows, pin_memory=True).to(end.states.device, non_blocking=True)
        states = end.states[index].float()
        host = torch.empty(states.shape, pin_memory=True)
        return host.copy_(states, non_blocking=True)

    def _compute(
        self, shape: StepShape, header: torch.Tensor, captured: bool
    ) -> tuple[StepEnd, tuple[LayerGroup, ...]]:
        """Compute what lies in the first rank's step memory; return the groups that it reports, too."""
        if self._group is not None:
            self._group.from_first(self._memory[: shape.size])
        if not captured:
            return self._run(shape, header), self._model.hooks.end()
        groups = self._graphs.replay(shape)
        return self._ended[shape], groups

    def _send(self, plan: StepPlan, shape: StepShape) -> None:
        writer, copied = self._writers[0], self._copied[0]
        copied.synchronize()  # two launches ago: over but for a device that is far behind
        host = writer.write(plan, shape, self._rows_of)
        self._memory[: shape.size].copy_(host, non_blocking=True)
        copied.record()
        self._writers.reverse()
        self._copied.reverse()

    def _run(self, shape: StepShape, header: torch.Tensor) -> StepEnd:
        """Compute a step, and leave the token that each row samples in `_last_tokens`."""
        if self._group is not None:
            self._group.from_first(self._last_tokens)
        logits = self._model.forward(self._memory, shape, header, self._last_tokens)
        sample_rows(logits, carve(self._memory, shape).sampling, self._last_tokens)
        return StepEnd(logits, self._model.row_states)

    def _long_shape(self, num_tokens: int, num_single: int, num_chunks: int) -> StepShape:
        """Return the shape of a step that is not captured.

        There are few, because kernels are compiled for numbers of sequences. Those that decode are as many as
        in a captured step, and chunks are added until all rows are a power of two or there is no place.
        """
        singles = next(size for size in self._batches if size >= num_single)
        rows = max(LEAST_ROWS, 1 << (singles + num_chunks - 1).bit_length())
        chunks = max(num_chunks, min(rows - singles, self._max_chunks))
        return StepShape(padded_tokens(max(num_tokens, singles)), singles, chunks, self._max_blocks)

    def _run_long_steps(self) -> None:
        """Run steps that are not captured, so that the first requests wait for no compiler.

        The time of a first prompt is what a node is known by until it has computed more. Kernels are compiled
        for each number of sequences that captured steps have, which takes up to a second.
        """
        most = self._chunk_tokens
        kinds = [(most, prefix, num_single) for prefix in (0, MIN_PREFIX) for num_single in (0, 2)]
        kinds += [(min(most, MIN_TOKENS), 0, num_single) for num_single in self._batches]
        for chunk_tokens, prefix, num_single in kinds:
            num_tokens = min(chunk_tokens, self._max_model_len - prefix)
            if num_tokens >= MIN_TOKENS and num_single <= self._max_batch:
                shape = self._long_shape(num_tokens + num_single, num_single, 1)
                write_padding(self._memory, shape)
                with self._model.hooks.rehearsing():
                    self._run(shape, step_header(shape, (LongChunk(num_tokens, prefix),)))
        self._memory.zero_()
        torch.cuda.synchronize(self._model.device)

    def _run_captured(self, shape: StepShape, chunks: tuple[LongChunk, ...]) -> None:
        self._ended[shape] = self._run(shape, step_header(shape, chunks))


def _ended() -> torch.Event:
    """Mark the end of what is queued on the current GPU's current stream."""
    ended = torch.Event("cuda")
    ended.record()
    return ended


def _moved(wait: Callable[[], None]) -> StepResult:
    """Wait for a step that only moves blocks."""
    wait()
    return StepResult(())


def _with_states(plan: StepPlan, resolve: Callable[[], StepResult], states: torch.Tensor) -> StepResult:
    """Wait for a step some of whose entries are pooled; `states` are theirs."""
    result = resolve()
    rows = iter(states.numpy().astype(np.float64))
    return replace(result, pooled=tuple(next(rows) if entry.pooled else None for entry in plan.entries))


def _all_rows(plan: StepPlan, shape: StepShape) -> list[int]:
    """Return the row of each entry."""
    skipped = shape.num_single - plan.num_single
    return [index if index < plan.num_single else index + skipped for index in range(len(plan.entries))]


def _rows(plan: StepPlan, shape: StepShape) -> tuple[int, ...]:
    """Return the row of logits of each entry that samples."""
    rows = zip(_all_rows(plan, shape), plan.entries, strict=True)
    return tuple(row for row, entry in rows if entry.samples)


class GpuPipelineRunner(StepRunner):
    """Owns one rank's share of a pipeline's steps on a GPU. Belongs to the device thread.

    Args:
        sizes: The largest step: chunk tokens, sequences, blocks of one.
        stage_layers: Number of layers of each stage.
        ranks: The others, on the first.
    """

    is_pipelined = True

    def __init__(
        self,
        model: GpuModel,
        stage: Stage,
        block_size: int,
        sizes: tuple[int, int, int],
        stage_layers: tuple[int, ...],
        ranks: Ranks | None,
        mark: Mark = mark_on_stream,
    ) -> None:
        chunk_tokens, max_batch, self._max_blocks = sizes
        self._model = model
        self._longest = chunk_tokens, self._max_blocks * block_size
        self._stage_layers = stage_layers
        # As in `cpu_runner.py`.
        self.max_steps = len(stage_layers) + 1
        self.prefix_parts = prefix_parts(model.hooks.num_layers)
        self._ranks = ranks
        self._mark = mark
        largest = StepShape(
            padded_tokens(chunk_tokens + max_batch), max_batch, max(2, max_batch), self._max_blocks
        )
        model.take_steps(largest.num_tokens)
        stage.on_taken_in = self._begin
        self._masks = TokenMasks()
        self._began: torch.Event | None = None
        self._memory = torch.zeros(largest.size, dtype=torch.int32, device=model.device)
        self._no_tokens = torch.zeros(largest.num_rows, dtype=torch.int64, device=model.device)
        self._beside = torch.cuda.Stream(priority=-1) if self._memory.is_cuda else None  # type: ignore
        self._writer = StepWriter(largest.size, block_size, pinned=False)

    def begin(self) -> None:
        """Make what cuDNN keeps for each thread."""
        self._model.make_plans(*self._longest)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Send a step to the others, and queue this rank's share."""
        assert self._ranks is not None, "the first rank launches"
        # Two chunks at least: the compiler would make a variant of the last layer for one row.
        num_chunks = max(2, len(plan.entries) - plan.num_single)
        shape = StepShape(padded_tokens(plan.num_tokens), plan.num_single, num_chunks, self._max_blocks)
        header = step_header(shape, long_chunks(plan))
        # All that a step needs is known to the host: no token of a step under way is in it.
        numbers = torch.cat([header, self._writer.write(plan, shape, {}).long()])
        share = self._ranks.send_step(numbers, loads_of(plan))
        with share, self._model.hooks.waiting_for(arrivals_of(plan)):
            logits = self._compute(numbers)
        wait, times = self._mark(), (self._began, self._timed())
        groups = stage_groups(self._stage_layers, self._ranks, wait)
        wait_masks = masks_of(plan, self._masks)
        return LaunchedStep(partial(self._resolve, plan, logits, wait, times, wait_masks), groups)

    def _resolve(
        self,
        plan: StepPlan,
        logits: torch.Tensor,
        wait: Callable[[], None],
        times: tuple[torch.Event | None, torch.Event | None],
        wait_masks: WaitForMasks,
    ) -> StepResult:
        """Wait for a launched step and return its tokens; `times` are when this rank began and ended it."""
        wait()
        rows = [index for index, entry in enumerate(plan.entries) if entry.samples]
        # Not in line behind the steps that are queued already.
        with torch.cuda.stream(self._beside):
            sampled = sample(logits[rows], plan.sampling, wait_masks())
        began, ended = times
        busy_s = 0.0
        if began is not None and ended is not None:
            ended.synchronize()  # recorded right after what was waited for
            busy_s = began.elapsed_time(ended) / 1e3
        return result_of(plan, sampled, busy_s)

    def follow(self, numbers: torch.Tensor, arrivals: list[PrefixArrivals]) -> Callable[[], None]:
        """Queue this rank's share of a step of the first rank's."""
        with self._model.hooks.waiting_for(arrivals):
            self._compute(numbers)
        return self._mark()

    def _begin(self) -> None:
        self._began = self._timed()

    def _timed(self) -> torch.Event | None:
        if not self._memory.is_cuda:
            return None
        event = torch.Event("cuda", enable_timing=True)
        event.record()
        return event

    def _compute(self, numbers: torch.Tensor) -> torch.Tensor:
        header = numbers[:HEADER_NUMBERS]
        shape = StepShape(*header[:4].tolist())
        host = numbers[HEADER_NUMBERS:].int()
        if self._beside is not None:
            # From other memory a copy would wait for the steps before. torch keeps this until it is copied.
            host = host.pin_memory()
        self._memory[: shape.size].copy_(host, non_blocking=True)
        return self._model.forward(self._memory, shape, header, self._no_tokens)
