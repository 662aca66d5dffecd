"""Random paged caches for the kernel tests: scattered blocks, poison everywhere else."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

MULTIPLIED = [torch.float32, torch.float16]
"""Dtypes of the matrix products tested; Triton's interpreter multiplies bfloat16 as bits."""
if DEVICE == "cuda":
    MULTIPLIED.append(torch.bfloat16)


def paged_layer(
    context_lens: list[int],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (kv_cache of one layer, block_tables).

    The layer is the middle one of a block-major cache of three. What no sequence owns is
    NaN, and table entries past a sequence's last block point out of the cache: a kernel
    that reads either is found out.
    """
    counts = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(counts) + 2
    shape = (num_blocks, 3, 2, block_size, num_kv_heads, head_dim)
    cache = torch.full(shape, float("nan"), dtype=dtype)
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(counts), max(1, *counts) + 1), 2**30, dtype=torch.int32)
    for seq, (length, count) in enumerate(zip(context_lens, counts, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        tables[seq, :count] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(0, length, block_size):
            filled = min(block_size, length - position)
            values = torch.randn(2, filled, num_kv_heads, head_dim, generator=generator)
            cache[blocks[position // block_size], 1, :, :filled] = values.to(dtype)
    return cache.to(DEVICE)[:, 1], tables.to(DEVICE)


def tolerance(dtype: torch.dtype) -> float:
    """Relative error that rounding alone explains."""
    return {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[dtype]


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |output - expected| / |expected| in Frobenius norm."""
    difference = (output.float() - expected.float()).norm()
    return float(difference / expected.float().norm().clamp(min=1e-20))
