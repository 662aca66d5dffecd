"""Vectors of prompts: computed where prompts are, with no decode node, whatever is lost meanwhile."""

import asyncio
from contextlib import aclosing

import pytest

from base.errors import UnavailableError
from base.messages import Granted, Prefill, Prefilled, Release, Reserve
from base.request import FinishReason, Pooling, Role
from conductor.placing.decisions import decide_again
from tests.conductor.dispatching import conductor, request, until
from tests.conductor.scripted_node import TIMES, ScriptedWork

VECTOR = bytes(8)


class Embedding(ScriptedWork):
    """Answers with a vector where one is wanted."""

    def _answers(self, item):
        if isinstance(item, Prefill) and item.pooling is not None:
            self.done.add(item.work.request_id)
            times = FinishReason.STOP, 4, (), TIMES
            return [Prefilled(item.work.request_id, None, *times, embedding=VECTOR)]
        return super()._answers(item)


async def answered(dispatcher, asked):
    async with aclosing(dispatcher.generate(asked)) as parts:
        return [part async for part in parts]


async def test_a_vector_needs_no_decode_node_and_reserves_nothing():
    async with conductor() as running:
        work = Embedding()
        await running.attach(work, node_id="p", roles=(Role.PREFILL,))
        (part,) = await answered(running.dispatcher, request(pooling=Pooling.LAST))
        assert (part.embedding, part.finish_reason, part.tokens) == (VECTOR, FinishReason.STOP, ())
        assert part.num_cached_tokens == 4
        assert not any(isinstance(item, Reserve) for item in work.received)
        (asked,) = [item for item in work.received if isinstance(item, Prefill)]
        assert (asked.pooling, asked.stays) == (Pooling.LAST, False)
        assert not any(isinstance(item, Granted) for item in work.received)
        node = running.view.node("p")
        assert (node.num_queued, node.decode_sequences, node.peak_tokens, running.view.num_in_flight) == (
            0,
            0,
            0,
            0,
        )
        with pytest.raises(UnavailableError, match="decode"):
            await answered(running.dispatcher, request(request_id="tokens"))


async def test_it_goes_to_a_prefill_node_though_a_decode_node_has_both_ends_free():
    async with conductor() as running:
        prefill, decode = Embedding(), Embedding()
        await running.attach(prefill, node_id="p", roles=(Role.PREFILL,))
        await running.attach(decode, node_id="d", roles=(Role.DECODE,))
        await answered(running.dispatcher, request(pooling=Pooling.MEAN))
        assert not decode.received
        (made,) = running.seen.made
        assert (made.result.prefill_node, made.result.decode_node) == ("p", "p")
        assert (made.asked.max_tokens, made.result.predicted_tbt_s, made.result.handoff_s) == (0, 0.0, 0.0)
        assert decide_again(made, running.cost, running.settings) == made.result


@pytest.mark.parametrize(("pooling", "num_blocks"), [(Pooling.LAST, 1), (Pooling.MEAN, 0)])
async def test_placement_counts_on_cached_blocks_for_the_last_token_alone(pooling, num_blocks):
    async with conductor() as running:
        await running.attach(Embedding(), node_id="p", roles=(Role.PREFILL,))
        await answered(running.dispatcher, request(pooling=pooling))
        assert len(running.seen.made[0].asked.chain) == num_blocks


async def test_a_lost_node_costs_another_try():
    async with conductor() as running:
        stuck, other = Embedding(silent_on=Prefill), Embedding()
        await running.attach(stuck, node_id="a", roles=(Role.PREFILL,))
        asking = asyncio.ensure_future(answered(running.dispatcher, request(pooling=Pooling.LAST)))
        await until(lambda: bool(stuck.received))
        await running.attach(other, node_id="b", roles=(Role.PREFILL,))
        running.clients["a"].cancel()
        (part,) = await asking
        assert part.embedding == VECTOR
        assert [made.result.prefill_node for made in running.seen.made] == ["a", "b"]


async def test_who_leaves_releases_it_everywhere():
    async with conductor() as running:
        stuck = Embedding(silent_on=Prefill)
        await running.attach(stuck, node_id="a", roles=(Role.PREFILL,))
        asking = asyncio.ensure_future(answered(running.dispatcher, request(pooling=Pooling.LAST)))
        await until(lambda: bool(stuck.received))
        asking.cancel()
        await until(lambda: any(isinstance(item, Release) for item in stuck.received))
        assert not stuck.held()
        assert running.view.num_in_flight == 0


async def test_it_is_tried_when_who_waits_for_a_decode_node_before_it_leaves():
    async with conductor(role_wait_s=300.0, request_timeout_s=600.0) as running:
        dispatcher = running.dispatcher
        await running.attach(Embedding(), node_id="p", roles=(Role.PREFILL,))
        first = asyncio.ensure_future(answered(dispatcher, request(request_id="tokens")))
        await until(lambda: len(dispatcher.queue) == 1)
        second = asyncio.ensure_future(
            answered(dispatcher, request(request_id="vector", pooling=Pooling.LAST))
        )
        await until(lambda: len(dispatcher.queue) == 2)
        # the one timer has gone off, and found that the first needs a node which no time brings
        await until(lambda: dispatcher._next_try is None)
        first.cancel()
        await asyncio.wait([first])
        async with asyncio.timeout(60.0):
            (part,) = await second
        assert part.embedding == VECTOR
