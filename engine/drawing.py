"""Drawing: what becomes of a GPU step's logits after its graph, until its tokens are on the host.

A graph ends with a draw from the logits as they are, which is all that most sequences ask for. Those with
penalties, biases or log probabilities are drawn again behind it, and so are those under a grammar:

    device   | step n          | draw | step n+1                   | draw |
    host                       resolve n -> masks n+1 -> mask and draw n+1 are queued -> plan, launch n+2

A mask depends on the token before it, which is on the device while the step that the mask is for is launched.
So that step's draw is queued when the one before is resolved; the device computes meanwhile. A batch under
grammars is launched ahead like any other, by the same graphs, and waits for the host only where masks take
longer than a step.

A kernel in the graph that waits for masks in host memory was weighed: whatever makes the host wait for the
device meanwhile (to pin memory, to load a kernel) would stop both for good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import partial

import torch

from base.errors import LostError
from base.request import SampledToken, TokenLogprobs
from engine.kernels.mask_rows import mask_rows
from engine.kernels.sample_rows import sample_rows
from engine.layer_hooks import Mark
from engine.sampler import logprobs_of, needs_logits, shape_logits
from engine.sequence import Sequence
from engine.step import StepPlan, StepResult, result_of
from engine.step_memory import StepShape, carve
from engine.token_masks import TokenMasks, constrained


@dataclass(slots=True, eq=False)
class _Drawing:
    """The tokens of one launched step, on their way to the host."""

    plan: StepPlan
    shape: StepShape
    logits: torch.Tensor
    rows: tuple[int, ...]
    """Row of logits of each sequence that samples."""
    tokens: torch.Tensor
    """[num_rows] on the host, pinned."""
    special: tuple[int, ...]
    """Sequences, by their place, that ask for more than a draw from masked logits."""
    kept: torch.Tensor | None = None
    """Logits of the special ones as the model gave them."""
    wait: Callable[[], None] | None = None
    """Blocks until the tokens are on the host; None: their copy is not queued yet."""
    error: Exception | None = None
    """Why it never will be."""

    @property
    def waits_for_tokens(self) -> bool:
        """Whether a mask depends on a token that only the device knows."""
        return any(
            entry.samples
            and entry.sequence.constraint is not None
            and entry.start >= entry.sequence.num_tokens
            for entry in self.plan.entries
        )


class Drawer:
    """Draws the tokens of launched steps. Belongs to the device thread.

    Args:
        memory: The step memory, in which a step lies until the next one is launched.
        last_tokens: The token that each row of the last step sampled, on the device.
        mark: Marks what is queued on the device; None: a GPU's current stream.
    """

    def __init__(self, memory: torch.Tensor, last_tokens: torch.Tensor, mark: Mark | None = None) -> None:
        self._memory = memory
        self._last_tokens = last_tokens
        self._mark = mark or reached_on_stream
        self._masks = TokenMasks()
        self._is_pinned = last_tokens.is_cuda
        self._beside = torch.cuda.Stream() if last_tokens.is_cuda else None  # type: ignore[no-untyped-call]
        self._undrawn: _Drawing | None = None
        """The last launched step, if its masks depend on tokens of the one before."""

    def draw(
        self, plan: StepPlan, shape: StepShape, logits: torch.Tensor, rows: tuple[int, ...]
    ) -> Callable[[], StepResult]:
        """Draw the tokens of the step that was just launched; return what waits for them.

        `rows` are the rows of logits of the plan's sampling entries. What is returned is called in the order
        of launches: a step may be drawn only when the one before is resolved."""
        special = tuple(at for at, sequence in enumerate(plan.sampling) if needs_logits(sequence))
        tokens = torch.empty(shape.num_rows, dtype=torch.int64, pin_memory=self._is_pinned)
        drawing = _Drawing(plan, shape, logits, rows, tokens, special)
        if drawing.waits_for_tokens:
            self._undrawn = drawing
        else:
            self._draw(drawing, {})
        return partial(self._resolve, drawing)

    def _draw(self, drawing: _Drawing, newest: Mapping[Sequence, int]) -> None:
        """Queue what the graph has not drawn; `newest` are tokens of the step before."""
        sequences, masked = drawing.plan.sampling, constrained(drawing.plan.sampling)
        sampling = carve(self._memory, drawing.shape).sampling
        index = masks = torch.empty(0)
        if drawing.special:
            index = self._on_device([drawing.rows[at] for at in drawing.special])
            drawing.kept = drawing.logits[index].float()
        if masked:
            masks = self._copied(self._masks.begin(masked, newest, self._is_pinned)())
            rows = [row for row, item in zip(drawing.rows, sequences, strict=True) if item.constraint]
            mask_rows(drawing.logits, self._on_device(rows), masks)
            sample_rows(drawing.logits, sampling, self._last_tokens)
        if drawing.kept is not None:
            asking = [sequences[at] for at in drawing.special]
            shaped = self._shaped(drawing.kept, asking, masked, masks)
            tokens = torch.empty_like(index)
            sample_rows(shaped, sampling[index], tokens)
            self._last_tokens[index] = tokens
        drawing.tokens.copy_(self._last_tokens[: drawing.shape.num_rows], non_blocking=True)
        drawing.wait = self._mark()

    def _shaped(
        self, kept: torch.Tensor, asking: Rows[Sequence], masked: list[Sequence], masks: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits of `asking` after penalties, biases and masks, if they have any."""
        shaped = shape_logits(kept, asking)
        both = [at for at, sequence in enumerate(asking) if sequence.constraint is not None]
        if both:
            shaped = kept.clone() if shaped is kept else shaped
            own = self._on_device([masked.index(asking[at]) for at in both])
            mask_rows(shaped, self._on_device(both), masks[own])
        return shaped

    def _resolve(self, drawing: _Drawing) -> StepResult:
        """Wait for a step's tokens; with them, draw the step after it, if that waits for them."""
        if drawing.wait is None:
            self._undrawn = None
            raise LostError("the step before failed") from drawing.error
        drawing.wait()  # the host needs the tokens for its listeners
        sequences = drawing.plan.sampling
        chosen = drawing.tokens[list(drawing.rows)]
        token_ids: list[int] = chosen.tolist()
        self._draw_next(drawing, dict(zip(sequences, token_ids, strict=True)))
        logprobs: dict[int, TokenLogprobs] = {}
        if drawing.kept is not None:
            asked = chosen[list(drawing.special)].to(drawing.kept.device)
            found = logprobs_of(drawing.kept, asked, [sequences[at] for at in drawing.special])
            logprobs = {drawing.special[row]: values for row, values in found.items()}
        sampled = (SampledToken(token_id, logprobs.get(at)) for at, token_id in enumerate(token_ids))
        return result_of(drawing.plan, sampled)

    def _draw_next(self, drawing: _Drawing, newest: Mapping[Sequence, int]) -> None:
        undrawn = self._undrawn
        if undrawn is None or undrawn is drawing:
            return
        self._undrawn = None
        try:
            self._draw(undrawn, newest)
        except (RuntimeError, ValueError) as error:  # it is of that step, and not of this one
            undrawn.error = error

    def _on_device(self, numbers: list[int]) -> torch.Tensor:
        host = torch.tensor(numbers, dtype=torch.int64, pin_memory=self._is_pinned)
        return host.to(self._last_tokens.device, non_blocking=True)

    def _copied(self, masks: torch.Tensor) -> torch.Tensor:
        """Copy masks to the device beside the step that runs; what is queued next waits for them."""
        if self._beside is None:
            return masks
        with torch.cuda.stream(self._beside):
            copy = masks.to(self._last_tokens.device, non_blocking=True)
        stream = torch.cuda.current_stream()
        stream.wait_stream(self._beside)
        copy.record_stream(stream)
        return copy


def reached_on_stream() -> Callable[[], None]:
    """Mark the current stream of the current GPU; return what waits for that, and spins."""
    reached = torch.Event("cuda")
    reached.record()
    return reached.synchronize
