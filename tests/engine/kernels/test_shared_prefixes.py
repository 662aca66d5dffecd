"""Decode attention that reads a common prefix once computes what it computes without groups."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import AttentionRule
from engine.kernels.decode_parts import UNIT, PartCounts, decode_parts
from engine.kernels.paged_decode import DecodeTiles, most_members, paged_decode
from engine.prefix_groups import NUM_FIELDS
from tests.engine.definitions import decode_parts_definition, paged_decode_definition
from tests.engine.kernels.paged import DEVICE, paged_layer, relative_error, tolerance

Groups = list[tuple[int, list[int]]]
"""Shared tokens, and the sequences."""


def numbers_of(groups: Groups, num_seqs: int) -> torch.Tensor:
    numbers = torch.zeros(NUM_FIELDS, num_seqs, dtype=torch.int32)
    end = 0
    for index, (shared, members) in enumerate(groups):
        begin, end = end, end + shared // UNIT.value
        numbers[2:5, index] = torch.tensor([begin, end, len(members)])
        numbers[5 : 5 + len(members), index] = torch.tensor(members)
        numbers[0, members], numbers[1, members] = shared, begin
    return numbers.to(DEVICE)


def assert_agrees(
    lens: list[int],
    groups: Groups,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    rule: AttentionRule | None = None,
    sinks: bool = False,
    tile: int = 32,
    programs: int = 24,
    added: bool = False,
    seed: int = 0,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    kv_cache, tables = paged_layer(lens, num_kv_heads, head_dim, block_size, dtype, generator)
    for shared, members in groups:
        assert len(members) <= most_members(*heads)
        for seq in members[1:]:  # what a member had there itself stays in the cache and is read by nobody
            own = tables[seq, : shared // block_size].long()
            kv_cache[own] = float("nan")
            tables[seq, : shared // block_size] = tables[members[0], : shared // block_size]
    query = torch.randn(len(lens), num_heads, head_dim, generator=generator).to(DEVICE, dtype)
    new = torch.randn(2, len(lens), num_kv_heads, head_dim, generator=generator).to(DEVICE, dtype)
    lens_tensor = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    sink_logits = torch.randn(num_heads, generator=generator).to(DEVICE) if sinks else None
    arguments = (tables, lens_tensor, rule or AttentionRule(scale=0.2), sink_logits)
    rows = (new[0], new[1]) if added else None
    expected_cache = kv_cache.clone()
    expected = paged_decode_definition(query, expected_cache, *arguments, added=rows)
    numbers = numbers_of(groups, len(lens))
    count = max(2, programs // num_kv_heads)
    parts = decode_parts(lens_tensor, PartCounts(count, count), groups=numbers)[0]
    output = paged_decode(
        query, kv_cache, *arguments, DecodeTiles(tile, 4, 2), added=rows, parts=parts, groups=numbers
    )
    assert relative_error(output, expected) < tolerance(dtype)
    assert torch.equal(kv_cache.nan_to_num(), expected_cache.nan_to_num())


@pytest.mark.parametrize("programs", [2, 8, 24, 80])
@pytest.mark.parametrize("added", [False, True])
def test_a_group_reads_its_prefix_once(programs: int, added: bool) -> None:
    lens = [70, 65, 200, 0, 64, 130, 97, 1]
    assert_agrees(lens, [(64, [1, 0, 5]), (96, [2, 6])], programs=programs, added=added)


@pytest.mark.parametrize("heads", [(4, 4), (2, 1), (3, 1), (16, 4), (10, 2), (8, 1)])
def test_a_group_has_as_many_members_as_rows_have_space_for(heads: tuple[int, int]) -> None:
    most = most_members(*heads)
    assert most == {1: 8, 2: 8, 3: 5, 4: 4, 5: 3, 8: 2}[heads[0] // heads[1]]
    lens = [100 + seq for seq in range(most)]
    assert_agrees([40, *lens], [(96, list(range(most, 0, -1)))], heads=heads)


def test_many_query_heads_of_a_kv_head_leave_no_space_for_groups() -> None:
    assert most_members(32, 1) == most_members(9, 1) == 1


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_a_prefix_may_end_within_a_tile_and_within_blocks(block_size: int) -> None:
    assert_agrees([200, 193, 255], [(192, [0, 1, 2])], block_size=block_size, tile=64)
    assert_agrees([97, 100], [(64, [1, 0])], block_size=block_size, tile=64, programs=6)


def test_caps_and_sinks_count_once_for_each_of_a_group() -> None:
    rule = AttentionRule(scale=0.3, soft_cap=5.0)
    for programs in (2, 40):
        assert_agrees([70, 100, 3], [(64, [0, 1])], rule=rule, sinks=True, programs=programs)


def test_half_precision_agrees() -> None:
    assert_agrees([170, 200, 161], [(160, [2, 0, 1])], dtype=torch.float16, head_dim=64)


def test_what_a_group_shares_is_read_in_one_place() -> None:
    lens = torch.tensor([1056] * 4, dtype=torch.int32, device=DEVICE)
    groups = numbers_of([(1024, [0, 1, 2, 3])], 4)
    alone, together = (decode_parts(lens, PartCounts(8, 8), groups=each)[0] for each in (None, groups))
    assert alone[8].item() == 4 * 33
    assert together[8].item() == 32 + 4, "units of all that is read"
    assert together[17].item() == 32, "units that are read for groups"


def test_layers_with_a_window_read_each_for_itself() -> None:
    lens = torch.tensor([1056] * 4, dtype=torch.int32, device=DEVICE)
    groups = numbers_of([(1024, [0, 1, 2, 3])], 4)
    rows = decode_parts(lens, PartCounts(8, 8), (0, 64), groups)
    assert torch.equal(rows[1], decode_parts(lens, PartCounts(8, 8), (64,))[0])


@st.composite
def batches(draw: st.DrawFn, most: int) -> tuple[list[int], Groups]:
    lens = draw(st.lists(st.integers(0, 300), min_size=1, max_size=9))
    left = [seq for seq, length in enumerate(lens) if length > UNIT.value]
    groups = []
    while len(left) > 1 and draw(st.booleans()):
        members = draw(st.permutations(left))[: draw(st.integers(2, most))]
        longest = (min(lens[seq] for seq in members) - 1) // UNIT.value
        groups.append((UNIT.value * draw(st.integers(1, longest)), members))
        left = [seq for seq in left if seq not in members]
    return lens, groups


@settings(max_examples=12, deadline=None)
@given(
    batch=batches(4),
    block_size=st.sampled_from([16, 32]),
    tile=st.sampled_from([16, 32, 64]),
    programs=st.sampled_from([1, 8, 24, 66]),
    added=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_random_groups_agree(batch, block_size, tile, programs, added, seed) -> None:
    lens, groups = batch
    if any(lens):
        assert_agrees(
            lens, groups, block_size=block_size, tile=tile, programs=programs, added=added, seed=seed
        )
    assert len(groups) <= len(lens)


@settings(max_examples=25, deadline=None)
@given(
    batch=batches(8),
    counts=st.sampled_from([PartCounts(*each) for each in ((2, 1), (16, 9), (132, 132), (66, 49))]),
)
def test_parts_of_groups_are_as_defined(batch, counts) -> None:
    lens, groups = batch
    lens_tensor = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    numbers = numbers_of(groups, len(lens))
    row = decode_parts(lens_tensor, counts, groups=numbers)[0].cpu()
    assert torch.equal(row, decode_parts_definition(lens_tensor.cpu(), counts, groups=numbers.cpu()))
