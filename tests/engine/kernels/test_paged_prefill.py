"""The prefill kernel computes what its plain-torch definition says."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import AttentionRule
from engine.kernels import paged_prefill as module
from engine.kernels.key_parts import num_parts, part_buffers
from engine.kernels.paged_decode import paged_decode
from engine.kernels.paged_prefill import PrefillTiles, paged_prefill
from tests.engine.definitions import paged_prefill_definition
from tests.engine.kernels.paged import DEVICE, MULTIPLIED, paged_layer, relative_error, tolerance

SMALL = PrefillTiles(rows=16, tokens=16, num_warps=4, num_stages=1, parts=1)
CUT = replace(SMALL, parts=4, least_keys=32)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what parts do not write be no number."""

    def buffers(parts: int, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = part_buffers(parts, output)
        if parts > 1:
            for buffer in found:
                buffer.fill_(float("nan"))
        return found

    monkeypatch.setattr(module, "part_buffers", buffers)


def assert_agrees(
    chunks: list[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    rule: AttentionRule | None = None,
    sinks: bool = False,
    tiles: PrefillTiles | None = SMALL,
    seed: int = 0,
) -> None:
    """`chunks` are (prefix, new tokens) of each sequence."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    lens = [prefix + count for prefix, count in chunks]
    kv_cache, tables = paged_layer(lens, num_kv_heads, head_dim, block_size, dtype, generator)
    starts = torch.tensor([0] + [count for _, count in chunks]).cumsum(0).to(DEVICE, torch.int32)
    query = torch.randn(int(starts[-1]), num_heads, head_dim, generator=generator).to(DEVICE, dtype)
    lens_tensor = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    sink_logits = torch.randn(num_heads, generator=generator).to(DEVICE) if sinks else None
    rule = rule or AttentionRule(scale=head_dim**-0.5)
    arguments = (query, kv_cache, tables, starts, lens_tensor, rule, sink_logits)
    output = paged_prefill(*arguments, tiles=tiles)
    assert relative_error(output, paged_prefill_definition(*arguments)) < tolerance(dtype)


def test_chunks_of_many_lengths_with_and_without_prefix_agree_in_one_launch() -> None:
    assert_agrees([(0, 1), (0, 17), (64, 16), (5, 30), (100, 1), (0, 64), (15, 2)])


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_every_head_dim_agrees(head_dim: int) -> None:
    assert_agrees([(3, 20), (0, 18)], head_dim=head_dim)


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (6, 2), (7, 1), (16, 1)])
def test_every_grouping_of_heads_agrees(heads: tuple[int, int]) -> None:
    assert_agrees([(3, 20), (0, 9)], heads=heads)


@pytest.mark.parametrize("dtype", MULTIPLIED)
def test_every_dtype_agrees_with_the_launch_that_is_chosen(dtype: torch.dtype) -> None:
    assert_agrees([(40, 33), (0, 70)], dtype=dtype, head_dim=128, tiles=None)


@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
def test_every_block_size_agrees(block_size: int) -> None:
    assert_agrees([(0, 30), (100, 20)], block_size=block_size, tiles=PrefillTiles(32, 32, 4, 1))


@pytest.mark.parametrize("window", [0, 1, 10])
@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_caps_and_sinks_agree(window: int, cap: float, sinks: bool) -> None:
    rule = AttentionRule(scale=0.3, sliding_window=window, soft_cap=cap)
    assert_agrees([(0, 20), (40, 12)], rule=rule, sinks=sinks)


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (40, 5.0)])
@pytest.mark.parametrize("sinks", [False, True])
def test_tiles_whose_keys_are_cut_and_others_agree_in_one_launch(
    window: int, cap: float, sinks: bool
) -> None:
    # one part, two, three, as many as there may be, and two of which the last has one key
    chunks = [(0, 5), (9, 16), (60, 9), (90, 7), (300, 12), (64, 1)]
    rule = AttentionRule(scale=0.3, sliding_window=window, soft_cap=cap)
    assert_agrees(chunks, rule=rule, sinks=sinks, tiles=CUT)


@pytest.mark.parametrize(
    "heads", [(6, 2), *(pytest.param(heads, marks=pytest.mark.full) for heads in ((4, 4), (7, 1), (12, 4)))]
)
def test_keys_are_cut_for_every_grouping_of_heads(heads: tuple[int, int]) -> None:
    assert_agrees([(80, 20), (0, 9)], heads=heads, head_dim=80, tiles=CUT)


def test_the_launch_that_is_chosen_cuts_a_long_prefix(monkeypatch) -> None:
    chosen = []

    def noted(*arguments: int) -> int:
        chosen.append(num_parts(*arguments))
        return chosen[-1]

    monkeypatch.setattr(module, "num_parts", noted)
    assert_agrees([(1100, 20)], tiles=None)
    assert_agrees([(1100, 20)], tiles=None, rule=AttentionRule(scale=0.1, sliding_window=128))
    assert chosen == [2, 1]


def test_no_tokens_are_attended_to_by_nobody() -> None:
    kv_cache, tables = paged_layer([0], 2, 64, 16, torch.float32, torch.Generator())
    none = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    query = torch.zeros(0, 4, 64, device=DEVICE)
    output = paged_prefill(query, kv_cache, tables, none, none[:1], AttentionRule(1.0))
    assert output.shape == query.shape


def test_few_tiles_are_cut_into_many_parts_and_many_into_none() -> None:
    assert [num_parts(tiles, 256, 10**6) for tiles in (8, 64, 80, 128, 192, 4096)] == [8, 4, 3, 2, 1, 1]


def test_no_more_parts_are_made_than_tables_have_keys_for() -> None:
    assert [num_parts(8, 256, most_keys) for most_keys in (64, 1023, 1024, 3000)] == [1, 1, 2, 5]
    assert num_parts(0, 256, 3000) == 5


def test_a_chunk_of_one_token_is_a_decode_step() -> None:
    generator = torch.Generator().manual_seed(0)
    kv_cache, tables = paged_layer([20, 33], 2, 64, 16, torch.float32, generator)
    query = torch.randn(2, 4, 64, generator=generator).to(DEVICE)
    lens = torch.tensor([20, 33], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    prefilled = paged_prefill(query, kv_cache, tables, starts, lens, AttentionRule(0.1))
    decoded = paged_decode(query, kv_cache, tables, lens, AttentionRule(0.1))
    assert relative_error(prefilled, decoded) < tolerance(torch.float32)


def test_sequences_and_tokens_of_padding_harm_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    kv_cache, tables = paged_layer([20], 2, 64, 16, torch.float32, generator)
    query = torch.randn(12, 4, 64, generator=generator).to(DEVICE)
    lens = torch.tensor([20], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 9], dtype=torch.int32, device=DEVICE)
    expected = paged_prefill(query[:9], kv_cache, tables, starts, lens, AttentionRule(0.1), tiles=SMALL)
    output = paged_prefill(
        query,
        kv_cache,
        torch.cat([tables, tables]),
        torch.tensor([0, 9, 9], dtype=torch.int32, device=DEVICE),
        torch.tensor([20, 0], dtype=torch.int32, device=DEVICE),
        AttentionRule(0.1),
        tiles=SMALL,
    )
    assert torch.equal(output[:9], expected)


def test_chunks_that_start_late_leave_the_tokens_before_them_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    kv_cache, tables = paged_layer([20, 40], 2, 64, 16, torch.float32, generator)
    query = torch.randn(120, 4, 64, generator=generator).to(DEVICE)
    lens = torch.tensor([20, 40], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([70, 79, 119], dtype=torch.int32, device=DEVICE)
    output = torch.full_like(query, 7.0)
    paged_prefill(query, kv_cache, tables, starts, lens, AttentionRule(0.1), tiles=SMALL, output=output)
    early = torch.tensor([0, 9, 49], dtype=torch.int32, device=DEVICE)
    expected = paged_prefill(query[70:119], kv_cache, tables, early, lens, AttentionRule(0.1), tiles=SMALL)
    assert torch.equal(output[70:119], expected)
    assert bool((output[:70] == 7).all())
    assert bool((output[119:] == 7).all())
    cut = replace(CUT, least_keys=16)
    output.fill_(7.0)
    paged_prefill(query, kv_cache, tables, starts, lens, AttentionRule(0.1), tiles=cut, output=output)
    assert relative_error(output[70:119], expected) < tolerance(torch.float32)
    assert bool((output[:70] == 7).all())
    assert bool((output[119:] == 7).all())


@pytest.mark.full
@settings(max_examples=8, deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 50)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    block_size=st.sampled_from([16, 32, 64]),
    window=st.sampled_from([0, 7, 64]),
    rows=st.sampled_from([16, 32, 64]),
    tile=st.sampled_from([16, 32]),
    parts=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 2**20),
)
def test_random_batches_agree(chunks, heads, block_size, window, rows, tile, parts, seed) -> None:
    rule = AttentionRule(scale=0.2, sliding_window=window)
    tiles = PrefillTiles(rows, tile, 4, 1, parts, least_keys=16)
    assert_agrees(chunks, heads, 32, block_size, rule=rule, tiles=tiles, seed=seed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"query": a["query"].half()}, "query is"),
        (lambda a: a | {"query_starts": a["query_starts"][:1]}, "query_starts"),
        (lambda a: a | {"context_lens": a["context_lens"].long()}, "context_lens"),
        (lambda a: a | {"block_tables": a["block_tables"].long()}, "block_tables"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(change, message: str) -> None:
    kv_cache, tables = paged_layer([20], 2, 64, 16, torch.float32, torch.Generator().manual_seed(0))
    arguments = {
        "query": torch.zeros(5, 4, 64, device=DEVICE),
        "kv_cache": kv_cache,
        "block_tables": tables,
        "query_starts": torch.tensor([0, 5], dtype=torch.int32, device=DEVICE),
        "context_lens": torch.tensor([20], dtype=torch.int32, device=DEVICE),
    }
    with pytest.raises(ValueError, match=message):
        paged_prefill(**change(arguments), rule=AttentionRule(1.0))
