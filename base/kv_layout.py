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

from collections.abc import Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class KvPart:
    """The layers and KV heads of a block that one rank's cache has."""

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int

    def overlap(self, other: KvPart) -> KvPart | None:
        """Return what both have; None: nothing."""
        first_layer = max(self.first_layer, other.first_layer)
        first_head = max(self.first_head, other.first_head)
        layers = min(self.first_layer + self.num_layers, other.first_layer + other.num_layers) - first_layer
        heads = min(self.first_head + self.num_heads, other.first_head + other.num_heads) - first_head
        return KvPart(first_layer, layers, first_head, heads) if layers > 0 and heads > 0 else None

    def of(self, layout: KvLayout) -> KvLayout:
        """Return the layout of such a part's blocks."""
        return replace(layout, num_layers=self.num_layers, num_kv_heads=self.num_heads)

    def within(self, outer: KvPart) -> KvPart:
        """Return the same, counted from where `outer` begins."""
        first_layer, first_head = self.first_layer - outer.first_layer, self.first_head - outer.first_head
        return replace(self, first_layer=first_layer, first_head=first_head)


def whole_layout(layout: KvLayout, parts: Sequence[KvPart]) -> KvLayout:
    """Return the layout of the blocks that `parts` divide among them.

    Args:
        layout: Of the blocks of any part.
    """
    num_layers = max(part.first_layer + part.num_layers for part in parts)
    num_heads = max(part.first_head + part.num_heads for part in parts)
    return replace(layout, num_layers=num_layers, num_kv_heads=num_heads)


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the bytes of a part, one behind the other, are in the whole: equal runs, equally far apart."""

    first: int
    run: int
    stride: int

    def of_words(self, word_bytes: int) -> Spread:
        """Return the same in words; raises ValueError if a run is no number of them."""
        if any(number % word_bytes for number in (self.first, self.run, self.stride)):
            raise ValueError(f"the heads of a token are not words of {word_bytes} bytes: {self}")
        return Spread(self.first // word_bytes, self.run // word_bytes, self.stride // word_bytes)


def spread(whole: KvLayout, part: KvPart) -> Spread:
    """Return where a part's bytes are in a block of `whole`.

    Of all heads they are one run; of some, each run is a token's heads in one of K and V.
    """
    first = part.first_layer * whole.layer_bytes
    if part.num_heads == whole.num_kv_heads:
        num_bytes = part.num_layers * whole.layer_bytes
        return Spread(first, num_bytes, num_bytes)
    head_bytes = whole.head_dim * DTYPE_BYTES[whole.dtype]
    return Spread(
        first + part.first_head * head_bytes, part.num_heads * head_bytes, whole.num_kv_heads * head_bytes
    )


@dataclass(frozen=True, slots=True)
class PartRuns:
    """Where the bytes of a part are in a block of one rank and in a block of another."""

    source_offsets: tuple[int, ...]
    target_offsets: tuple[int, ...]
    """Offsets from the start of the block, as many as in the source, in the same order."""
    length: int
    """Bytes at each."""


def part_runs(layout: KvLayout, part: KvPart, source: KvPart, target: KvPart) -> PartRuns:
    """Return the runs of bytes that `part` consists of, which both ranks have.

    Where both have the same heads, layers that follow each other are one run. Otherwise it is
    the heads of one token in one of K and V: heads are the innermost but one dimension.

    Args:
        layout: Of any part of the blocks.
        source, target: What the blocks on either side have.
    """
    ends = [(part.within(side), side.of(layout)) for side in (source, target)]
    if all(inner.num_heads == block.num_kv_heads for inner, block in ends):
        first, second = (inner.first_layer * block.layer_bytes for inner, block in ends)
        return PartRuns((first,), (second,), part.num_layers * source.of(layout).layer_bytes)
    head_bytes = layout.head_dim * DTYPE_BYTES[layout.dtype]
    offsets = [
        tuple(
            inner.first_layer * block.layer_bytes + (row * block.num_kv_heads + inner.first_head) * head_bytes
            for row in range(part.num_layers * 2 * layout.block_size)
        )
        for inner, block in ends
    ]
    return PartRuns(offsets[0], offsets[1], part.num_heads * head_bytes)


def is_partition(parts: Sequence[KvPart], whole: KvPart) -> bool:
    """Return whether each layer's each head of `whole` is in exactly one of `parts`."""
    # Parts come off the wire, and each is compared with all before it.
    if len(parts) > whole.num_layers * whole.num_heads or any(part.overlap(whole) != part for part in parts):
        return False
    if any(one.overlap(other) for index, one in enumerate(parts) for other in parts[:index]):
        return False
    return sum(part.num_layers * part.num_heads for part in parts) == whole.num_layers * whole.num_heads
