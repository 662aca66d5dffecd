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
from base.config import EngineConfig
from base.request import TokenLogprobs
from engine.arrivals import PrefixArrivals, prefix_parts
from engine.cuda_graph import GRAPH_CHUNKS, MIXED_TOKENS, StepGraphs
from engine.gpu_attention import step_header
from engine.gpu_model import GpuModel
from engine.kernels.sample_rows import sample_rows
from engine.long_chunks import long_chunks
from engine.runner import Tell
from engine.sampler import logprobs_of, needs_logits, shape_logits
from engine.sequence import Sequence
from engine.step import LayerGroup, StepPlan, StepResult, arrivals_of, sampled_tokens, wait_for_prefixes
from engine.step_memory import StepShape, StepWriter, carve
from engine.swap_space import HostBlocks
from engine.tensor_parallel import TensorGroup

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
    """[len(special), vocab_size] float32"""
    special: tuple[int, ...]
    """Which sampling entries ask for more than a draw."""
    ended: torch.Event
    layer_groups: tuple[LayerGroup, ...] = ()


class GpuRunner:
    """Owns the model's steps on one GPU. Belongs to the device thread.

    Args:
        model: Of this rank, if it is cut into several.
        group: The ranks; None: one alone.
        tell: Sends a row of int64 to the other ranks, on the first.
        host_blocks: Where preempted sequences' blocks go; None: plans move none.

    Attributes:
        num_launches, launch_total_s: Steps launched, and the seconds of CPU that launching took.
    """

    def __init__(
        self,
        model: GpuModel,
        config: EngineConfig,
        max_model_len: int,
        clock: Clock,
        group: TensorGroup | None = None,
        tell: Tell | None = None,
        host_blocks: HostBlocks | None = None,
    ) -> None:
        block_size, max_batch, chunk_tokens = config.block_size, config.max_batch, config.chunk_tokens
        self._model = model
        self._group = group
        self._tell = tell
        self._host_blocks = host_blocks
        self._clock = clock
        self._chunk_tokens, self._max_model_len = chunk_tokens, max_model_len
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

    def begin(self) -> None:
        """Make what cuDNN keeps for each thread."""
        self._model.make_plans(self._chunk_tokens, self._max_model_len)

    @property
    def prefix_parts(self) -> tuple[int, ...]:
        return () if self._group is not None else prefix_parts(self._model.hooks.num_layers)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step and wait for its tokens."""
        return self.resolve(self.launch(plan))

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step. Tokens it needs may still be on the device, sampled by the step before."""
        started_s = self._clock.now_s()
        if self._host_blocks is not None:
            self._host_blocks.move(plan.swaps)
        if not plan.entries:
            return LaunchedStep(plan, (), torch.empty(0, dtype=torch.int64), None, (), _recorded())
        shape = self._graphs.shape_of(plan)
        captured = shape is not None
        if shape is None:
            # Two at least: the compiler would make a variant of the last layer for one row.
            num_chunks = max(2, len(plan.entries) - plan.num_single)
            shape = StepShape(_rounded(plan.num_tokens), plan.num_single, num_chunks, self._max_blocks)
        header = step_header(shape, () if captured else long_chunks(plan))
        self._send(plan, shape)
        if self._tell is not None:
            self._tell(torch.cat([torch.tensor([captured]), header]))
        if captured:
            wait_for_prefixes(plan)
        else:
            self._model.hooks.begin(arrivals_of(plan))
        logits = self._compute(shape, header, captured)
        groups = () if captured else self._model.hooks.end()
        launched = replace(self._finish(plan, shape, logits), layer_groups=groups)
        self.num_launches += 1
        self.launch_total_s += self._clock.now_s() - started_s
        return launched

    def resolve(self, launched: LaunchedStep) -> StepResult:
        """Wait for a launched step and return its tokens."""
        launched.ended.synchronize()  # the host needs the tokens to tell its listeners
        tokens = launched.tokens[list(launched.rows)]
        logprobs: dict[int, TokenLogprobs | None] = dict.fromkeys(range(len(tokens)))
        if launched.logits is not None:
            sequences = _sampling(launched.plan)
            chosen = tokens[list(launched.special)].to(launched.logits.device)
            found = logprobs_of(launched.logits, chosen, [sequences[index] for index in launched.special])
            logprobs |= {index: found[row] for row, index in enumerate(launched.special)}
        return sampled_tokens(launched.plan, tokens.tolist(), logprobs)

    def follow(self, numbers: torch.Tensor, arrivals: list[PrefixArrivals]) -> None:
        """Run this rank's share of a step that the first rank launches, which has waited for prefixes."""
        captured, header = bool(numbers[0]), numbers[1:]
        self._compute(StepShape(*header[:4].tolist()), header, captured)

    def _compute(self, shape: StepShape, header: torch.Tensor, captured: bool) -> torch.Tensor:
        """Compute what lies in the first rank's step memory; return the logits."""
        if self._group is not None:
            self._group.from_first(self._memory[: shape.size])
        if not captured:
            return self._run(shape, header)
        self._graphs.replay(shape)
        return self._logits[shape]

    def _send(self, plan: StepPlan, shape: StepShape) -> None:
        writer, copied = self._writers[0], self._copied[0]
        copied.synchronize()  # two launches ago: over but for a device that is far behind
        host = writer.write(plan, shape, self._rows_of)
        self._memory[: shape.size].copy_(host, non_blocking=True)
        copied.record()
        self._writers.reverse()
        self._copied.reverse()

    def _run(self, shape: StepShape, header: torch.Tensor) -> torch.Tensor:
        """Compute logits, and leave the token that each row samples in `_last_tokens`."""
        if self._group is not None:
            self._group.from_first(self._last_tokens)
        logits = self._model.forward(self._memory, shape, header, self._last_tokens)
        sample_rows(logits, carve(self._memory, shape).sampling, self._last_tokens)
        return logits

    def _run_captured(self, shape: StepShape) -> None:
        self._logits[shape] = self._run(shape, step_header(shape))

    def _finish(self, plan: StepPlan, shape: StepShape, logits: torch.Tensor) -> LaunchedStep:
        """Sample again where a sequence asks for more than a draw, and send for the tokens."""
        rows = _rows(plan, shape)
        sequences = _sampling(plan)
        special = tuple(index for index, sequence in enumerate(sequences) if needs_logits(sequence))
        kept = None
        if special:
            kept = self._sample_special(
                shape, logits, [rows[index] for index in special], [sequences[index] for index in special]
            )
        self._rows_of = dict(zip(sequences, rows, strict=True))
        tokens = torch.empty(shape.num_rows, dtype=torch.int64, pin_memory=True)
        tokens.copy_(self._last_tokens[: shape.num_rows], non_blocking=True)
        return LaunchedStep(plan, rows, tokens, kept, special, _recorded())

    def _sample_special(
        self, shape: StepShape, logits: torch.Tensor, rows: list[int], sequences: Rows[Sequence]
    ) -> torch.Tensor:
        """Sample rows after penalties, bias and held-back stop tokens; return their logits before that."""
        index = torch.tensor(rows, pin_memory=True).to(logits.device, non_blocking=True)
        wanted = logits[index].float()
        tokens = torch.empty_like(index)
        sample_rows(shape_logits(wanted, sequences), carve(self._memory, shape).sampling[index], tokens)
        self._last_tokens[index] = tokens
        return wanted


def _recorded() -> torch.Event:
    """Return an event behind all that is queued on the current stream."""
    ended = torch.Event("cuda")
    ended.record()
    return ended


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
