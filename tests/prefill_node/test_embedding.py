"""A prompt of which a vector is wanted: computed here, and nothing of it is drawn, written or held."""

from array import array

import pytest

from base.messages import Failed, Prefill, Prefilled
from base.request import FinishReason, Pooling
from prefill_node.role import PrefillRole
from tests.node_parts import parts, work


@pytest.fixture
async def node():
    async with parts(node=PrefillRole) as made:
        yield made["node"]


async def embedded(node, pooling, name):
    node.sent.clear()
    asked = work(num_tokens=40, name=name)
    node.role.prefill(Prefill(asked, pooling=pooling))
    answer = await node.said(Prefilled)
    await node.role.tasks.idle()
    node.check_nothing_is_held()
    assert [type(item) for item in node.sent] == [Prefilled]
    assert (answer.first_token, answer.finish_reason, answer.stays) == (None, FinishReason.STOP, False)
    return answer.num_cached_tokens, array("f", answer.embedding).tolist()


async def test_its_vector_is_of_the_tokens_that_its_pooling_names_whatever_is_cached(node):
    for name in ("first", "second"):
        num_cached = 0 if name == "first" else 32
        assert await embedded(node, Pooling.LAST, name) == (num_cached, [139.0])
        assert await embedded(node, Pooling.MEAN, f"{name}-mean") == (0, [119.5])


async def test_a_step_that_fails_fails_it_and_holds_nothing(node):
    node.runner.broken = True
    asked = work(num_tokens=40)
    node.role.prefill(Prefill(asked, pooling=Pooling.LAST))
    assert (await node.said(Failed)).reason == "LostError"
    await node.role.tasks.idle()
    node.check_nothing_is_held()
