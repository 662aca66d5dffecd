"""KV layout: where the bytes of a block are. Pure arithmetic, the one place it is done.

There is one layout, on the device, on the host and on the wire. It is block-major, and in each layer of a
block there is a record of named fields, one behind the other:

    cache  [num_blocks, num_layers, record]
    record  key    [block_size, num_heads, head_dim]     of a model with K and V of heads
            value  [block_size, num_heads, head_dim]
    record  latent      [block_size, kv_lora_rank]       of latent attention: no heads
            rotary_key  [block_size, rotary_dim]

so a block is one contiguous object and each layer a contiguous slice of it. What moves, sums, stores or cuts
blocks knows fields and bytes, and not what is in them: a model that keeps something else names other fields.

Ranks cut a block by layers and by heads. What has no heads each rank of a stage has whole, and one of them
answers for it (`KvPart.has_headless`).

A per-layer device layout ([num_layers, num_blocks, ...]) was weighed: within one layer a block is the same
contiguous run of bytes either way, so attention reads it alike, while the block-major cache can be sent,
stored and checksummed with no repacking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}

ALIGN_BYTES = 16
"""Alignment of every field in a block: where wide loads may begin."""


@dataclass(frozen=True, slots=True)
class KvField:
    """A named part of what a layer keeps of each token, or of each block."""

    name: str
    width: int
    """Numbers in one row, of one head."""
    dtype: str
    has_heads: bool = True
    """Whether there is a row for each head, which ranks divide; otherwise each rank has it all."""
    is_per_token: bool = True
    """Whether there is a row for each token; otherwise one for the block."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of one block, on one rank. All layers are alike."""

    num_layers: int
    num_heads: int
    """Heads of the fields that have them. Where none has, heads of queries: what ranks are cut by."""
    block_size: int
    fields: tuple[KvField, ...]

    def __post_init__(self) -> None:
        for field in self.fields:
            if field.dtype not in DTYPE_BYTES:
                raise ValueError(f"dtype {field.dtype!r} has no KV layout; known: {sorted(DTYPE_BYTES)}")
            if not field.is_per_token and field.width * DTYPE_BYTES[field.dtype] % ALIGN_BYTES:
                raise ValueError(f"width {field.width} of {field.name} is no multiple of {ALIGN_BYTES} bytes")
        if self.block_size < 16 or self.block_size % 16:
            raise ValueError(f"block_size {self.block_size} is not a positive multiple of 16")

    def heads_of(self, field: KvField) -> int:
        return self.num_heads if field.has_heads else 1

    def rows_of(self, field: KvField) -> int:
        """Return how many rows of all its heads a field has in one layer of a block."""
        return self.block_size if field.is_per_token else 1

    def row_bytes(self, field: KvField) -> int:
        return self.heads_of(field) * field.width * DTYPE_BYTES[field.dtype]

    def field_bytes(self, field: KvField) -> int:
        """Return the bytes of a field in one layer of a block."""
        return self.rows_of(field) * self.row_bytes(field)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's record in one block."""
        return sum(map(self.field_bytes, self.fields))

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, with its share of what is kept for each block; rounded up."""
        return -(-self.block_bytes // self.block_size)

    def offset(self, block_id: int, layer: int = 0) -> int:
        """Return the byte offset of a layer's record in the cache."""
        return block_id * self.block_bytes + layer * self.layer_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    @property
    def layout_id(self) -> str:
        """Equal ids mean that bytes are interchangeable between two nodes."""
        fields = [f"{field.name}={self._described(field)}" for field in self.fields]
        return "/".join(["layout=bm2", f"layers={self.num_layers}", f"block_size={self.block_size}", *fields])

    def _described(self, field: KvField) -> str:
        heads = f"{self.num_heads}x" if field.has_heads else ""
        return f"{heads}{field.width}:{field.dtype}" + ("" if field.is_per_token else ":block")


def kv_id(layout: KvLayout, checksum_kind: str, weights: str = "none") -> str:
    """Return what names KV: its bytes, the kind of its checksums, and the format of its weights, if any."""
    bytes_id = f"{layout.layout_id}/checksum={checksum_kind}"
    return bytes_id if weights == "none" else f"{bytes_id}/weights={weights}"


def head_layout(num_layers: int, num_heads: int, head_dim: int, block_size: int, dtype: str) -> KvLayout:
    """Return the layout of a model with K and V of `num_heads` KV heads.

    Where K and V differ in head_dim, `head_dim` is the larger and the rest of the smaller is padding that
    nobody reads.
    """
    fields = KvField("key", head_dim, dtype), KvField("value", head_dim, dtype)
    return KvLayout(num_layers, num_heads, block_size, fields)


def layout_difference(one: str, other: str) -> str:
    """Return the fields in which two layout ids differ, of the first and of the second, to be read."""
    pairs = [dict(item.partition("=")[::2] for item in text.split("/")) for text in (one, other)]
    names = [name for name in {**pairs[0], **pairs[1]} if pairs[0].get(name) != pairs[1].get(name)]
    return ", ".join(
        f"{name} {pairs[0].get(name, 'none')} and {pairs[1].get(name, 'none')}" for name in names
    )


@dataclass(frozen=True, slots=True)
class KvPart:
    """The layers and heads of a block that one rank's cache has, or that somebody answers for."""

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    has_headless: bool = True
    """Whether the fields without heads are in it, as they are in each rank's."""

    def overlap(self, other: KvPart) -> KvPart | None:
        """Return what both have; None: nothing."""
        first_layer = max(self.first_layer, other.first_layer)
        first_head = max(self.first_head, other.first_head)
        layers = min(self.first_layer + self.num_layers, other.first_layer + other.num_layers) - first_layer
        heads = min(self.first_head + self.num_heads, other.first_head + other.num_heads) - first_head
        has_headless = self.has_headless and other.has_headless
        if layers <= 0 or heads <= 0:
            return None
        return KvPart(first_layer, layers, first_head, heads, has_headless)

    def share_for(self, target: KvPart) -> KvPart | None:
        """Return what a rank with this part sends to one with `target`, if each that overlaps it does so.

        Of those who have the fields without heads, it is the one with the target's first head that sends
        them."""
        both = self.overlap(target)
        if both is None or both.first_head == target.first_head:
            return both
        return replace(both, has_headless=False)

    def of(self, layout: KvLayout) -> KvLayout:
        """Return the layout of such a part's blocks."""
        fields = tuple(field for field in layout.fields if field.has_heads or self.has_headless)
        return replace(layout, num_layers=self.num_layers, num_heads=self.num_heads, fields=fields)

    def within(self, outer: KvPart) -> KvPart:
        """Return the same, counted from where `outer` begins."""
        first_layer, first_head = self.first_layer - outer.first_layer, self.first_head - outer.first_head
        return replace(self, first_layer=first_layer, first_head=first_head)


def all_of(layout: KvLayout) -> KvPart:
    """Return the part that is everything."""
    return KvPart(0, layout.num_layers, 0, layout.num_heads)


def whole_layout(layout: KvLayout, parts: Sequence[KvPart]) -> KvLayout:
    """Return the layout of the blocks that `parts` divide among them.

    Args:
        layout: Of the blocks of any part.
    """
    num_layers = max(part.first_layer + part.num_layers for part in parts)
    num_heads = max(part.first_head + part.num_heads for part in parts)
    return replace(layout, num_layers=num_layers, num_heads=num_heads)


@dataclass(frozen=True, slots=True)
class Spread:
    """Where bytes that follow each other in a part are in the whole: columns of equal rows."""

    start: int
    """Where the first row begins."""
    stride: int
    """Bytes of a row."""
    count: int
    """Number of rows."""
    column: int
    """Where in each row the bytes begin."""
    run: int
    """How many they are."""

    @property
    def num_bytes(self) -> int:
        return self.count * self.run

    @property
    def is_whole(self) -> bool:
        """Whether the rows have nothing else, and all of it is one run."""
        return self.run == self.stride

    def of_words(self, word_bytes: int) -> Spread:
        """Return the same in words; raises ValueError if a run is no number of them."""
        if any(number % word_bytes for number in (self.start, self.stride, self.column, self.run)):
            raise ValueError(f"the heads of a token are not words of {word_bytes} bytes: {self}")
        start, stride, column, run = (
            number // word_bytes for number in (self.start, self.stride, self.column, self.run)
        )
        return Spread(start, stride, self.count, column, run)

    def joined(self, other: Spread) -> Spread | None:
        """Return the two as one, if `other` follows; None: it is of another sort or elsewhere."""
        if other.start != self.start + self.count * self.stride:
            return None
        if self.is_whole and other.is_whole:
            num_bytes = self.num_bytes + other.num_bytes
            return Spread(self.start, num_bytes, 1, 0, num_bytes)
        if (self.stride, self.column, self.run) != (other.stride, other.column, other.run):
            return None
        return replace(self, count=self.count + other.count)


@lru_cache(maxsize=128)
def spreads(whole: KvLayout, part: KvPart) -> tuple[Spread, ...]:
    """Return where a part's bytes are in a block of `whole`, in the order in which a rank has them.

    Of all that the layers have, they are one run; of some heads, each run is a token's heads in one field.
    """
    found: list[Spread] = []
    for each in _field_spreads(whole, part):
        joined = found[-1].joined(each) if found else None
        found[-1:] = [joined] if joined else [*found[-1:], each]
    return tuple(found)


def _field_spreads(whole: KvLayout, part: KvPart) -> list[Spread]:
    """Return where each field of each layer of a part is in a block of `whole`."""
    found = []
    for layer in range(part.first_layer, part.first_layer + part.num_layers):
        start = layer * whole.layer_bytes
        for field in whole.fields:
            if field.has_heads or part.has_headless:
                stride, heads = whole.row_bytes(field), whole.heads_of(field)
                first, count = (part.first_head, part.num_heads) if field.has_heads else (0, 1)
                head_bytes = stride // heads
                rows = whole.rows_of(field)
                found.append(Spread(start, stride, rows, first * head_bytes, count * head_bytes))
            start += whole.field_bytes(field)
    return found


def part_columns(blocks: Any, layout: KvLayout, part: KvPart) -> list[Any]:
    """Return views of a part of blocks, to be put one behind the other as a rank has them.

    Args:
        blocks: [num_blocks, block_bytes] bytes, an array of numpy's or torch's.
        layout: Of the blocks.
        part: Counted from the first layer and head of the blocks.
    """
    return [
        blocks[:, each.start : each.start + each.count * each.stride]
        .reshape(-1, each.count, each.stride)[:, :, each.column : each.column + each.run]
        .reshape(len(blocks), -1)
        for each in spreads(layout, part)
    ]


@dataclass(frozen=True, slots=True)
class PartRuns:
    """Where the bytes of a part are in a block of one rank and in a block of another."""

    source_offsets: tuple[int, ...]
    target_offsets: tuple[int, ...]
    """Offsets from the start of the block, as many as in the source, in the same order."""
    lengths: tuple[int, ...]
    """Bytes at each."""

    @property
    def are_alike(self) -> bool:
        return len(set(self.lengths)) == 1


@lru_cache(maxsize=128)
def part_runs(layout: KvLayout, part: KvPart, source: KvPart, target: KvPart) -> PartRuns:
    """Return the runs of bytes that `part` consists of, which both ranks have.

    What follows each other on both sides is one run: layers of which both have the same.

    Args:
        layout: Of any part of the blocks.
        source, target: What the blocks on either side have.
    """
    runs: list[tuple[int, int, int]] = []
    sides = [_field_spreads(side.of(layout), part.within(side)) for side in (source, target)]
    for ours, theirs in zip(*sides, strict=True):
        count, run = (1, ours.num_bytes) if ours.is_whole and theirs.is_whole else (ours.count, ours.run)
        first, second = ours.start + ours.column, theirs.start + theirs.column
        last = runs[-1] if runs else (0, 0, 0)
        if count == 1 and (first, second) == (last[0] + last[2], last[1] + last[2]) and last[2]:
            runs[-1] = (last[0], last[1], last[2] + run)
            continue
        runs += [(first + row * ours.stride, second + row * theirs.stride, run) for row in range(count)]
    return PartRuns(*zip(*runs, strict=True)) if runs else PartRuns((), (), ())


def is_partition(parts: Sequence[KvPart], whole: KvPart) -> bool:
    """Return whether each head of each layer of `whole`, and what has no heads, is in one of `parts`."""
    # Parts come off the wire, and each is compared with all before it.
    if len(parts) > whole.num_layers * whole.num_heads or any(not _is_in(part, whole) for part in parts):
        return False
    if any(_collide(one, other) for index, one in enumerate(parts) for other in parts[:index]):
        return False
    cells = sum(part.num_layers * (part.num_heads + part.has_headless) for part in parts)
    return cells == whole.num_layers * (whole.num_heads + whole.has_headless)


def _is_in(part: KvPart, whole: KvPart) -> bool:
    return part.overlap(whole) == part


def _collide(one: KvPart, other: KvPart) -> bool:
    """Return whether two parts have something in common."""
    layers = replace(one, first_head=0, num_heads=1).overlap(replace(other, first_head=0, num_heads=1))
    return bool(one.overlap(other)) or bool(layers and layers.has_headless)
