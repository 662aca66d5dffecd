"""K and V of 8 bits: kernels write and read what the definitions in torch do, without a copy in between."""

import pytest
import torch

from base.errors import ConfigError
from base.kv_layout import head_layout
from engine.attention import (
    AttentionRule,
    decode_groups,
    heads_reader,
    paged_decode_attention,
    paged_prefill_attention,
)
from engine.attention import write_kv as write_kv_definition
from engine.kernels.paged_decode import paged_decode
from engine.kernels.paged_prefill import PrefillTiles, paged_prefill
from engine.kernels.read_scaled import read_scaled
from engine.kernels.write_kv import write_kv
from engine.scaled_kv import LARGEST, SCALE_WIDTH, plain, scaled_layout, scales_of
from tests.engine.kernels.paged import DEVICE, relative_error

RULE = AttentionRule(scale=0.125)
LENS = [70, 1, 33, 16]
HEADS, DIM = 2, 64


def scaled_layer(block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the cache of one layer and its scales, both of nothing, and tables."""
    counts = [-(-length // block_size) for length in LENS]
    tables = torch.full((len(LENS), max(counts)), 2**30, dtype=torch.int32)
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(3)).tolist()
    for row, count in zip(tables, counts, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)])
    cache = torch.full((sum(counts) + 1, 2, block_size, HEADS, DIM), float("nan"))
    scales = torch.full((sum(counts) + 1, HEADS, SCALE_WIDTH), float("nan"))
    return cache.to(torch.float8_e4m3fn).to(DEVICE), scales.to(DEVICE), tables.to(DEVICE)


def random_rows(count: int, seed: int) -> torch.Tensor:
    """Return K and V, heads of very different sizes, [2, count, HEADS, DIM]."""
    generator = torch.Generator().manual_seed(seed)
    # No number has to be rounded: Triton's interpreter drops the carry where a mantissa is rounded up to 2.
    rows = torch.randint(-15, 16, (2, count, HEADS, DIM), generator=generator) / 8
    sizes = 2.0 ** torch.randint(-2, 3, (2, count, HEADS, 1), generator=generator)
    return (rows * sizes * torch.tensor([2.0**-9, 32.0])[:, None]).to(DEVICE)


def slots_of(tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the slots of all sequences, one after the other."""
    return torch.cat(
        [
            table[torch.arange(length) // block_size].long() * block_size + torch.arange(length) % block_size
            for table, length in zip(tables.cpu(), LENS, strict=True)
        ]
    ).to(DEVICE)


@pytest.mark.parametrize("block_size", [16, 64])
def test_kernel_and_definition_leave_the_same_bytes_in_chunks_of_any_length(block_size: int) -> None:
    slots = None
    found = []
    for write, ends in ((write_kv, [120]), (write_kv_definition, [120]), (write_kv, [5, 23, 80, 81, 120])):
        cache, scales, tables = scaled_layer(block_size)
        slots = slots_of(tables, block_size)
        key, value = random_rows(len(slots), 0)
        start = 0
        for end in ends:
            write(key[start:end], value[start:end], cache, slots[start:end], scales)
            start = end
        found.append((cache.view(torch.uint8).cpu(), scales.view(torch.int32).cpu()))
    for cache_bytes, scale_bits in found[1:]:
        assert torch.equal(cache_bytes, found[0][0])
        assert torch.equal(scale_bits[..., :2], found[0][1][..., :2])


def test_padding_is_not_written() -> None:
    cache, scales, _ = scaled_layer(16)
    before = cache.view(torch.uint8).clone()
    key, value = random_rows(3, 0)
    write_kv(key, value, cache, torch.tensor([-1, -1, -1], device=DEVICE), scales)
    assert torch.equal(cache.view(torch.uint8), before)
    assert scales.isnan().all()


@pytest.mark.parametrize("block_size", [16, 64])
def test_decode_and_chunks_read_what_was_written(block_size: int) -> None:
    cache, scales, tables = scaled_layer(block_size)
    slots = slots_of(tables, block_size)
    write_kv(*random_rows(len(slots), 0), cache, slots, scales)
    lens = torch.tensor(LENS, dtype=torch.int32, device=DEVICE)
    valid = torch.where(tables == 2**30, 0, tables)
    query = torch.randn(len(slots), 4, DIM, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for clean in (cache, scales):
        numbers = clean.view(torch.uint8 if clean is cache else torch.int32)
        numbers[clean.isnan()] = 0
    singles = query[: len(LENS)]
    groups = decode_groups(valid, lens, block_size, token_bytes=1)
    read = heads_reader(cache, scales, query.dtype)
    expected = paged_decode_attention(singles, groups, read, RULE)
    output = paged_decode(singles, cache, tables, lens, RULE, scales=scales)
    assert relative_error(output, expected) < 3e-6
    starts = torch.tensor([0, *torch.tensor(LENS).cumsum(0)], dtype=torch.int32, device=DEVICE)
    expected = paged_prefill_attention(query, valid, starts, lens, read, block_size, RULE)
    output = paged_prefill(query, cache, tables, starts, lens, RULE, scales=scales)
    assert relative_error(output, expected) < 3e-6
    cut = PrefillTiles(16, 16, num_warps=4, num_stages=1, parts=3, least_keys=16)
    output = paged_prefill(query, cache, tables, starts, lens, RULE, tiles=cut, scales=scales)
    assert relative_error(output, expected) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block_size", [16, 64, 3])
def test_blocks_are_read_as_the_numbers_that_they_stand_for(block_size: int, dtype: torch.dtype) -> None:
    cache, scales, tables = scaled_layer(block_size)
    slots = slots_of(tables, block_size)
    write_kv(*random_rows(len(slots), 0), cache, slots, scales)
    whole = LENS[0] // block_size
    blocks = tables[0, :whole]
    keys, values = read_scaled(cache, scales, blocks, dtype)
    for which, read in enumerate((keys, values)):
        expected = plain(cache[blocks.long(), which], scales[blocks.long(), :, which], dtype)
        assert torch.equal(read, expected.flatten(0, 1))
        assert read.isfinite().all()
    assert not read_scaled(cache, scales, blocks[:0], dtype)[0].numel()


def test_a_cache_that_cannot_be_read_so_is_refused_by_name() -> None:
    cache, scales, tables = scaled_layer(16)
    with pytest.raises(ValueError, match="blocks must be"):
        read_scaled(cache, scales, tables, torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        read_scaled(cache, scales[:1], tables[0], torch.float32)
    with pytest.raises(ValueError, match="a block must be contiguous"):
        read_scaled(cache[:, :, :8], scales, tables[0], torch.float32)


@pytest.mark.parametrize("last", [True, False])
def test_a_token_that_decode_adds_is_stored_and_seen_as_a_chunk_would(last: bool) -> None:
    """With `last`, each sequence ends where a block does, and the new token begins the next one."""
    caches = []
    lens = torch.tensor([17, 33] if last else [16, 40], dtype=torch.int32, device=DEVICE)
    tables = torch.tensor([[4, 1, 0], [3, 0, 2]], dtype=torch.int32, device=DEVICE)
    query = torch.randn(2, 4, DIM, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for added in (True, False):
        cache = torch.zeros(5, 2, 16, HEADS, DIM, device=DEVICE).to(torch.float8_e4m3fn)
        scales = torch.ones(5, HEADS, SCALE_WIDTH, device=DEVICE)
        for seq, length in enumerate(lens.tolist()):
            at = torch.arange(length, device=DEVICE)
            slots = tables[seq, at // 16].long() * 16 + at % 16
            key, value = random_rows(length, seq)
            held = length - added
            write_kv(key[:held], value[:held], cache, slots[:held], scales)
        news = [random_rows(length, seq)[:, -1] for seq, length in enumerate(lens.tolist())]
        new = tuple(torch.stack(rows) for rows in zip(*news, strict=True))
        output = paged_decode(query, cache, tables, lens, RULE, added=new if added else None, scales=scales)
        caches.append((cache.view(torch.uint8).cpu(), scales.cpu(), output.cpu()))
    assert torch.equal(caches[0][0], caches[1][0])
    assert torch.equal(caches[0][1], caches[1][1])
    assert relative_error(caches[0][2], caches[1][2]) < 3e-6


def test_a_scale_is_a_power_of_two_and_takes_any_numbers() -> None:
    rows = torch.tensor([[[0.0, 0.0], [0.7, -3.9], [1e-45, 0.0], [float("inf"), 1.0], [2.0, 0.0]]])
    assert scales_of(rows)[0, [0, 1, 2, 4]].tolist() == [1.0, 2.0, 1.0, 2.0]
    assert scales_of(rows)[0, 3].isfinite()


def test_numbers_too_large_for_a_block_are_cut_off_and_not_lost() -> None:
    cache, scales, _ = scaled_layer(16)
    rows = torch.ones(2, 2, HEADS, DIM, device=DEVICE)
    rows[:, 1] = 1e6
    for write in (write_kv, write_kv_definition):
        write(rows[0], rows[1], cache, torch.tensor([16, 17], device=DEVICE), scales)
        assert (cache[1, :, 1].float() == LARGEST).all()


def test_heads_of_an_odd_width_are_refused():
    with pytest.raises(ConfigError, match="kv_dtype: fp8 takes numbers in pairs, not heads of 63; say auto"):
        scaled_layout(head_layout(2, HEADS, 63, 64, "bfloat16"))
