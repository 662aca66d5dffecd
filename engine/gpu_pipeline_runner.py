"""Runner of a pipeline on GPUs: every rank queues each step's share on its own GPU.

As `pipeline_runner.py`, with two differences. The host waits for nothing: what a stage takes
in and hands on is in the order of its GPU's stream, so the first rank's share is queued at
launch too, and `resolve` waits for it. And a step's numbers go to each rank as its step memory
(`step_memory.py`), because the ranks of a stage have no copy of a first one's.

Steps are not captured: a chunk's kernels take longer than launching them, and links between
stages are no part of a graph. Tokens are sampled as on a CPU: a prompt samples once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.arrivals import PrefixArrivals, prefix_parts
from engine.gpu_attention import HEADER_NUMBERS, step_header
from engine.gpu_model import GpuModel
from engine.layer_hooks import Mark, mark_on_stream
from engine.long_chunks import long_chunks
from engine.pipeline import Stage
from engine.pipeline_runner import stage_groups
from engine.ranks import Ranks
from engine.sampler import sample
from engine.step import LayerGroup, StepPlan, StepResult, arrivals_of, loads_of
from engine.step_memory import StepShape, StepWriter

TOKENS_STEP = 512
"""Steps are padded to a multiple of this: it bounds how many lengths cuDNN sees."""


@dataclass(slots=True, eq=False)
class QueuedStep:
    """A step that is queued on this rank's GPU, and that the others were told of."""

    plan: StepPlan
    logits: torch.Tensor
    """[num_rows, vocab_size]"""
    rows: list[int]
    """Of the sampling entries."""
    began: torch.Event | None
    """When this rank had what it computes from."""
    ended: torch.Event | None
    wait: Callable[[], None]
    layer_groups: tuple[LayerGroup, ...]


class GpuPipelineRunner:
    """Owns one rank's share of a pipeline's steps on a GPU. Belongs to the device thread.

    `launch` may be called while another thread is in `resolve`.

    Args:
        model: Of this rank, cut to its stage.
        stage: That one.
        sizes: The largest step: chunk tokens, sequences, blocks of one.
        stage_layers: Of each stage.
        ranks: The others, on the first.
    """

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
        self._ranks = ranks
        self._mark = mark
        largest = StepShape(
            _rounded(chunk_tokens + max_batch), max_batch, max(2, max_batch), self._max_blocks
        )
        stage.on_taken_in = self._begin
        self._began: torch.Event | None = None
        self._memory = torch.zeros(largest.size, dtype=torch.int32, device=model.device)
        self._no_tokens = torch.zeros(largest.num_rows, dtype=torch.int64, device=model.device)
        self._beside = torch.cuda.Stream(priority=-1) if self._memory.is_cuda else None  # type: ignore
        self._writer = StepWriter(largest.size, block_size, pinned=False)

    def begin(self) -> None:
        """Make what cuDNN keeps for each thread."""
        self._model.make_plans(*self._longest)

    @property
    def num_steps_under_way(self) -> int:
        """One for each stage, and one that waits for the first: it never waits for the event loop."""
        return len(self._stage_layers) + 1

    @property
    def prefix_parts(self) -> tuple[int, ...]:
        """Of this rank's layers; every rank waits for its own."""
        return prefix_parts(self._model.hooks.num_layers)

    def launch(self, plan: StepPlan) -> QueuedStep:
        """Tell the others of a step, and queue this rank's share."""
        assert self._ranks is not None, "the first rank launches"
        # Two chunks at least: the compiler would make a variant of the last layer for one row.
        num_chunks = max(2, len(plan.entries) - plan.num_single)
        shape = StepShape(_rounded(plan.num_tokens), plan.num_single, num_chunks, self._max_blocks)
        header = step_header(shape, long_chunks(plan))
        # All that a step needs is known to the host: no token of a step under way is in it.
        numbers = torch.cat([header, self._writer.write(plan, shape, {}).long()])
        self._ranks.tell(numbers, loads_of(plan))
        with self._model.hooks.waiting_for(arrivals_of(plan)):
            logits = self._compute(numbers)
        wait, ended = self._mark(), self._timed()
        groups = stage_groups(self._stage_layers, self._ranks, wait)
        return QueuedStep(plan, logits, _rows(plan), self._began, ended, wait, groups)

    def resolve(self, step: QueuedStep) -> StepResult:
        """Wait for a launched step and return its tokens."""
        step.wait()
        sequences = [entry.sequence for entry in step.plan.entries if entry.samples]
        # Not in line behind the steps that are queued already.
        with torch.cuda.stream(self._beside):
            tokens = iter(sample(step.logits[step.rows], sequences) if sequences else ())
        busy_s = 0.0
        if step.began is not None and step.ended is not None:
            step.ended.synchronize()  # recorded right after what was waited for
            busy_s = step.began.elapsed_time(step.ended) / 1e3
        sampled = tuple(next(tokens) if entry.samples else None for entry in step.plan.entries)
        return StepResult(sampled, busy_s)

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


def _rows(plan: StepPlan) -> list[int]:
    """Return the row of logits of each entry that samples: rows are as entries are."""
    return [index for index, entry in enumerate(plan.entries) if entry.samples]


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // TOKENS_STEP) * TOKENS_STEP
