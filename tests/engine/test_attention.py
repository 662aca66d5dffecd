"""The two attention functions and the KV write, against the plain definition."""

import pytest
import torch

from engine import attention
from engine.attention import (
    AttentionRule,
    decode_groups,
    heads_reader,
    paged_decode_attention,
    paged_prefill_attention,
    write_kv,
)
from tests.engine.definitions import attend, gathered

BLOCK_SIZE = 16
RULES = {
    "plain": AttentionRule(0.25),
    "window": AttentionRule(0.25, sliding_window=9),
    "soft cap": AttentionRule(0.5, soft_cap=2.0),
    "window and soft cap": AttentionRule(0.25, sliding_window=20, soft_cap=3.0),
}
HEADS = [(4, 4), (6, 2), (3, 1)]


def layer_of_cache(num_kv_heads: int, head_dim: int = 8, num_blocks: int = 40) -> torch.Tensor:
    """One layer of a block-major cache of three, so its blocks are not adjacent."""
    return torch.randn(num_blocks, 3, 2, BLOCK_SIZE, num_kv_heads, head_dim)[:, 1]


def decode(query, kv_cache, tables, context_lens, rule, sinks=None):
    token_bytes = kv_cache[0, :, 0].numel() * kv_cache.element_size()
    groups = decode_groups(tables, torch.tensor(context_lens).int(), BLOCK_SIZE, token_bytes)
    return paged_decode_attention(query, groups, heads_reader(kv_cache, None, query.dtype), rule, sinks)


def prefill(query, kv_cache, tables, starts, lens, rule, sinks=None):
    read = heads_reader(kv_cache, None, query.dtype)
    return paged_prefill_attention(query, tables, starts, lens, read, BLOCK_SIZE, rule, sinks)


def tables_for(context_lens: list[int]) -> torch.Tensor:
    width = max(-(-length // BLOCK_SIZE) for length in context_lens)
    return torch.randperm(40)[: width * len(context_lens)].view(len(context_lens), width).int()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("gathered_bytes", [attention.GATHERED_BYTES, 10_000, 1])
def test_decode_equals_its_definition(
    rule, num_heads, num_kv_heads, with_sinks, gathered_bytes, monkeypatch
) -> None:
    monkeypatch.setattr(attention, "GATHERED_BYTES", gathered_bytes)
    context_lens = [1, 16, 17, 40, 64, 5]
    kv_cache, tables = layer_of_cache(num_kv_heads), tables_for(context_lens)
    query = torch.randn(len(context_lens), num_heads, 8)
    sinks = torch.randn(num_heads) if with_sinks else None
    result = decode(query, kv_cache, tables, context_lens, rule, sinks)
    for seq, length in enumerate(context_lens):
        key, value = gathered(kv_cache, tables[seq], length)
        torch.testing.assert_close(result[seq, None], attend(query[seq, None], key, value, rule, sinks))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_prefill_equals_its_definition(rule, num_heads, num_kv_heads, with_sinks) -> None:
    chunks = [(7, 7), (16, 40), (33, 33), (2, 64)]
    context_lens = [context for _, context in chunks]
    kv_cache, tables = layer_of_cache(num_kv_heads), tables_for(context_lens)
    starts = torch.tensor([0, 7, 23, 56, 58]).int()
    query = torch.randn(58, num_heads, 8)
    sinks = torch.randn(num_heads) if with_sinks else None
    lens = torch.tensor(context_lens).int()
    result = prefill(query, kv_cache, tables, starts, lens, rule, sinks)
    for seq, length in enumerate(context_lens):
        part = slice(int(starts[seq]), int(starts[seq + 1]))
        key, value = gathered(kv_cache, tables[seq], length)
        torch.testing.assert_close(result[part], attend(query[part], key, value, rule, sinks))


def test_entries_past_the_last_block_do_not_matter() -> None:
    kv_cache = layer_of_cache(2)
    query, lens = torch.randn(2, 4, 8), [20, 60]
    tables = torch.tensor([[3, 9, 0, 0], [1, 2, 4, 5]]).int()
    other = torch.tensor([[3, 9, 8, 7], [1, 2, 4, 5]]).int()
    rule = RULES["plain"]
    torch.testing.assert_close(
        decode(query, kv_cache, tables, lens, rule),
        decode(query, kv_cache, other, lens, rule),
    )


def test_kv_is_written_to_its_slots_and_nowhere_else() -> None:
    kv_cache = layer_of_cache(2)
    before = kv_cache.clone()
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    write_kv(key, value, kv_cache, torch.tensor([5 * 16 + 3, 0, 39 * 16 + 15]))
    for row, (block, offset) in enumerate([(5, 3), (0, 0), (39, 15)]):
        assert torch.equal(kv_cache[block, 0, offset], key[row])
        assert torch.equal(kv_cache[block, 1, offset], value[row])
        before[block, :, offset] = kv_cache[block, :, offset]
    assert torch.equal(kv_cache, before)


def test_a_value_smaller_than_the_slot_leaves_the_rest_alone() -> None:
    kv_cache = layer_of_cache(2)
    before = kv_cache.clone()
    write_kv(torch.randn(1, 2, 8), torch.randn(1, 2, 5), kv_cache, torch.tensor([17]))
    assert torch.equal(kv_cache[1, 1, 1, :, 5:], before[1, 1, 1, :, 5:])


def test_what_a_sequence_does_not_see_cannot_reach_it_not_even_as_nan() -> None:
    context_lens = [1, 17, 40, 5]
    kv_cache, tables = layer_of_cache(2), tables_for(context_lens)
    for seq, length in enumerate(context_lens):
        key, value = gathered(kv_cache, tables[seq], tables.shape[1] * BLOCK_SIZE)
        rows = torch.stack([key, value], 1).clone()
        rows[length:] = float("nan")
        kv_cache[tables[seq].long()] = rows.unflatten(0, (-1, BLOCK_SIZE)).transpose(1, 2)
    query = torch.randn(len(context_lens), 4, 8)
    lens = torch.tensor(context_lens).int()
    decoded = decode(query, kv_cache, tables, context_lens, RULES["plain"])
    starts = torch.arange(len(context_lens) + 1).int()
    prefilled = prefill(query, kv_cache, tables, starts, lens, RULES["plain"])
    for result in (decoded, prefilled):
        for seq, length in enumerate(context_lens):
            key, value = gathered(kv_cache, tables[seq], length)
            torch.testing.assert_close(
                result[seq, None], attend(query[seq, None], key, value, RULES["plain"])
            )


@pytest.mark.parametrize(
    ("context_lens", "expected"),
    [
        ([5] * 6, [(0, 6)]),
        ([60, 40, 40, 3, 3, 3], [(0, 1), (1, 3), (3, 6)]),
        ([200, 10, 10], [(0, 1), (1, 3)]),
        ([10, 90, 10], [(0, 1), (1, 2), (2, 3)]),
        ([], []),
    ],
)
def test_groups_have_what_the_processors_cache_holds_padded_and_one_sequence_at_least(
    context_lens, expected, monkeypatch
) -> None:
    monkeypatch.setattr(attention, "GATHERED_BYTES", 100 * 8 // torch.get_num_threads())
    tables = torch.zeros(len(context_lens), 13, dtype=torch.int32)
    groups = decode_groups(tables, torch.tensor(context_lens).int(), BLOCK_SIZE, token_bytes=8)
    assert [(group.sequences.start, group.sequences.stop) for group in groups] == expected
