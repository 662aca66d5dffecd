"""The inputs of a step's model, from the numbers of the step memory: launcher and kernel.

A token is the host's, or what the step before sampled. As torch's own operators this is eight launches at the
head of each step, which take as long as half a layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 256


def step_inputs(
    token_ids: torch.Tensor,
    sources: torch.Tensor,
    positions: torch.Tensor,
    logit_rows: torch.Tensor,
    last_tokens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids [num_tokens], their positions and the rows whose logits are wanted, all int64.

    Args:
        token_ids, sources, positions: [num_tokens] int32, contiguous; where a source is not negative, the
            token is that number of `last_tokens`.
        logit_rows: [num_rows] int32, contiguous.
        last_tokens: [any] int64, contiguous."""
    num_tokens, num_rows = token_ids.shape[0], logit_rows.shape[0]
    made = torch.empty(2 * num_tokens + num_rows, dtype=torch.int64, device=token_ids.device)
    ids, places, rows = made.split([num_tokens, num_tokens, num_rows])
    _take[(triton.cdiv(max(num_tokens, num_rows, 1), TILE),)](
        token_ids, sources, positions, logit_rows, last_tokens, ids, places, rows, num_tokens, num_rows,
        TILE=TILE, num_warps=4,
    )  # fmt: skip
    return ids, places, rows


@triton.jit
def _take(
    token_ids,  # [num_tokens]
    sources,  # [num_tokens]
    positions,  # [num_tokens]
    logit_rows,  # [num_rows]
    last_tokens,
    ids,  # [num_tokens]
    places,  # [num_tokens]
    rows,  # [num_rows]
    num_tokens,
    num_rows,
    TILE: tl.constexpr,
):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_token = at < num_tokens
    source = tl.load(sources + at, mask=is_token, other=-1)
    own = tl.load(token_ids + at, mask=is_token, other=0).to(tl.int64)
    earlier = tl.load(last_tokens + source, mask=is_token & (source >= 0), other=0)
    tl.store(ids + at, tl.where(source >= 0, earlier, own), mask=is_token)
    tl.store(places + at, tl.load(positions + at, mask=is_token, other=0).to(tl.int64), mask=is_token)
    is_row = at < num_rows
    tl.store(rows + at, tl.load(logit_rows + at, mask=is_row, other=0).to(tl.int64), mask=is_row)
