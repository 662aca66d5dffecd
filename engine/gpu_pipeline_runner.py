"""Runner of a pipeline on GPUs: every rank queues each step's share on its own GPU.

As `pipeline_runner.py`, but the host waits for nothing: what a stage takes in and hands on is in the order of
its GPU's stream, so the first rank's share is queued at launch too.

Steps are not captured: a chunk's kernels take longer than launching them, and links between stages are no
part of a graph. Tokens are sampled as on a CPU: a prompt samples once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.arrivals import PrefixArrivals, prefix_parts
from engine.gpu_attention import HEADER_NUMBERS, step_header
from engine.gpu_model import GpuModel
from engine.layer_hooks import Mark, mark_on_stream
from engine.long_chunks import long_chunks, padded_tokens
from engine.pipeline import Stage
from engine.pipeline_runner import stage_groups
from engine.ranks import Ranks
from engine.runner import StepRunner, WaitForMasks, masks_of
from engine.sampler import sample
from engine.step import LaunchedStep, StepPlan, StepResult, arrivals_of, loads_of, result_of
from engine.step_memory import StepShape, StepWriter
from engine.token_masks import TokenMasks


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
        # As in `PipelineRunner`.
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
