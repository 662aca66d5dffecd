"""A client that reads slowly takes nothing from others that its nodes are done with."""

from contextlib import aclosing

from base.block_hash import chain_root, hash_chain
from base.messages import Lend, Lent, Release
from base.request import FinishReason, Role
from tests.conductor.dispatching import answer, conductor, request, until
from tests.conductor.scripted_node import BLOCK_SIZE, GRANT, MODEL_ID, ScriptedWork

MOST_TOKENS = 900
"""More than half of what the decode node's 100 blocks of 16 hold."""


async def test_an_answer_that_its_client_has_not_read_yet_keeps_no_place_on_a_node_that_is_done_with_it():
    async with conductor(request_timeout_s=60.0) as running:
        work, decode = ScriptedWork(), ScriptedWork()
        await running.attach(work, node_id="p", roles=[Role.PREFILL])
        await running.attach(decode, node_id="d", roles=[Role.DECODE])
        running.view.mean_output_tokens = MOST_TOKENS
        async with aclosing(running.dispatcher.generate(request(MOST_TOKENS, "slow"))) as pieces:
            assert (await anext(pieces)).tokens[0].token_id == 11
            await until(lambda: running.view.num_in_flight == 0)
            assert running.view.node("d").peak_tokens == 0
            quick = await answer(running.dispatcher, request(MOST_TOKENS, "quick"))
            assert quick == ([11, 12, 13], FinishReason.LENGTH)
            read = [token.token_id async for piece in pieces for token in piece.tokens]
            assert read == [12, 13]
        assert [actual.end for _, actual in running.seen.endings] == ["finished", "finished"]
        assert running.view.num_in_flight == 0


async def test_a_request_that_ends_with_its_first_token_holds_nothing_until_that_is_read():
    async with conductor(request_timeout_s=60.0) as running:
        decode = ScriptedWork()
        await running.attach(ScriptedWork(), node_id="p", roles=[Role.PREFILL])
        await running.attach(decode, node_id="d", roles=[Role.DECODE])
        async with aclosing(running.dispatcher.generate(request(max_tokens=1))) as pieces:
            assert (await anext(pieces)).finish_reason is FinishReason.LENGTH
            await until(lambda: decode.received and not decode.held())
            assert (running.view.num_in_flight, running.dispatcher.num_running) == (0, 1)


def long_request():
    return request()._replace(token_ids=tuple(range(20)) * 40)


class Lending(ScriptedWork):
    """A node that has all blocks of `long_request`, and lends them."""

    def __init__(self):
        super().__init__()
        root = chain_root(MODEL_ID, "layout", "", "")
        self.snapshot = hash_chain(long_request().token_ids, BLOCK_SIZE, root)

    def _answers(self, item):
        return [Lent(item.request_id, GRANT, (1,))] if isinstance(item, Lend) else super()._answers(item)


async def test_blocks_that_were_lent_for_a_prompt_are_given_back_when_it_is_computed():
    async with conductor(request_timeout_s=60.0) as running:
        lender = Lending()
        await running.attach(ScriptedWork(), node_id="p", roles=[Role.PREFILL])
        await running.attach(lender, node_id="d", roles=[Role.DECODE])
        await until(lambda: running.view.index.match(lender.snapshot))
        async with aclosing(running.dispatcher.generate(long_request())) as pieces:
            await anext(pieces)
            (lent,) = (item.request_id for item in lender.received if isinstance(item, Lend))
            await until(lambda: Release(lent) in lender.received)
            assert running.dispatcher.num_running == 1
            assert [token.token_id async for piece in pieces for token in piece.tokens] == [12, 13]
        assert lender.received.count(Release(lent)) == 1
