"""Paged cache: the KV of one device, as bytes and as the tensors that attention reads.

One run of bytes in the one layout (`base/kv_layout.py`): a block is contiguous, so on a CPU the cache can lie
in the memory that peers write into, and a block's bytes are a slice. What the fields of a layer are is known
here and to attention alone.
"""

from __future__ import annotations

import torch

from base.kv_layout import KvLayout

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Dtypes that a model computes in."""

CACHE_DTYPES = TORCH_DTYPES | {"float8_e4m3fn": torch.float8_e4m3fn}


class PagedCache:
    """Owns the bytes of all blocks, `tensor` [num_blocks, block_bytes]."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, device: torch.device, memory: memoryview | None = None
    ) -> None:
        """Lay a CPU cache over `memory`, writable and of at least `num_blocks` blocks; None allocates."""
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (num_blocks, layout.block_bytes)
        if memory is None:
            # Zeroed: a slot that was never written is finite, so that masking it out is enough.
            self.tensor = torch.zeros(shape, dtype=torch.uint8, device=device)
        else:
            assert device.type == "cpu", "only a CPU cache lies over given memory"
            flat = torch.frombuffer(memory, dtype=torch.uint8, count=num_blocks * layout.block_bytes)
            self.tensor = flat.zero_().view(shape)
        self._bytes: memoryview | None = None
        if device.type == "cpu":
            self._bytes = self.tensor.view(-1).numpy().data

    def has(self, name: str) -> bool:
        """Return whether there is a field of that name."""
        return any(field.name == name for field in self.layout.fields)

    def field(self, name: str) -> torch.Tensor:
        """Return a field of all layers, [num_blocks, num_layers, rows, heads, width]."""
        layout, start = self.layout, 0
        for field in layout.fields:
            if field.name == name:
                break
            start += layout.field_bytes(field)
        else:
            raise KeyError(name)
        layers = self.tensor.view(self.num_blocks, layout.num_layers, layout.layer_bytes)
        rows = layers[..., start : start + layout.field_bytes(field)].view(CACHE_DTYPES[field.dtype])
        return rows.view(*rows.shape[:2], layout.rows_of(field), layout.heads_of(field), field.width)

    def heads(self) -> torch.Tensor:
        """Return K and V of all layers, [num_blocks, num_layers, 2, block_size, num_heads, head_dim]."""
        key = self.field("key")
        step = self.field("value").storage_offset() - key.storage_offset()
        shape, strides = key.shape, key.stride()
        return key.as_strided((*shape[:2], 2, *shape[2:]), (*strides[:2], step, *strides[2:]))

    def block_bytes_view(self, block_id: int) -> memoryview:
        """Return the bytes of one block of a CPU cache, writable, without a copy."""
        assert self._bytes is not None, "a block on a GPU has no host bytes"
        start = self.layout.offset(block_id)
        return self._bytes[start : start + self.layout.block_bytes]
