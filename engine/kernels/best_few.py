"""The few largest numbers of each row of a router: operator, launcher and kernel.

`torch.topk` takes two launches, of which the second sorts: 9 us of a decode step's layer, and 36 of a prefill
of 4,096 tokens; a program that goes through a row in registers once for each number takes a quarter of that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.opaque import opaque

MAX_WIDTH, MAX_COUNT = 1024, 32
"""Numbers of a row, and how many of them are looked for, at most: more are for torch."""

LOWEST = tl.constexpr(-3.0e38)


def _like(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*scores.shape[:-1], count)
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64)


@opaque(_like)
def best_few(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest of each row and where they are, largest first, as `torch.topk` does.

    Of equal numbers the first comes first; what is no number comes last."""
    width = scores.shape[-1]
    if width > MAX_WIDTH or not 0 < count <= min(MAX_COUNT, width):
        values, places = torch.topk(scores, count, dim=-1)
        return values, places
    scores = scores.contiguous()
    values, places = _like(scores, count)
    num_rows = scores.numel() // width
    if num_rows:
        _pick[(num_rows,)](
            scores, values, places, width, COUNT=count, COUNT_PAD=triton.next_power_of_2(count),
            WIDTH_PAD=triton.next_power_of_2(width), num_warps=1 if width <= 256 else 4,
        )  # fmt: skip
    return values, places


@triton.jit
def _pick(
    scores,  # [num_rows, width]
    values,  # [num_rows, COUNT]
    places,  # [num_rows, COUNT]
    width,
    COUNT: tl.constexpr,
    COUNT_PAD: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH_PAD)
    inside = place < width
    score = tl.load(scores + row * width + place, mask=inside, other=0.0).to(tl.float32)
    # Any number of the row comes before what is taken, and before what lies past its end.
    left = tl.where(score > LOWEST, score, LOWEST)
    left = tl.where(inside, left, float("-inf"))
    slots = tl.arange(0, COUNT_PAD)
    found = tl.zeros([COUNT_PAD], tl.int32)
    for each in tl.static_range(COUNT):
        best = tl.argmax(left, 0)
        found = tl.where(slots == each, best, found)
        left = tl.where(place == best, float("-inf"), left)
    is_slot = slots < COUNT
    value = tl.load(scores + row * width + found, mask=is_slot)
    tl.store(values + row * COUNT + slots, value, mask=is_slot)
    tl.store(places + row * COUNT + slots, found.to(tl.int64), mask=is_slot)
