"""How long each chunk of a prompt is: later ones are shorter, so that each takes as long.

A chunk of n tokens after a prefix of p costs n tokens of the linear layers, and of attention a constant times
((p + n)^2 - p^2). In a pipeline the stages are at different chunks of a prompt, and all wait for the slowest;
so every chunk takes as long as the first, of `chunk_tokens`. Pure.
"""

from __future__ import annotations

import math

STEP_SHARE = 8
"""A chunk is a multiple of this part of `chunk_tokens`, because a GPU pads it to one of few lengths."""

MIN_STEPS = 4
"""Least number of such steps in a chunk.

Two stages take 131,072 tokens in 5.71 s by chunks of 4,096, and in 5.96 s where the later ones get as short
as 1,024 (8B, two H200s, 2026-11-21)."""


def chunk_limit(start: int, chunk_tokens: int, attention: float, block_size: int) -> int:
    """Return how many tokens a chunk that begins at `start` has at most.

    Args:
        chunk_tokens: Length of a prompt's first chunk.
        attention: Seconds of attention for each token squared, over those of the linear layers for each
            token; 0: chunks are equally long.
    """
    if not attention or not start:
        return chunk_tokens
    cost = chunk_tokens + attention * chunk_tokens**2
    linear = 1 + 2 * attention * start
    # The positive root of attention n^2 + linear n - cost, in the form that loses no digits.
    fitting = 2 * cost / (linear + math.sqrt(linear**2 + 4 * attention * cost))
    step = max(chunk_tokens // STEP_SHARE // block_size * block_size, min(block_size, chunk_tokens))
    return min(max(round(fitting / step), MIN_STEPS) * step, chunk_tokens)
