"""Self-check at start: our logits against those that the model's family computes itself.

A family whose attention does not do what we take it to do raises nothing and answers wrongly. A few dozen
tokens find that out: two chunks and a decode step over blocks that are neither in order nor adjacent, against
one eager pass over the whole.
"""

from __future__ import annotations

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


def eager_logits(model: PagedModel) -> torch.Tensor:
    """Return what `require_faithful` compares with, of a model that is not cut into stages yet."""
    with unrounded_rows(model.module):
        return model.eager_logits(checked_tokens(model.vocab_size))


def require_faithful(model: PagedModel, layout: KvLayout, expected: torch.Tensor | None = None) -> float:
    """Return how far our logits are from those of eager attention, as a share of their size.

    Each stage of a pipeline calls this with what `eager_logits` gave before the cut; the last compares.

    Raises ConfigError, naming the family, unless rounding alone explains it."""
    error = _relative_error(model, layout, eager_logits(model) if expected is None else expected)
    # Written so that NaN is a failure.
    is_scaled = any(field.dtype == SCALED_DTYPE for field in layout.fields)
    tolerance = SCALED_TOLERANCE if is_scaled else TOLERANCE[model.dtype]
    if model.quantization.format != "none":
        tolerance = max(tolerance, LEVEL_TOLERANCE)
    if not error <= tolerance:
        raise ConfigError(
            f"model family {model.family!r} cannot be served: its logits over the paged cache are off by "
            f"{error:.2g} of their size against eager attention; it keeps state that we do not, "
            "or attends in a way that we do not know"
        )
    return error


def checked_tokens(vocab_size: int) -> list[int]:
    """Return the tokens whose logits are compared."""
    return [(7919 * (index + 1)) % vocab_size for index in range(sum(CHECKED_CHUNKS))]


def relative_error(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference over that of what is wanted."""
    return float((logits.float() - wanted.float()).norm() / wanted.float().norm())


def _relative_error(model: PagedModel, layout: KvLayout, expected: torch.Tensor) -> float:
    token_ids = checked_tokens(model.vocab_size)
    num_tokens = len(token_ids)
    num_blocks = layout.num_blocks(num_tokens)
    cache = PagedCache(layout, 2 * num_blocks, model.device)
    block_table = tuple(range(2 * num_blocks - 1, 0, -2))
    sequence = Sequence(
        RequestId("self-check"), token_ids, num_tokens, BlockHash(b""), SamplingParams(), StopParams(1)
    )
    errors: list[float] = []
    start = 0
    for size in CHECKED_CHUNKS:
        entry = StepEntry(sequence, start, size, block_table, samples=True)
        plan = StepPlan((entry,), num_single=int(size == 1))
        start += size
        with unrounded_rows(model.module):
            logits = model.forward(build_batch(plan, layout.block_size, model.device), cache)
        if model.has_logits:
            errors.append(relative_error(logits[0], expected[start - 1]))
    return max(errors, default=0.0)
