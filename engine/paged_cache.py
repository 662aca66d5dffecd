"""Paged cache: the KV tensor of one device, and its bytes.

One tensor in the one layout (`base/kv_layout.py`): a block is contiguous, so on a CPU the cache can lie in
the memory that peers write into, and a block's bytes are a slice.
"""

from __future__ import annotations

import torch

from base.kv_layout import KvLayout

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class PagedCache:
    """Owns the tensor [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, device: torch.device, memory: memoryview | None = None
    ) -> None:
        """Lay a CPU cache over `memory`, writable and of at least `num_blocks` blocks; None allocates."""
        self.layout = layout
        self.num_blocks = num_blocks
        dtype = TORCH_DTYPES[layout.dtype]
        shape = (num_blocks, *layout.block_shape)
        if memory is None:
            # Zeroed: a slot that was never written is finite, so that masking it out is enough.
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        else:
            assert device.type == "cpu", "only a CPU cache lies over given memory"
            flat = torch.frombuffer(memory, dtype=torch.uint8, count=num_blocks * layout.block_bytes)
            self.tensor = flat.zero_().view(dtype).view(shape)
        # Untyped bytes of a CPU cache; numpy knows no bfloat16.
        self._bytes: memoryview | None = None
        if device.type == "cpu":
            self._bytes = self.tensor.view(-1).view(torch.uint8).numpy().data

    def layer(self, index: int) -> torch.Tensor:
        """Return the view [num_blocks, 2, block_size, num_kv_heads, head_dim] of one layer."""
        return self.tensor[:, index]

    def block_bytes_view(self, block_id: int) -> memoryview:
        """Return the bytes of one block of a CPU cache, writable, without a copy."""
        assert self._bytes is not None, "a block on a GPU has no host bytes"
        start = self.layout.offset(block_id)
        return self._bytes[start : start + self.layout.block_bytes]
