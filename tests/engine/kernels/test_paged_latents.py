"""Kernels over paged latents say what attention over expanded K and V does."""

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch

from engine.attention import AttentionRule
from engine.kernels.decode_parts import PartCounts, decode_parts
from engine.kernels.expanded_latents import (
    Chunks,
    attend_expanded,
    capacity_of,
    expand_latents,
    expand_stages,
    expanded_tiles,
)
from engine.kernels.paged_latents import LatentTiles, chunk_tiles, decode_latents, prefill_latents
from engine.kernels.paged_prefill import PrefillTiles
from engine.kernels.write_kv import write_rows
from engine.latent_attention import LatentHeads, latent_prefill, latents_reader, values_of
from tests.engine.kernels.paged import DEVICE, relative_error

NOPE, ROTARY, VALUE = 16, 8, 12
LENS = [70, 1, 33, 16]
RULE = AttentionRule(scale=0.2)


class Case:
    """Random latents of a few sequences, and the layer that makes heads of them."""

    def __init__(
        self, num_heads: int, rank: int, block_size: int = 16, lengths: Sequence[int] = LENS
    ) -> None:
        generator = torch.Generator().manual_seed(num_heads)
        counts = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(counts) + 1, generator=generator).tolist()
        self.tables = torch.full((len(lengths), max(counts)), 2**30, dtype=torch.int32)
        self.layer = tuple(
            torch.full((sum(counts) + 1, 3, block_size, 1, width), float("nan"))[:, 1].to(DEVICE)
            for width in (rank, ROTARY)
        )
        slots = []
        for row, count, length in zip(self.tables, counts, lengths, strict=True):
            row[:count] = torch.tensor([order.pop() for _ in range(count)])
            at = torch.arange(length)
            slots.append(row[at // block_size].long() * block_size + at % block_size)
        self.slots = torch.cat(slots).to(DEVICE)
        for field in self.layer:
            rows = torch.randn(len(self.slots), field.shape[3], generator=generator).to(DEVICE)
            write_rows(rows, field, self.slots)
        linear = torch.nn.Linear(rank, num_heads * (NOPE + VALUE), bias=False)
        linear.weight = torch.nn.Parameter(
            torch.randn(linear.weight.shape, generator=generator) / rank**0.5, requires_grad=False
        )
        self.heads = LatentHeads(linear.to(DEVICE), NOPE, VALUE)
        query = torch.randn(len(self.slots), num_heads, NOPE + ROTARY, generator=generator)
        self.query = query.to(DEVICE)
        self.lens = torch.tensor(list(lengths), dtype=torch.int32, device=DEVICE)
        self.tables = self.tables.to(DEVICE)

    def halves(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latent = torch.bmm(query[..., :NOPE].transpose(0, 1), self.heads.weight[:, :NOPE])
        return latent.transpose(0, 1), query[..., NOPE:]

    def expected(self, query: torch.Tensor, starts: list[int]) -> torch.Tensor:
        read, block_size = latents_reader(self.layer), self.layer[0].shape[1]
        chunks = self.tables, torch.tensor(starts), self.lens
        return latent_prefill(query, *chunks, read, block_size, self.heads, RULE)

    def values(self, mixed: torch.Tensor) -> torch.Tensor:
        return values_of(mixed, self.heads.weight, NOPE)


@pytest.mark.parametrize("programs", [1, 8, 24])
@pytest.mark.parametrize(("num_heads", "rank"), [(4, 32), (16, 64), (24, 48)])
def test_decode_equals_attention_over_what_latents_expand_to(
    num_heads: int, rank: int, programs: int
) -> None:
    case = Case(num_heads, rank)
    query = case.query[: len(LENS)]
    parts = decode_parts(case.lens, PartCounts(programs, programs))[0]
    mixed = decode_latents(*case.halves(query), case.layer, case.tables, case.lens, RULE.scale, parts)
    expected = case.expected(query, list(range(len(LENS) + 1)))
    assert relative_error(case.values(mixed), expected) < 5e-6


@pytest.mark.parametrize(
    ("num_heads", "rank", "block_size", "parts"),
    [
        (4, 32, 16, 1),
        (4, 32, 64, 1),
        (4, 32, 16, 3),
        (16, 64, 16, 1),
        (24, 48, 16, 3),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in ((16, 64, 64, 1), (16, 64, 16, 3), (24, 48, 16, 1), (24, 48, 64, 1))
        ),
    ],
)
def test_chunks_equal_attention_over_what_latents_expand_to(
    num_heads: int, rank: int, block_size: int, parts: int
) -> None:
    """Chunks of all tokens, of some after a prefix, and of one."""
    case = Case(num_heads, rank, block_size)
    starts = [0, 70, 71, 71 + 20, 71 + 20 + 16]
    query = case.query[: starts[-1]]
    tiles = LatentTiles(heads=16, rows=32, tokens=16, num_warps=4, num_stages=1, parts=parts, least_keys=32)
    mixed = torch.full((*query.shape[:2], rank), float("nan"), device=DEVICE)
    where = case.tables, torch.tensor(starts, dtype=torch.int32, device=DEVICE), case.lens
    prefill_latents(*case.halves(query), case.layer, *where, RULE.scale, mixed, tiles)
    assert relative_error(case.values(mixed), case.expected(query, starts)) < 5e-6


CONTEXTS = [300, 40, 150, 130, 520]
CHUNKS = [200, 30, 150, 128, 131]
"""All but one after a prefix; the second is too short for a place in a workspace."""
PLACES = [384, 384, 384 + 256, 384 + 2 * 256, 384 + 2 * 256 + 640]
"""Where the places of each and of those before it end."""


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("num_heads", "capacity", "num_seqs"),
    [
        (2, 384 + 256 + 256 + 640, 5),
        (2, 384 + 256, 3),
        pytest.param(3, 384, 4, marks=pytest.mark.full),
        pytest.param(3, 128, 5, marks=pytest.mark.full),
    ],
)
def test_chunks_with_a_place_in_a_workspace_are_expanded_and_others_absorbed(
    num_heads: int, capacity: int, num_seqs: int, parts: int
) -> None:
    case = Case(num_heads, 32, 16, CONTEXTS[:num_seqs])
    starts = [0, *accumulate(CHUNKS[:num_seqs])]
    query = case.query[: starts[-1]]
    chunks = Chunks(case.tables, torch.tensor(starts, dtype=torch.int32, device=DEVICE), case.lens)
    mixed = torch.full((*query.shape[:2], 32), float("nan"), device=DEVICE)
    tiles = LatentTiles(heads=16, rows=64, tokens=64, num_warps=4, num_stages=1, parts=parts, least_keys=64)
    prefill_latents(*case.halves(query), case.layer, *chunks, RULE.scale, mixed, tiles, capacity)
    output = case.values(mixed).contiguous()
    is_absorbed = [bool(output[start].isfinite().all()) for start in starts[:-1]]
    assert (
        is_absorbed
        == [num < 128 or place > capacity for num, place in zip(CHUNKS, PLACES, strict=True)][:num_seqs]
    )
    launch = PrefillTiles(rows=64, tokens=64, num_warps=4, num_stages=1, parts=parts, least_keys=64)
    attend_expanded(query, case.layer, case.heads.weight, NOPE, chunks, capacity, RULE.scale, output, launch)
    assert relative_error(output, case.expected(query, starts)) < 5e-6


@pytest.mark.parametrize(
    ("shared_kib", "number_bytes", "widths", "expected"),
    [
        (227, 2, (192, 128), (64, 128, 3, 3)),
        (227, 4, (192, 128), (16, 128, 1, 2)),
        (227, 2, (320, 256), (64, 128, 2, 3)),
        (163, 2, (192, 128), (16, 128, 2, 3)),
        (99, 2, (192, 128), (16, 128, 1, 2)),
        (99, 4, (192, 128), (16, 64, 1, 1)),
        (0, 4, (192, 128), (64, 128, 3, 3)),
    ],
)
def test_a_launch_takes_no_more_shared_memory_than_a_card_has(
    shared_kib: int, number_bytes: int, widths: tuple[int, int], expected: tuple[int, ...]
) -> None:
    memory = number_bytes, shared_kib * 1024
    found = expanded_tiles(*widths, *memory)
    assert (chunk_tiles(*memory).rows, found.rows, found.num_stages, expand_stages(256, *memory)) == expected
    numbers = found.rows * widths[0] + found.num_stages * found.tokens * sum(widths)
    assert numbers * number_bytes <= shared_kib * 1024 or not shared_kib


def test_a_workspace_has_places_for_the_longest_contexts_within_its_bytes() -> None:
    tables, weight = torch.zeros(2, 9, dtype=torch.int32), torch.zeros(16, 256, 32, dtype=torch.bfloat16)
    assert capacity_of(127, tables, 16, weight) == 0
    assert capacity_of(128, tables, 16, weight) == 8 * 9 * 16
    longest = torch.zeros(2, 1 << 16, dtype=torch.int32, device="meta")
    assert capacity_of(128, longest, 64, weight) == 131_072


def test_halves_of_wide_heads_are_made_one_after_the_other() -> None:
    nope, value = 160, 144
    case = Case(1, 32, lengths=[130])
    weight = torch.randn(2, nope + value, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    starts = torch.tensor([0, 130], dtype=torch.int32, device=DEVICE)
    heads, rotary = expand_latents(case.layer, weight, nope, Chunks(case.tables, starts, case.lens), 256)
    latents, turned = (field.flatten(0, 2)[case.slots] for field in case.layer)
    assert relative_error(heads[:, :130], torch.einsum("hdr,kr->hkd", weight, latents)) < 5e-6
    assert torch.equal(rotary[:130], turned)
    assert not heads[:, 130:].any()
    assert not rotary[130:].any()


def test_padding_has_no_part_and_is_zeros() -> None:
    case = Case(4, 32)
    lens = torch.zeros_like(case.lens)
    mixed = decode_latents(*case.halves(case.query[:4]), case.layer, case.tables, lens, 1.0)
    assert not mixed.any()


def test_rows_of_padding_are_not_written() -> None:
    field = torch.zeros(3, 16, 1, 8, device=DEVICE)
    rows = torch.ones(3, 8, device=DEVICE)
    write_rows(rows, field, torch.tensor([-1, 17, -1], device=DEVICE))
    assert int(field.sum()) == 8 == int(field[1, 1].sum())


def test_what_the_kernels_do_not_take_is_refused_by_name() -> None:
    case = Case(4, 32)
    halves = case.halves(case.query[:4])
    with pytest.raises(ValueError, match="does not fit latents"):
        decode_latents(halves[1], halves[1], case.layer, case.tables, case.lens, 1.0)
    with pytest.raises(ValueError, match="query is"):
        decode_latents(halves[0].half(), halves[1].half(), case.layer, case.tables, case.lens, 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        write_rows(torch.zeros(3, 9), case.layer[0], case.slots[:3])
