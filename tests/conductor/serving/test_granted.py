"""A prompt is computed while the blocks that it is written to are set aside."""

import asyncio

import pytest

from base.errors import CapacityError
from base.messages import Failed, Prefill, Release, Reserve
from base.request import Role
from tests.conductor.dispatching import answer, conductor, request, until
from tests.conductor.scripted_node import ScriptedWork


class TooSmall(ScriptedWork):
    """A prefill node that has less memory than the prompt needs."""

    def _answers(self, item):
        if isinstance(item, Prefill):
            self.done.add(item.work.request_id)
            return [Failed(item.work.request_id, "CapacityError", "the whole cache has 1 block")]
        return super()._answers(item)


async def test_a_prefill_node_that_is_too_small_speaks_for_itself_and_for_no_decode_node():
    async with conductor() as running:
        await running.attach(TooSmall(), node_id="p", roles=[Role.PREFILL])
        await running.attach(ScriptedWork(silent_on=Reserve), node_id="d", roles=[Role.DECODE])
        free_tokens = running.view.node("d").free_tokens()
        with pytest.raises(CapacityError, match="the whole cache"):
            await answer(running.dispatcher, request())
        assert running.view.node("d").free_tokens() == free_tokens
        assert len(running.seen.made) == 1


async def test_a_prompt_begins_before_its_blocks_are_set_aside_and_ends_where_they_are_refused():
    async with conductor(patience_s=1e-9) as running:
        prefill, decode = ScriptedWork(), ScriptedWork(silent_on=Reserve)
        await running.attach(prefill, node_id="p", roles=[Role.PREFILL])
        await running.attach(decode, node_id="d", roles=[Role.DECODE])
        asking = asyncio.ensure_future(answer(running.dispatcher, request()))
        await until(lambda: prefill.received and decode.received)
        assert [type(item) for item in prefill.received] == [Prefill]
        decode.send(Failed(decode.received[0].work.request_id, "CapacityError", "full"))
        with pytest.raises(CapacityError):
            await asking
        await until(lambda: not prefill.held())
        assert [type(item) for item in prefill.received] == [Prefill, Release]
        assert running.view.num_in_flight == 0
