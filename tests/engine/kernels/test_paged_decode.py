"""The decode kernel computes what its plain-torch definition says."""

import itertools
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import AttentionRule
from engine.kernels import join_pieces as join_pieces_module
from engine.kernels.decode_parts import UNIT, PartCounts, count_parts, count_slots, decode_parts
from engine.kernels.join_pieces import join_grid
from engine.kernels.paged_decode import (
    FEW_HEADS,
    PROGRAMS,
    DecodeTiles,
    decode_programs,
    decode_tiles,
    paged_decode,
)
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
    programs: int = 24,
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
    windows = (rule.sliding_window,)
    count = max(1, programs // num_kv_heads)
    parts = decode_parts(lens_tensor, PartCounts(count, count), windows)[0]
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
    for programs in (2, 24):
        assert_agrees([1, 65, 190], rule=rule, sinks=sinks, tiles=DecodeTiles(32, 4, 2), programs=programs)


def test_a_program_joins_the_parts_of_several_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_pieces_module, "join_grid", lambda heads, dim, seqs: (32, 4, (4, seqs)))
    assert_agrees([1, 65, 190], heads=(6, 2), sinks=True, tiles=DecodeTiles(32, 4, 2))
    assert_agrees([200], heads=(3, 3), tiles=DecodeTiles(32, 4, 2))


def test_heads_of_many_sequences_share_programs() -> None:
    grids = [(1, (32, 1)), (4, (8, 64)), (16, (2, 256)), (32, (1, 1000))]
    assert [join_grid(32, 128, seqs)[1:] for seqs in (1, 64, 256, 1000)] == grids
    assert join_grid(32, 64, 1) == (64, 1, (32, 1))
    assert join_grid(16, 512, 1) == (128, 1, (64, 1)), "a head of latents is four rows"


def test_few_heads_read_smaller_tiles_with_more_loads_under_way_than_many() -> None:
    few, many = decode_tiles(256, FEW_HEADS), decode_tiles(256, FEW_HEADS + 1)
    assert (few.tokens, few.num_stages) == (many.tokens // 2, 5)
    assert decode_tiles(128, 8).num_warps == 1
    for row_bytes, is_scaled in ((512, False), (256, True)):
        few, many = (decode_tiles(row_bytes, heads, is_scaled) for heads in (FEW_HEADS, FEW_HEADS + 1))
        assert few == many


def test_tiles_of_one_warp_have_twice_as_many_programs() -> None:
    assert decode_tiles(256, 8, is_scaled=True).num_warps == 1
    assert decode_programs(256, is_scaled=True).all == 2 * decode_programs(256).all
    assert decode_tiles(512, 8, is_scaled=True).num_warps == 2
    assert decode_programs(512, is_scaled=True) == PROGRAMS


@pytest.mark.parametrize("dtype", MULTIPLIED)
def test_the_tiles_of_few_heads_agree(dtype: torch.dtype) -> None:
    for head_dim in (64, 128):
        tiles = decode_tiles(head_dim * dtype.itemsize, 2)
        assert_agrees([70, 0, 3, 131], head_dim=head_dim, dtype=dtype, tiles=tiles, programs=8)


@pytest.mark.parametrize("programs", [2, 24])
@pytest.mark.parametrize(("window", "cap", "sinks"), [(0, 0.0, False), (1, 0.0, False), (5, 3.0, True)])
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
    parts = decode_parts(lens_tensor, PartCounts(programs, programs), (window,))[0]
    tiles = DecodeTiles(16, 4, 2)
    output = paged_decode(query, kv_cache, *arguments, tiles=tiles, added=added, parts=parts)
    assert relative_error(output, expected) < tolerance(torch.float32)
    assert torch.equal(kv_cache.nan_to_num(), expected_cache.nan_to_num())


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_new_token_alone_in_its_window_is_all_that_is_read(block_size: int) -> None:
    lens = [1, 6, 18, 65]
    generator = torch.Generator().manual_seed(0)
    kv_cache, tables = paged_layer(lens, 2, 64, block_size, torch.float32, generator)
    kv_cache.fill_(float("nan"))
    query = torch.randn(4, 4, 64, generator=generator).to(DEVICE)
    key, value = torch.randn(2, 4, 2, 64, generator=generator).to(DEVICE)
    lens_tensor = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    rule = AttentionRule(0.3, sliding_window=1)
    output = paged_decode(query, kv_cache, tables, lens_tensor, rule, added=(key, value))
    assert torch.equal(output, value.repeat_interleave(2, 1))


def test_a_row_of_padding_is_zeros() -> None:
    generator = torch.Generator().manual_seed(0)
    kv_cache, tables = paged_layer([120], 1, 64, 16, torch.float32, generator)
    tables = torch.cat([tables, torch.full_like(tables, 2**30)])
    query = torch.randn(2, 2, 64, generator=generator).to(DEVICE)
    lens = torch.tensor([120, 0], dtype=torch.int32, device=DEVICE)
    for programs in (1, 64):
        parts = decode_parts(lens, PartCounts(programs, programs))[0]
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
    programs=st.sampled_from([1, 4, 24]),
    seed=st.integers(0, 2**20),
)
def test_random_batches_agree(lens, heads, block_size, window, tile, programs, seed) -> None:
    rule = AttentionRule(scale=0.2, sliding_window=window)
    tiles = DecodeTiles(tile, 4, 2)
    assert_agrees(lens, heads, 32, block_size, rule=rule, tiles=tiles, programs=programs, seed=seed)


def test_a_sequence_of_more_pieces_than_are_joined_at_once_agrees() -> None:
    assert_agrees([2500, 70], heads=(2, 1), head_dim=256, programs=40)
    assert_agrees([2500], heads=(2, 1), head_dim=32, programs=40, sinks=True)


def test_padding_between_sequences_is_read_by_nobody() -> None:
    assert_agrees([0, 70, 0, 0, 3, 131, 64, 0, 1], programs=8)


H200 = PartCounts(66, 49)
"""Parts of 8 KV heads there."""


def test_each_multiprocessor_has_its_programs() -> None:
    assert count_parts(2, PROGRAMS, torch.device("cpu")) == (8, 6)
    assert count_parts(100, PROGRAMS, torch.device("cpu")) == (1, 1)


def lengths_of(lens: list[int]) -> tuple[list[int], list[int]]:
    """Return the units of each part, and the pieces of each sequence."""
    counts = H200
    numbers = decode_parts_definition(torch.tensor(lens, dtype=torch.int32), counts).tolist()
    cut = numbers[: counts.all + 1]
    pieces = numbers[-3 * len(lens) : -2 * len(lens)]
    return [end - begin for begin, end in pairwise(cut)], pieces


@pytest.mark.parametrize("lens", [[24_000, *[500] * 40], [8_300] * 24, [1_090] * 80, [20_000, 9_000] * 40])
def test_parts_are_equal_whatever_the_lengths_are(lens: list[int]) -> None:
    units, _ = lengths_of(lens)
    assert max(units) - min(units) <= 1
    assert sum(units) == sum(-(-length // UNIT.value) for length in lens)


def test_a_long_context_is_cut_whatever_stands_beside_it() -> None:
    units, pieces = lengths_of([12_000, *[0] * 63])
    assert pieces[0] == 33
    assert max(units) * UNIT.value <= 384
    assert lengths_of([100_000, *[0] * 63])[1][0] == H200.all
    assert lengths_of([30_000, *[1000] * 63])[1][0] >= 20


def test_few_sequences_of_some_length_are_cut_each_for_itself() -> None:
    for lens in ([1088] * 8, [1090] * 4, [900, 1100, 1300, 1000], [64], [8_300] * 2, [1090] * 64):
        units, pieces = lengths_of(lens)
        assert sum(map(bool, units)) == sum(pieces), "every part is one piece"
    assert lengths_of([1090] * 64)[1] == [1] * 64
    assert lengths_of([8300])[1] == [33]


@settings(max_examples=25, deadline=None)
@given(
    lens=st.lists(
        st.one_of(st.just(0), st.integers(1, 100), st.integers(1, 100_000)), min_size=1, max_size=40
    ),
    counts=st.sampled_from([PartCounts(*each) for each in ((1, 1), (16, 9), (132, 132), (528, 396), H200)]),
    window=st.sampled_from([1, 100, 4096]),
)
def test_parts_are_as_defined_and_hold_every_token_once(lens, counts, window) -> None:
    lens_tensor = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    rows = decode_parts(lens_tensor, counts, (0, window)).cpu()
    for row, seen in zip(rows, (0, window), strict=True):
        assert torch.equal(row, decode_parts_definition(lens_tensor.cpu(), counts, seen))
    count = counts.all
    numbers = rows[0].tolist()
    cut, firsts = numbers[: count + 1], numbers[count + 1 : 2 * count + 1]
    of_seqs = [numbers[2 * count + 2 + at * len(lens) :][: len(lens)] for at in range(4)]
    begins, slots, pieces, own_slots = of_seqs
    taken = []
    for seq, length in enumerate(lens):
        end = begins[seq] + -(-length // UNIT.value)
        parts = [part for part in range(count) if cut[part] < end and cut[part + 1] > begins[seq]]
        assert pieces[seq] == (len(parts) if length else 0)
        if length:
            own = [own_slots[seq] + part for part in parts]
            assert own == list(range(slots[seq], slots[seq] + len(parts)))
            taken += own
            assert all(firsts[part] == seq for part in parts[1:])
            assert firsts[parts[0]] <= seq
    assert taken == list(range(len(taken)))
    assert len(taken) <= count_slots(count, len(lens))


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
