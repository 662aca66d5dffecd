"""KV layout: where the bytes of a block are. Pure arithmetic, the one place it is done.

There is one layout, on the device, on the host and on the wire: block-major,

    cache  [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    block              [num_layers, 2, block_size, num_kv_heads, head_dim]
    layer slice                    [2, block_size, num_kv_heads, head_dim]

so a block is one contiguous object and each layer a contiguous slice of it. A
per-layer device layout ([num_layers, num_blocks, ...]) was weighed: within one layer
a block is the same contiguous run of bytes either way, so attention reads it alike,
while the block-major cache can be sent, stored and checksummed with no repacking.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of one block, on one rank.

    Where K and V differ in head_dim (MLA), `head_dim` is the larger and the rest of
    the smaller is padding that nobody reads.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} has no KV layout; known: {sorted(DTYPE_BYTES)}")
        if self.block_size < 16 or self.block_size % 16:
            raise ValueError(f"block_size {self.block_size} is not a positive multiple of 16")

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's K and V of one block."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_size

    def offset(self, block_id: int, layer: int = 0) -> int:
        """Return the byte offset of a layer slice in the cache."""
        return block_id * self.block_bytes + layer * self.layer_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    @property
    def layout_id(self) -> str:
        """Equal ids mean that bytes are interchangeable between two nodes."""
        return f"bm1/l{self.num_layers}/h{self.num_kv_heads}/d{self.head_dim}/b{self.block_size}/{self.dtype}"
