"""The decode kernel computes what its plain-torch definition says."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import AttentionRule
from engine.kernels import paged_decode as paged_decode_module
from engine.kernels.decode_parts import (
    FEW_HEADS,
    MAX_SPLITS,
    PROGRAMS,
    KernelPrograms,
    decode_parts,
    num_items,
)
from engine.kernels.paged_decode import DecodeTiles, decode_tiles, join_grid, paged_decode
from engine.kernels.paged_latents import DECODE_PROGRAMS
from tests.engine.definitions import decode_parts_definition, paged_decode_definition
from tests.engine.kernels.paged import DEVICE, MULTIPLIED, paged_layer, relative_error, tolerance


def assert_agrees(
    lens: list[int],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    rule: AttentionRule | None = None,
    sinks: bool = False,
    tiles: DecodeTiles | None = None,
    programs: int = 512,
    seed: int = 0,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    kv_cache, tables = paged_layer(lens, num_kv_heads, head_dim, block_size, dtype, generator)
    query = torch.randn(len(lens), num_heads, head_dim, generator=generator).to(DEVICE, dtype)
    lens_tensor = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    sink_logits = torch.randn(num_heads, generator=generator).to(DEVICE) if sinks else None
    rule = rule or AttentionRule(scale=head_dim**-0.5)
    arguments = (query, kv_cache, tables, lens_tensor, rule, sink_logits)
    parts = decode_parts(lens_tensor, num_kv_heads, KernelPrograms(programs))
    output = paged_decode(*arguments, tiles=tiles, parts=parts)
    assert relative_error(output, paged_decode_definition(*arguments)) < tolerance(dtype)


def test_lengths_around_the_edges_of_blocks_and_tiles_agree() -> None:
    assert_agrees([1, 15, 16, 17, 63, 64, 65, 130])


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_every_head_dim_agrees(head_dim: int) -> None:
    assert_agrees([70, 3], head_dim=head_dim)


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (6, 2), (7, 1), (32, 1)])
def test_every_grouping_of_heads_agrees(heads: tuple[int, int]) -> None:
    assert_agrees([40, 1], heads=heads)


@pytest.mark.parametrize("dtype", MULTIPLIED)
def test_every_dtype_agrees(dtype: torch.dtype) -> None:
    assert_agrees([1, 33, 100], dtype=dtype, head_dim=80)


@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
def test_every_block_size_agrees(block_size: int) -> None:
    assert_agrees([1, 47, 129, 200], block_size=block_size)


@pytest.mark.parametrize(
    ("window", "cap", "sinks"), list(itertools.product([0, 1, 64], [0.0, 5.0], [False, True]))
)
def test_windows_caps_and_sinks_agree_whether_split_or_not(window: int, cap: float, sinks: bool) -> None:
    rule = AttentionRule(scale=0.3, sliding_window=window, soft_cap=cap)
    for programs in (2, 64):
        assert_agrees([1, 65, 190], rule=rule, sinks=sinks, tiles=DecodeTiles(32, 4, 2), programs=programs)


def test_a_program_joins_the_parts_of_several_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_decode_module, "join_grid", lambda heads, seqs: (2, seqs))
    assert_agrees([1, 65, 190], heads=(6, 2), sinks=True, tiles=DecodeTiles(32, 4, 2))
    assert_agrees([200], heads=(3, 3), tiles=DecodeTiles(32, 4, 2))


def test_heads_of_many_sequences_share_programs() -> None:
    assert [join_grid(32, seqs) for seqs in (1, 64, 256, 1000)] == [(32, 1), (8, 64), (2, 256), (1, 1000)]


def test_few_heads_read_smaller_tiles_with_more_loads_under_way_than_many() -> None:
    few, many = decode_tiles(256, FEW_HEADS), decode_tiles(256, FEW_HEADS + 1)
    assert (few.tokens, few.num_stages) == (many.tokens // 2, 5)
    assert decode_tiles(128, 8).num_warps == 1
    for row_bytes, is_scaled in ((512, False), (256, True)):
        few, many = (decode_tiles(row_bytes, heads, is_scaled) for heads in (FEW_HEADS, FEW_HEADS + 1))
        assert few == many


@pytest.mark.parametrize("dtype", MULTIPLIED)
def test_the_tiles_of_few_heads_agree(dtype: torch.dtype) -> None:
    for head_dim in (64, 128):
        tiles = decode_tiles(head_dim * dtype.itemsize, 2)
        assert_agrees([70, 0, 3, 131], head_dim=head_dim, dtype=dtype, tiles=tiles, programs=8)


@pytest.mark.parametrize("programs", [2, 64])
@pytest.mark.parametrize(("window", "cap", "sinks"), [(0, 0.0, False), (5, 3.0, True)])
def test_a_new_token_that_is_handed_in_is_seen_and_written(programs, window, cap, sinks) -> None:
    generator = torch.Generator().manual_seed(0)
    lens = [1, 16, 17, 33, 180]
    kv_cache, tables = paged_layer(lens, 2, 80, 16, torch.float32, generator)
    tables = torch.cat([tables, torch.full_like(tables[:1], 2**30)])
    lens_tensor = torch.tensor([*lens, 0], dtype=torch.int32, device=DEVICE)
    query = torch.randn(6, 4, 80, generator=generator).to(DEVICE)
    added = tuple(torch.randn(2, 6, 2, 80, generator=generator).to(DEVICE))
    sink_logits = torch.randn(4, generator=generator).to(DEVICE) if sinks else None
    expected_cache = kv_cache.clone()
    rule = AttentionRule(0.3, window, cap)
    arguments = (tables, lens_tensor, rule, sink_logits)
    expected = paged_decode_definition(query, expected_cache, *arguments, added=added)
    parts = decode_parts(lens_tensor, 2, KernelPrograms(programs))
    tiles = DecodeTiles(16, 4, 2)
    output = paged_decode(query, kv_cache, *arguments, tiles=tiles, added=added, parts=parts)
    assert relative_error(output, expected) < tolerance(torch.float32)
    assert torch.equal(kv_cache.nan_to_num(), expected_cache.nan_to_num())


def test_a_row_of_padding_is_zeros() -> None:
    generator = torch.Generator().manual_seed(0)
    kv_cache, tables = paged_layer([120], 1, 64, 16, torch.float32, generator)
    tables = torch.cat([tables, torch.full_like(tables, 2**30)])
    query = torch.randn(2, 2, 64, generator=generator).to(DEVICE)
    lens = torch.tensor([120, 0], dtype=torch.int32, device=DEVICE)
    for programs in (1, 64):
        parts = decode_parts(lens, 1, KernelPrograms(programs))
        output = paged_decode(query, kv_cache, tables, lens, AttentionRule(0.1), parts=parts)
        assert output[0].norm() > 0
        assert output[1].norm() == 0


def test_queries_may_be_a_transposed_view() -> None:
    generator = torch.Generator().manual_seed(0)
    kv_cache, tables = paged_layer([20, 5], 2, 64, 16, torch.float32, generator)
    query = torch.randn(4, 2, 64, generator=generator).to(DEVICE).transpose(0, 1)
    lens = torch.tensor([20, 5], dtype=torch.int32, device=DEVICE)
    output = paged_decode(query, kv_cache, tables, lens, AttentionRule(0.1))
    expected = paged_decode(query.contiguous(), kv_cache, tables, lens, AttentionRule(0.1))
    assert torch.equal(output, expected)


@settings(max_examples=8, deadline=None)
@given(
    lens=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    block_size=st.sampled_from([16, 32, 64]),
    window=st.sampled_from([0, 7, 64]),
    tile=st.sampled_from([16, 32, 64]),
    programs=st.sampled_from([1, 4, 64]),
    seed=st.integers(0, 2**20),
)
def test_random_batches_agree(lens, heads, block_size, window, tile, programs, seed) -> None:
    rule = AttentionRule(scale=0.2, sliding_window=window)
    tiles = DecodeTiles(tile, 4, 2)
    assert_agrees(lens, heads, 32, block_size, rule=rule, tiles=tiles, programs=programs, seed=seed)


def counts_of(lens: list[int], num_kv_heads: int = 8) -> list[int]:
    parts = decode_parts_definition(torch.tensor(lens, dtype=torch.int32), num_kv_heads)
    return parts[num_items(len(lens), num_kv_heads) :][: len(lens)].tolist()


def test_a_long_context_is_cut_whatever_stands_beside_it() -> None:
    assert counts_of([20_000]) == [32]
    assert counts_of([12_000, *[0] * 63]) == [32, *[0] * 63]
    assert counts_of([12_000] * 4 + [0] * 60)[:4] == [16] * 4
    assert 20 <= counts_of([30_000, *[1000] * 63])[0] <= 32


def test_contexts_of_about_equal_length_are_not_cut_where_they_fill_the_device() -> None:
    assert counts_of([1000 + 2 * index for index in range(64)]) == [1] * 64
    assert counts_of([1088] * 8) == [8] * 8
    assert counts_of([64]) == [1]


@pytest.mark.parametrize(
    ("num_seqs", "length", "num_parts"),
    [
        (17, 8300, 3),
        (20, 8300, 3),
        (24, 8300, 2),
        (24, 1090, 2),
        (32, 8300, 2),
        (36, 1090, 1),
        (36, 24_000, 3),
        (40, 1090, 1),
        (48, 8300, 1),
        (64, 8300, 1),
        (80, 24_000, 2),
        (80, 1090, 1),
        (96, 8300, 2),
        (128, 8300, 1),
    ],
)
def test_no_last_wave_of_a_few_programs_is_waited_for(num_seqs: int, length: int, num_parts: int) -> None:
    """The numbers are the fastest ones measured on an H200, or within 4 % of them (10 % at 80)."""
    assert counts_of([length] * num_seqs) == [num_parts] * num_seqs


def test_a_long_context_among_latents_is_cut_though_whole_waves_would_be_filled_without() -> None:
    lens = torch.tensor([3590] * 65 + [31_509], dtype=torch.int32)
    found = decode_parts_definition(lens, 8, DECODE_PROGRAMS)
    assert found[num_items(66, 8, DECODE_PROGRAMS) :][65] >= 4


def test_the_longest_parts_begin_first_where_they_are_more_than_a_wave() -> None:
    lens = torch.tensor([500, 8000] * 24, dtype=torch.int32)
    found = decode_parts_definition(lens, 8)
    places = num_items(48, 8)
    counts, firsts = found[places : places + 48].tolist(), found[places + 48 :].tolist()
    assert sum(counts) * 8 > PROGRAMS[1].wave
    order = sorted(range(48), key=lambda seq: firsts[seq])
    assert order == [*range(1, 48, 2), *range(0, 48, 2)]


def test_latents_that_fill_a_wave_begin_no_second_one() -> None:
    lens = torch.full((8,), 4096, dtype=torch.int32)
    found = decode_parts_definition(lens, 1, DECODE_PROGRAMS)
    assert found[num_items(8, 1, DECODE_PROGRAMS) :][:8].tolist() == [16] * 8


@settings(max_examples=25, deadline=None)
@given(
    lens=st.lists(
        st.one_of(st.just(0), st.integers(1, 100), st.integers(1, 100_000)), min_size=1, max_size=40
    ),
    heads=st.sampled_from([1, 3, 8]),
    programs=st.sampled_from(
        [
            KernelPrograms(1),
            KernelPrograms(16),
            KernelPrograms(512),
            PROGRAMS[1],
            DECODE_PROGRAMS,
            KernelPrograms(16, 24, (9, 14)),
        ]
    ),
)
def test_parts_are_as_defined_and_every_sequence_has_its_own(lens, heads, programs) -> None:
    lens_tensor = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    found = decode_parts(lens_tensor, heads, programs).cpu()
    assert torch.equal(found, decode_parts_definition(lens_tensor, heads, programs))
    items = [item for item in found[: num_items(len(lens), heads, programs)].tolist() if item >= 0]
    assert {item // MAX_SPLITS.value for item in items} == {seq for seq, length in enumerate(lens) if length}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"query": a["query"].half()}, "query is"),
        (lambda a: a | {"query": a["query"][..., :32]}, "head_dim"),
        (lambda a: a | {"query": a["query"][:, :3]}, "evenly"),
        (lambda a: a | {"context_lens": a["context_lens"].long()}, "context_lens"),
        (lambda a: a | {"block_tables": a["block_tables"].long()}, "block_tables"),
        (lambda a: a | {"kv_cache": a["kv_cache"][:, 0]}, "paged cache"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(change, message: str) -> None:
    kv_cache, tables = paged_layer([20], 2, 64, 16, torch.float32, torch.Generator().manual_seed(0))
    arguments = {
        "query": torch.zeros(1, 4, 64, device=DEVICE),
        "kv_cache": kv_cache,
        "block_tables": tables,
        "context_lens": torch.tensor([20], dtype=torch.int32, device=DEVICE),
    }
    with pytest.raises(ValueError, match=message):
        paged_decode(**change(arguments), rule=AttentionRule(1.0))
