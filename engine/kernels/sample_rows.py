"""Sample one token of each row of logits: launcher and kernel.

How a row is sampled lies in the memory of the step, so that a CUDA graph that ends with this kernel serves
greedy and sampled steps alike, and the host neither waits nor launches anything for them. A program owns a
row. A greedy one reads it once. A sampled one reads it once more for the draw (the Gumbel-max trick), and
some times in between for top-k or top-p: nothing is sorted; the value at which the row is cut is found two
bits at a time from the highest on, 8 passes for bfloat16, over logits that stay in the L2 cache.

256 rows of 128,256 in bfloat16 on an H200 (2026-11-21): greedy 35 us (torch.argmax 53), drawn 152, a decode
step of the 8B shape being 16,300. With top-p 490, with top-k too 788: 3 and 4.5 % of a step, when values were
compared as integers on 8 warps; as floats on 16, as here, it was not measured.

The noise of a token is a pure function of (seed, position, token id): Philox (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.step_memory import FIELDS

NUM_WARPS = 16

LOW_BITS = {torch.bfloat16: 16, torch.float16: 12, torch.float32: 0}
"""Number of bits of a float32 that are 0 in every number of a dtype; no cut is looked for among them."""

TILE = 4096
"""Number of tokens read at a time.

A call of Philox gives the noise of four, a quarter of a tile apart, so the numbers drawn depend on this one.
"""


def sample_rows(logits: torch.Tensor, sampling: torch.Tensor, tokens: torch.Tensor) -> None:
    """Write the next token of each row to `tokens`.

    Greedy rows take the highest logit, the lowest id among equals. Others are cut by min-p, then top-k, then
    top-p, tokens of equal logits together, and one of the rest is drawn.

    Args:
        logits: [num_rows, vocab_size], a floating dtype, rows contiguous.
        sampling: [num_rows, FIELDS] int32, contiguous. Temperature 0 is greedy.
        tokens: [>= num_rows] int64; the first `num_rows` are written.

    Raises ValueError for a shape, stride or dtype that the kernel does not take."""
    num_rows, vocab_size = logits.shape
    if sampling.shape != (num_rows, FIELDS) or sampling.dtype != torch.int32 or not sampling.is_contiguous():
        raise ValueError(f"sampling must be contiguous [{num_rows}, {FIELDS}] int32")
    if logits.dtype not in LOW_BITS:
        raise ValueError(f"logits are {logits.dtype}")
    if tokens.dtype != torch.int64 or tokens.dim() != 1 or tokens.shape[0] < num_rows:
        raise ValueError(f"tokens must be [>= {num_rows}] int64")
    if logits.stride(1) != 1:
        raise ValueError("the logits of a row must be contiguous")
    if num_rows:
        _sample_row[(num_rows,)](
            logits, sampling, tokens, vocab_size, logits.stride(0),
            FIELDS=FIELDS, TILE=TILE, LOW_BITS=LOW_BITS[logits.dtype], num_warps=NUM_WARPS,
        )  # fmt: skip


@triton.jit
def _value(key):
    """Return the float32 at place `key`, uint32, of all in their order; -inf for what is below them."""
    key = tl.maximum(key, 0x7FFFFF)
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _load(row_logits, at, vocab_size):
    return tl.load(row_logits + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _highest(row_logits, vocab_size, TILE: tl.constexpr):
    """Return the highest logit of a row and the lowest id that has it."""
    lanes = tl.arange(0, TILE)
    value = tl.full([TILE], float("-inf"), tl.float32)
    token = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab_size, TILE):
        logit = _load(row_logits, start + lanes, vocab_size)
        is_better = logit > value
        value = tl.where(is_better, logit, value)
        token = tl.where(is_better, start + lanes, token)
    highest = tl.max(value, 0)
    return highest, tl.min(tl.where(value == highest, token, vocab_size - 1), 0)


@triton.jit
def _mass(row_logits, vocab_size, lowest, highest, scale, TILE: tl.constexpr):
    """Return the weight of the logits from `lowest` on."""
    lanes = tl.arange(0, TILE)
    mass = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab_size, TILE):
        logit = _load(row_logits, start + lanes, vocab_size)
        mass += tl.where(logit >= lowest, tl.exp2((logit - highest) * scale), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _cut(
    row_logits,
    vocab_size,
    goal,
    highest,
    scale,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
    LOW_BITS: tl.constexpr,
):
    """Return the highest value such that the logits from it on are `goal` many, or weigh that much."""
    lanes = tl.arange(0, TILE)
    key = tl.zeros([], tl.uint32)
    for step in range((32 - LOW_BITS) // 2):
        unit = tl.full([], 1, tl.uint32) << (30 - 2 * step)
        low, middle, high = _value(key + unit), _value(key + 2 * unit), _value(key + 3 * unit)
        from_low = tl.zeros([TILE], tl.float32)
        from_middle = tl.zeros([TILE], tl.float32)
        from_high = tl.zeros([TILE], tl.float32)
        for start in range(0, vocab_size, TILE):
            logit = _load(row_logits, start + lanes, vocab_size)
            weight = tl.exp2((logit - highest) * scale) if WEIGHTED else 1.0
            from_low += tl.where(logit >= low, weight, 0.0)
            from_middle += tl.where(logit >= middle, weight, 0.0)
            from_high += tl.where(logit >= high, weight, 0.0)
        reached = (tl.sum(from_low, 0) >= goal).to(tl.uint32) + (tl.sum(from_middle, 0) >= goal).to(tl.uint32)
        key += unit * (reached + (tl.sum(from_high, 0) >= goal).to(tl.uint32))
    return _value(key)


@triton.jit
def _scores(logit, words, scale):
    """Return logits over the temperature plus Gumbel noise, base 2; accurate where noise decides, near 0."""
    uniform = (words.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3 + uniform * 0.25)))
    exponential = tl.where(uniform < 0.01, series, -tl.log(tl.maximum(1.0 - uniform, 1e-10)))
    return logit * scale - tl.log2(exponential)


@triton.jit
def _draw(row_logits, vocab_size, lowest, highest, scale, seed, position, TILE: tl.constexpr):
    """The token of the highest score among those whose logit is `lowest` at least."""
    lanes = tl.arange(0, TILE // 4)
    value = tl.full([TILE // 4], float("-inf"), tl.float32)
    token = tl.zeros([TILE // 4], tl.int32)
    for start in range(0, vocab_size, TILE):
        group = (start // 4 + lanes).to(tl.uint32)
        none = tl.zeros([TILE // 4], tl.uint32)
        words = tl.philox(seed, group, none + position.to(tl.uint32), none, none)
        for quarter in tl.static_range(4):
            at = start + quarter * (TILE // 4) + lanes
            logit = _load(row_logits, at, vocab_size)
            score = _scores(logit - highest, words[quarter], scale)
            is_better = (logit >= lowest) & (score > value)
            value = tl.where(is_better, score, value)
            token = tl.where(is_better, at, token)
    best = tl.max(value, 0)
    return tl.min(tl.where(value == best, token, vocab_size - 1), 0)


@triton.jit
def _sample_row(
    logits,  # [num_rows, vocab_size]
    sampling,  # [num_rows, FIELDS]
    tokens,  # [num_rows]
    vocab_size,
    row_stride,
    FIELDS: tl.constexpr,
    TILE: tl.constexpr,
    LOW_BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * row_stride
    numbers = sampling + row * FIELDS
    temperature = tl.load(numbers).to(tl.float32, bitcast=True)
    highest, token = _highest(row_logits, vocab_size, TILE)
    if temperature > 0.0:
        min_p = tl.load(numbers + 1).to(tl.float32, bitcast=True)
        top_p = tl.load(numbers + 2).to(tl.float32, bitcast=True)
        top_k = tl.load(numbers + 3)
        low_word = tl.load(numbers + 4).to(tl.uint32, bitcast=True).to(tl.uint64)
        seed = (tl.load(numbers + 5).to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low_word
        position = tl.load(numbers + 6)
        scale = 1.4426950408889634 / temperature  # exp(x / t) = exp2(x * scale)
        lowest = tl.full([], float("-inf"), tl.float32)
        if min_p > 0.0:
            lowest = highest + tl.log2(min_p) / scale
        if (top_k > 0) & (top_k < vocab_size):
            goal = top_k.to(tl.float32)
            cut = _cut(row_logits, vocab_size, goal, highest, scale, False, TILE, LOW_BITS)
            lowest = tl.maximum(lowest, cut)
        if top_p < 1.0:
            mass = _mass(row_logits, vocab_size, lowest, highest, scale, TILE)
            goal = tl.maximum(top_p * mass, 1.0e-30)  # of 0 every value would be the highest to reach it
            cut = _cut(row_logits, vocab_size, goal, highest, scale, True, TILE, LOW_BITS)
            lowest = tl.maximum(lowest, cut)
        lowest = tl.minimum(lowest, highest)  # the best token is left, whatever is asked for
        token = _draw(row_logits, vocab_size, lowest, highest, scale, seed, position, TILE)
    tl.store(tokens + row, token.to(tl.int64))
