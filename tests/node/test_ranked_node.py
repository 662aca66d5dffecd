"""A node of several ranks keeps what it computed, lends and borrows it, and says what one rank says."""

import pytest

from base.metrics import NodeMetrics, exposition, process_registry
from node.metrics import observe
from tests.engine.test_gpu_model import make_family
from tests.kinds_of_kv import KINDS
from tests.node.ranked_node import BLOCK_SIZE, asked_node

PROMPT = [3 + (11 * index) % 200 for index in range(8 * BLOCK_SIZE)]
FOUND = len(PROMPT) - BLOCK_SIZE
"""The last token is always computed, and so is the block that it is in."""
GROUPS = {"two stages": (1, 2), "two that share the heads": (2, 1), "two stages of two": (2, 2)}


PAIRS = [(group, kind) for kind in KINDS for group in GROUPS]
FAST = [("two that share the heads", "heads in 8 bits")]


def family_of(folder, kind):
    """Write a model that keeps this kind of KV; return the engine's `kv_dtype`."""
    family, kv_dtype = KINDS[kind]
    make_family(family).save_pretrained(folder)
    return kv_dtype


@pytest.mark.parametrize(
    ("group", "kind"),
    [pytest.param(*pair, marks=[] if pair in FAST else pytest.mark.full) for pair in PAIRS],
)
async def test_a_prefix_comes_from_the_store_and_from_and_to_a_node_of_one_rank(group, kind, tmp_path):
    kv_dtype = family_of(tmp_path, kind)
    async with (
        asked_node(tmp_path, 1, 1, "alone", kv_dtype) as alone,
        asked_node(tmp_path, *GROUPS[group], kv_dtype=kv_dtype) as node,
    ):
        other = PROMPT[::-1]
        expected, _ = await alone.answer(other)
        assert await node.answer(other, await alone.lent(other)) == (expected, FOUND)
        await alone.end_loans()
        expected, _ = await alone.answer(PROMPT)
        assert await node.answer(PROMPT) == (expected, 0)
        chain = await node.saved(PROMPT)
        await node.forget()
        assert await node.answer(PROMPT) == (expected, FOUND)
        assert node.beside.num_loaded == 2 * FOUND // BLOCK_SIZE
        # a record that is hurt is refused, forgotten and computed again
        await node.forget()
        size = node.kv.layout.block_bytes
        node.store.segment.memory[node.store.pool.record(chain[3]).block_id * size + 7] ^= 1
        assert await node.answer(PROMPT) == (expected, 3 * BLOCK_SIZE)
        assert node.store.num_damaged == 1
        # and another node has it from here
        await alone.forget()
        await alone.store.delete(chain)
        assert await alone.answer(PROMPT, await node.lent(PROMPT)) == (expected, FOUND)
        await node.saved(PROMPT)
        await node.end_loans()
        for each in (node, alone):
            await each.forget()
            each.check_nothing_is_held()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_prompt_is_continued_where_another_node_left_it_and_all_of_it_is_found_on_disk(
    kind, tmp_path
):
    kv_dtype, disk = family_of(tmp_path, kind), str(tmp_path / "disk")
    half = PROMPT[: len(PROMPT) // 2 + 5]
    async with (
        asked_node(tmp_path, 1, 1, "one", kv_dtype) as one,
        asked_node(tmp_path, 1, 1, "two", kv_dtype, disk_path=disk) as two,
    ):
        expected, _ = await one.answer(PROMPT)
        await one.forget()
        await one.store.delete(await one.saved(PROMPT))
        assert (await one.answer(half))[1] == 0
        assert await two.answer(PROMPT, await one.lent(half)) == (expected, len(PROMPT) // 2)
        await two.saved(PROMPT)
        await one.end_loans()
    async with (
        asked_node(tmp_path, 1, 1, "two", kv_dtype, disk_path=disk) as two,
        asked_node(tmp_path, 1, 1, "three", kv_dtype) as three,
    ):
        assert await three.answer(PROMPT, await two.lent(PROMPT)) == (expected, FOUND)
        assert two.beside.num_loaded == 0
        assert await two.answer(PROMPT) == (expected, FOUND)
        assert two.beside.num_loaded == FOUND // BLOCK_SIZE
        await two.end_loans()


@pytest.mark.full
async def test_rank_0_knows_how_evenly_the_tokens_of_all_ranks_go_to_experts(tmp_path):
    make_family("mixtral").save_pretrained(tmp_path)
    async with asked_node(tmp_path, 1, 1, "alone") as alone, asked_node(tmp_path, 2, 1) as node:
        assert await node.answer(PROMPT) == await alone.answer(PROMPT)
        whole, shared = alone.engine.experts.load(), node.engine.experts.load()
        registry = process_registry()
        observe(NodeMetrics(registry), node.engine)
        shown = exposition(registry).decode()
    num_tokens = len(PROMPT) + 5  # the last of six is not read
    assert whole.num_choices == shared.num_choices == 2 * num_tokens
    assert (whole.busiest, whole.busiest_of_a_layer) == (shared.busiest, shared.busiest_of_a_layer)
    assert (whole.busiest_rank, whole.ranks) == (1.0, (1.0,))
    assert f'expert_load_ratio{{of="rank_1"}} {shared.ranks[1]}' in shown
    assert f'expert_load_ratio{{of="busiest_rank"}} {shared.busiest_rank}' in shown
    assert sum(shared.ranks) == pytest.approx(2.0)
    assert shared.busiest >= shared.busiest_rank >= max(shared.ranks) > 1
