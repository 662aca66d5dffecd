"""A node of several ranks keeps what it computed in its store, and says what one rank says of it."""

import pytest

from tests.deploy.ranked_node import BLOCK_SIZE, asked_node
from tests.engine.test_gpu_model import make_family

PROMPT = [3 + (11 * index) % 200 for index in range(8 * BLOCK_SIZE)]
FOUND = len(PROMPT) - BLOCK_SIZE
"""The last token is always computed, and so is the block that it is in."""
GROUPS = {"two stages": (1, 2), "two that share the heads": (2, 1), "two stages of two": (2, 2)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_family("llama with all heads").save_pretrained(folder)
    return folder


async def answered_alone(folder):
    async with asked_node(folder, 1, 1) as alone:
        tokens, _ = await alone.answer(PROMPT)
    return tokens


@pytest.mark.parametrize(
    "group", [*list(GROUPS)[:2], pytest.param("two stages of two", marks=pytest.mark.full)]
)
async def test_a_prefix_that_the_cache_forgot_comes_back_from_the_store(group, model):
    expected = await answered_alone(model)
    async with asked_node(model, *GROUPS[group]) as node:
        assert await node.answer(PROMPT) == (expected, 0)
        chain = await node.saved(PROMPT)
        node.forget()
        assert await node.answer(PROMPT) == (expected, FOUND)
        assert node.beside.num_loaded == FOUND // BLOCK_SIZE
        # a record that is hurt is refused, forgotten and computed again
        node.forget()
        size = node.kv.layout.block_bytes
        node.store.segment.memory[node.store.pool.block_id(chain[3]) * size + 7] ^= 1
        assert await node.answer(PROMPT) == (expected, 3 * BLOCK_SIZE)
        assert node.store.num_damaged == 1
        await node.saved(PROMPT)
        node.check_nothing_is_held()
