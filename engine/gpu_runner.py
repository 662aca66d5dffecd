"""Runner on a GPU: launches a step without waiting for it, and waits for it later.

The device must never wait for Python between two decode steps. So `launch` only queues
work, and the tokens of a step stay on the device, where the next step finds them; the
host gets its copy when `resolve` waits for it, while the next step already runs.

Two host buffers take turns: one is written while the other may still be on its way to
the device.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import torch

from base.clock import Clock
from engine.cuda_graph import GRAPH_CHUNKS, MIXED_TOKENS, StepGraphs
from engine.gpu_attention import step_header
from engine.gpu_model import GpuModel
from engine.sampler import choose, logprobs_of, needs_only_argmax
from engine.sequence import Sequence
from engine.step import LayerGroup, StepPlan, StepResult, sampled_tokens
from engine.step_memory import StepShape, StepWriter

EAGER_TOKENS = 512
"""Steps that are not captured are padded to a multiple of this: it bounds how many lengths cuDNN sees."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that runs or has run on the device."""

    plan: StepPlan
    rows: tuple[int, ...]
    """Where each sampling entry's token is in `tokens`."""
    tokens: torch.Tensor
    """[num_rows] int64, pinned; valid once `ended`."""
    logits: torch.Tensor | None
    """[num_sampling, vocab_size], where log probabilities are asked for."""
    ended: torch.Event
    layer_groups: tuple[LayerGroup, ...] = ()


class GpuRunner:
    """Owns the model's steps on one GPU. Belongs to the device thread.

    Attributes:
        num_launches, launch_total_s: Steps launched, and the seconds of CPU that launching took.
    """

    def __init__(
        self,
        model: GpuModel,
        block_size: int,
        max_batch: int,
        max_model_len: int,
        chunk_tokens: int,
        clock: Clock,
    ) -> None:
        self._model = model
        self._clock = clock
        self._max_blocks = -(-max_model_len // block_size)
        max_tokens = max(_rounded(chunk_tokens + max_batch), MIXED_TOKENS[-1])
        max_chunks = max(max_batch, GRAPH_CHUNKS)
        largest = StepShape(max_tokens, max_batch, max_chunks, self._max_blocks)
        self._memory = torch.zeros(largest.size, dtype=torch.int32, device=model.device)
        self._last_tokens = torch.zeros(largest.num_rows, dtype=torch.int64, device=model.device)
        self._logits: dict[StepShape, torch.Tensor] = {}
        self._writers = [StepWriter(largest.size, block_size, pinned=True) for _ in range(2)]
        self._copied = [torch.Event("cuda") for _ in range(2)]
        self._rows_of: dict[Sequence, int] = {}
        self.num_launches = 0
        self.launch_total_s = 0.0
        self._graphs = StepGraphs(self._run_captured, max_batch, self._max_blocks)
        self._graphs.capture(chunk_tokens)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step and wait for its tokens."""
        return self.resolve(self.launch(plan))

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step. Tokens it needs may still be on the device, sampled by the step before."""
        started_s = self._clock.now_s()
        shape = self._graphs.shape_of(plan)
        captured = shape is not None
        if shape is None:
            num_chunks = len(plan.entries) - plan.num_single
            shape = StepShape(_rounded(plan.num_tokens), plan.num_single, num_chunks, self._max_blocks)
        self._send(plan, shape)
        ends = None if captured else self._model.layer_ends
        if ends is not None:
            ends.begin()
        if captured:
            self._graphs.replay(shape)
            logits = self._logits[shape]
        else:
            logits = self._run(shape, plan)
        launched = self._sample(plan, shape, logits)
        if ends is not None:
            launched = replace(launched, layer_groups=ends.end())
        self.num_launches += 1
        self.launch_total_s += self._clock.now_s() - started_s
        return launched

    def resolve(self, launched: LaunchedStep) -> StepResult:
        """Wait for a launched step and return its tokens."""
        launched.ended.synchronize()  # the host needs the tokens to tell its listeners
        tokens = launched.tokens[list(launched.rows)]
        logprobs = None
        if launched.logits is not None:
            logprobs = logprobs_of(
                launched.logits, tokens.to(launched.logits.device), _sampling(launched.plan)
            )
        return sampled_tokens(launched.plan, tokens.tolist(), logprobs)

    def _send(self, plan: StepPlan, shape: StepShape) -> None:
        writer, copied = self._writers[0], self._copied[0]
        copied.synchronize()  # two launches ago: over but for a device that is far behind
        host = writer.write(plan, shape, self._rows_of)
        self._memory[: shape.size].copy_(host, non_blocking=True)
        copied.record()
        self._writers.reverse()
        self._copied.reverse()

    def _run(self, shape: StepShape, plan: StepPlan | None) -> torch.Tensor:
        """Compute logits; leave the token of the highest one of each row in `_last_tokens`."""
        logits = self._model.forward(self._memory, shape, step_header(shape, plan), self._last_tokens)
        torch.argmax(logits, dim=-1, out=self._last_tokens[: shape.num_rows])
        return logits

    def _run_captured(self, shape: StepShape) -> None:
        self._logits[shape] = self._run(shape, None)

    def _sample(self, plan: StepPlan, shape: StepShape, logits: torch.Tensor) -> LaunchedStep:
        rows = _rows(plan, shape)
        sequences = _sampling(plan)
        kept = None
        if not all(needs_only_argmax(sequence) for sequence in sequences):
            index = torch.tensor(rows, device=logits.device)
            wanted = logits[index].float()
            positions = [entry.context_len for entry in plan.entries if entry.samples]
            self._last_tokens[index] = choose(wanted, sequences, positions)
            if any(sequence.num_logprobs is not None for sequence in sequences):
                kept = wanted
        self._rows_of = dict(zip(sequences, rows, strict=True))
        tokens = torch.empty(shape.num_rows, dtype=torch.int64, pin_memory=True)
        tokens.copy_(self._last_tokens[: shape.num_rows], non_blocking=True)
        ended = torch.Event("cuda")
        ended.record()
        return LaunchedStep(plan, rows, tokens, kept, ended)


def _rows(plan: StepPlan, shape: StepShape) -> tuple[int, ...]:
    """Return the row of logits of each entry that samples."""
    skipped = shape.num_single - plan.num_single
    return tuple(
        index if index < plan.num_single else index + skipped
        for index, entry in enumerate(plan.entries)
        if entry.samples
    )


def _sampling(plan: StepPlan) -> Rows[Sequence]:
    return [entry.sequence for entry in plan.entries if entry.samples]


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // EAGER_TOKENS) * EAGER_TOKENS
