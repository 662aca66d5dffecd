"""Self-check at start: our logits against those that the model's family computes itself.

A family whose attention does not do what we take it to do raises nothing and answers wrongly. A few dozen
tokens find that out: two chunks and a decode step over blocks that are neither in order nor adjacent, against
one eager pass over the whole. A GPU's kernels, compiled layers and graphs compute the same tokens once more,
as they will compute requests': they may be wrong on one card alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from base.block_hash import BlockHash
from base.errors import ConfigError
from base.kv_layout import KvLayout
from base.request import RequestId, SamplingParams, StopParams
from engine.batch import build_batch
from engine.model import PagedModel
from engine.paged_cache import PagedCache
from engine.quantized_linear import unrounded_rows
from engine.scaled_kv import SCALED_DTYPE
from engine.sequence import Sequence
from engine.step import StepEntry, StepPlan

CHECKED_CHUNKS = (21, 27, 1)
"""Tokens of each step; no multiple of any block size. 49 tokens are past small windows."""

TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Relative error of the worst step: two correct passes differ by 1e-6 in float32 and by 1e-2 in bfloat16; a
wrong one is near 1."""

LEVEL_TOLERANCE = 1e-2
"""Error that passes with weights of few bits, where that is more. Activations of 16 bits turn the last bit of
a float into a level, which makes 4e-4. Rows of 8-bit floats would make 4e-2, and are not rounded here."""

SCALED_TOLERANCE = 0.7
"""Error that passes with KV in 8 bits. 32 layers of random weights make 0.35 of the 0.04 that attention is
off by."""

KERNEL_TOLERANCE = 0.7
"""Relative error that passes of a GPU's kernels, but for float32 weights.

They round elsewhere than eager attention, and a token may take another expert then. Random weights of
Llama-3.1-8B make 0.09; what has nothing to do with the family's logits makes 1 or more."""

LogitsOf = Callable[[StepPlan], torch.Tensor]
"""Computes a step and returns the logits of its entries, in their order; a stage before the last has none."""


def eager_logits(model: PagedModel) -> torch.Tensor:
    """Return what `require_faithful` compares with, of a model that is not cut into stages yet.

    Raises ConfigError for logits that are no numbers."""
    with unrounded_rows(model.module):
        logits = model.eager_logits(checked_tokens(model.vocab_size))
    require_numbers(logits)
    return logits


def require_numbers(logits: torch.Tensor) -> None:
    """Raise ConfigError for logits that are no numbers: whatever is compared with them is at no fault."""
    if not logits.isfinite().all():
        raise ConfigError("the model's logits are no numbers: its weights or its config.json are damaged")


def require_faithful(model: PagedModel, layout: KvLayout, expected: torch.Tensor) -> float:
    """Return how far our logits are from those of eager attention, as a share of their size.

    Each stage of a pipeline calls this with what `eager_logits` gave before the cut; the last compares.

    Raises ConfigError, naming the family, unless rounding alone explains it."""
    cache = PagedCache(layout, checked_blocks(layout), model.device)

    def logits_of(plan: StepPlan) -> torch.Tensor:
        return model.forward(build_batch(plan, layout.block_size, model.device), cache)

    with unrounded_rows(model.module):
        error = _largest_error(model, layout, expected, logits_of, counts=(1,))
    if not error <= _tolerance(model, layout):  # NaN is a failure
        raise ConfigError(
            f"model family {model.family!r} cannot be served: its logits over the paged cache are off by "
            f"{error:.2g} of their size against eager attention; it keeps state that we do not, "
            "or attends in a way that we do not know"
        )
    return error


def require_right_kernels(
    model: PagedModel,
    layout: KvLayout,
    expected: torch.Tensor,
    logits_of: LogitsOf,
    max_batch: int,
) -> float:
    """Return how far the logits of a GPU's steps are from eager ones, as a share of their size.

    Every rank calls this at once. Each step is of one sequence, and then of two.

    Args:
        expected: As `eager_logits` gave them.
        logits_of: Overwrites the first `checked_blocks` of the cache.
        max_batch: Sequences in a step at most.

    Raises ConfigError unless rounding explains it."""
    error = _largest_error(model, layout, expected, logits_of, counts=(1, 2)[:max_batch])
    tolerance = _tolerance(model, layout)
    if model.dtype != torch.float32 or model.quantization.format != "none":
        tolerance = max(tolerance, KERNEL_TOLERANCE)
    if not error <= tolerance:
        raise ConfigError(
            f"model family {model.family!r} cannot be served on this GPU: what its kernels compute is off by "
            f"{error:.2g} of its size against eager attention; device: cpu serves it"
        )
    return error


def checked_blocks(layout: KvLayout) -> int:
    """Return the number of blocks that `require_right_kernels` overwrites."""
    return 2 * layout.num_blocks(sum(CHECKED_CHUNKS))


def _tolerance(model: PagedModel, layout: KvLayout) -> float:
    is_scaled = any(field.dtype == SCALED_DTYPE for field in layout.fields)
    tolerance = SCALED_TOLERANCE if is_scaled else TOLERANCE[model.dtype]
    return tolerance if model.quantization.format == "none" else max(tolerance, LEVEL_TOLERANCE)


def checked_tokens(vocab_size: int) -> list[int]:
    """Return the tokens whose logits are compared."""
    return [(7919 * (index + 1)) % vocab_size for index in range(sum(CHECKED_CHUNKS))]


def relative_error(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference over that of what is wanted."""
    return float((logits.float() - wanted.float()).norm() / wanted.float().norm())


def _largest_error(
    model: PagedModel, layout: KvLayout, expected: torch.Tensor, logits_of: LogitsOf, counts: Collection[int]
) -> float:
    """Return the largest relative error of the steps, each of so many sequences; NaN if one is."""
    token_ids, num_blocks = checked_tokens(model.vocab_size), checked_blocks(layout)
    sequence = Sequence(
        RequestId("self-check"), token_ids, len(token_ids), BlockHash(b""), SamplingParams(), StopParams(1)
    )
    tables = [tuple(range(num_blocks - 2 + which, -1, -2)) for which in range(2)]
    errors, end = [0.0], 0
    for size in CHECKED_CHUNKS:
        end += size
        for count in counts:
            entries = tuple(
                StepEntry(sequence, end - size, size, table, samples=True) for table in tables[:count]
            )
            found = logits_of(StepPlan(entries, num_single=count * (size == 1)))
            errors += [relative_error(logits, expected[end - 1]) for logits in found]
    return float(torch.tensor(errors, dtype=torch.float64).max())
