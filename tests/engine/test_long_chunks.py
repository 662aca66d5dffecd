"""Chunks that are attended in parts give what the definition of chunked attention gives."""

import random

import pytest
import torch

from engine.attention import AttentionRule
from engine.kernels.merge_part import merge_part
from engine.long_chunks import (
    KEYS_STEP,
    ChunkSegment,
    LongChunk,
    attend_long,
    attend_part,
    long_chunks,
    make_plans,
    rectangles_of,
    seen_heads,
    segments_of,
)
from engine.step import StepEntry, StepPlan
from tests.engine.builders import make_sequence
from tests.engine.definitions import merge_part_definition, paged_prefill_definition
from tests.engine.kernels.paged import DEVICE, paged_layer, relative_error, tolerance

BLOCK = 64
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def assert_agrees(chunks: list[LongChunk], padding: int = 0, most: int = 1024) -> None:
    generator = torch.Generator().manual_seed(0)
    lens = [chunk.prefix + chunk.num_tokens for chunk in chunks]
    kv_layer, tables = paged_layer(lens, 1, 16, BLOCK, DTYPE, generator)
    num_rows = sum(chunk.num_tokens for chunk in chunks)
    query = torch.randn(num_rows + padding, 2, 16, generator=generator).to(DEVICE, DTYPE)
    own = torch.randn(2, num_rows + padding, 1, 16, generator=generator).to(DEVICE, DTYPE)
    starts = [0]
    for chunk, table in zip(chunks, tables, strict=True):
        at = torch.arange(chunk.prefix, chunk.prefix + chunk.num_tokens, device=DEVICE)
        cached = kv_layer[table[at // BLOCK].long(), :, at % BLOCK]
        starts.append(starts[-1] + chunk.num_tokens)
        own[:, starts[-2] : starts[-1]] = cached.transpose(0, 1)
    found = attend_long(
        query, seen_heads((own[0], own[1]), kv_layer, tables[:, 0]), tables, chunks, 0.3, most
    )
    starts_tensor = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    lens_tensor = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    rule = AttentionRule(0.3)
    expected = paged_prefill_definition(query, kv_layer, tables, starts_tensor, lens_tensor, rule)
    assert relative_error(found[:num_rows], expected[:num_rows]) < tolerance(DTYPE)


def test_a_whole_prompt_longer_than_a_segment_agrees() -> None:
    assert_agrees([LongChunk(1536, 0)], most=512)


def test_equal_prompts_and_one_of_another_length_agree_before_padding() -> None:
    assert_agrees([LongChunk(512, 0), LongChunk(512, 0), LongChunk(300, 0)], padding=40)


@pytest.mark.parametrize("prefix", [KEYS_STEP, KEYS_STEP + BLOCK, 3 * KEYS_STEP + 17])
def test_a_chunk_after_a_prefix_agrees(prefix: int) -> None:
    assert_agrees([LongChunk(90, prefix)], most=60)


@pytest.mark.full
def test_chunks_with_and_without_prefix_agree_in_one_step() -> None:
    assert_agrees([LongChunk(1536, 0), LongChunk(200, 5 * KEYS_STEP + 100), LongChunk(130, 70)])


def test_rectangles_have_all_keys_but_what_is_left_over() -> None:
    for num_keys in range(0, 12 * KEYS_STEP, KEYS_STEP):
        covered = [key for rectangle in rectangles_of(num_keys) for key in rectangle]
        assert covered == list(range(num_keys))


def test_segments_follow_each_other() -> None:
    assert segments_of(LongChunk(2500, 100), 7, 1024) == [
        ChunkSegment(7, 1024, 100),
        ChunkSegment(1031, 1024, 1124),
        ChunkSegment(2055, 452, 2148),
    ]


def test_a_step_is_of_long_chunks_if_all_of_its_chunks_are() -> None:
    sequence = make_sequence("a", [1])

    def plan(*chunks: tuple[int, int]) -> StepPlan:
        single = StepEntry(sequence, 5, 1, (), True)
        entries = [StepEntry(sequence, start, count, (), True) for start, count in chunks]
        return StepPlan((single, *entries), 1)

    assert long_chunks(plan((0, 2048), (4096, 1024))) == [LongChunk(2048, 0), LongChunk(1024, 4096)]
    assert not long_chunks(plan((0, 2048), (0, 2047)))
    assert not long_chunks(plan((4095, 1024)))
    assert not long_chunks(plan())


def test_parts_are_merged_as_defined() -> None:
    generator = torch.Generator().manual_seed(0)
    output, part = torch.randn(2, 9, 3, 24, generator=generator).to(DEVICE)
    lse, part_lse = torch.randn(2, 3, 9, generator=generator).to(DEVICE) * 40
    expected, expected_lse = merge_part_definition(output, lse, part, part_lse)
    merge_part(output, lse, part, part_lse)
    assert relative_error(output, expected) < 1e-6
    assert relative_error(lse, expected_lse) < 1e-6


def test_a_part_that_does_not_fit_is_refused() -> None:
    output, lse = torch.zeros(4, 2, 8), torch.zeros(2, 4)
    with pytest.raises(ValueError, match="do not fit"):
        merge_part(output, lse, output[:3], lse[:, :3])


@pytest.mark.gpu
def test_cudnn_computes_what_the_definition_says() -> None:
    query, key, value = (
        torch.randn(2, rows, heads, 128, device="cuda", dtype=torch.bfloat16)
        for rows, heads in ((512, 8), (512, 2), (512, 2))
    )
    for is_causal in (False, True):
        found, lse = attend_part(query, key, value, is_causal, 0.1)
        q, k, v = (item.cpu().float() for item in (query, key, value))
        expected, expected_lse = attend_part(q, k, v, is_causal, 0.1)
        assert relative_error(found.cpu(), expected) < tolerance(torch.bfloat16)
        assert relative_error(lse.cpu(), expected_lse) < 1e-4


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> set[tuple[object, ...]]:
    """Lengths and strides that are attended to, by which cuDNN keeps its plans; nothing is computed."""
    found: set[tuple[object, ...]] = set()

    def attended(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found.add((query.shape, key.shape, value.shape, is_causal))
        return torch.empty_like(query), query.new_empty((1, query.shape[2], query.shape[1]))

    monkeypatch.setattr("engine.long_chunks.attend_part", attended)
    monkeypatch.setattr("engine.long_chunks.merge_part", lambda *parts: None)
    monkeypatch.setattr("engine.long_chunks.can_attend", lambda query, value_dim: True)
    return found


@pytest.mark.parametrize("most", [2048, 4096, 9000, 20_000])
def test_no_chunk_has_parts_but_those_that_plans_were_made_of(most: int, met) -> None:
    longest = 70_000
    with torch.device("meta"):
        kv_layer = torch.empty(9, 2, BLOCK, 1, 16)
        make_plans(torch.empty(0, 2, 16), (1, 16, 16), most, longest)
        planned = set(met)
        assert 10 < len(planned) < 120
        generator = random.Random(0)
        for _ in range(200):
            chunk = LongChunk(
                generator.randint(1024, most), generator.choice([0, generator.randint(0, 50_000)])
            )
            own = torch.empty(chunk.num_tokens, 1, 16)
            tables = torch.empty(1, longest // BLOCK + 1, dtype=torch.int32)
            seen = seen_heads((own, own), kv_layer, tables[:, 0])
            attend_long(torch.empty(chunk.num_tokens, 2, 16), seen, tables, [chunk], 1.0)
    assert met == planned


def test_parts_of_a_batch_have_the_strides_of_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def definition(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object) -> object:
        seen.add((query.stride(), key.stride(), value.stride()))
        return query.transpose(1, 2), query[..., 0]

    monkeypatch.setattr("engine.long_chunks._attend_part_definition", definition)
    for longer in (0, 3, 900):
        rows = torch.empty(2, 1, 64 + longer, 3, 16)
        beside = torch.empty(1, 64 + longer, 7, 16)[:, :, :3]
        attend_part(rows[0][:, :64], rows[1][:, :64], beside[:, :64], True, 1.0)
    assert len(seen) == 1


def test_no_plans_are_made_where_no_chunk_is_long(met) -> None:
    make_plans(torch.empty(0, 2, 16), (1, 16, 16), 512, 40_000)
    assert not met
