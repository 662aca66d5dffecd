"""A retry goes elsewhere than the attempt that failed, and what no node can hold is refused."""

from contextlib import aclosing

from base.messages import Failed, Granted, Prefill, Reserve, Start
from base.request import FinishReason, Role
from conductor.placing.cost_model import CostModel
from conductor.placing.decisions import decide_again
from conductor.placing.retries import MAX_ATTEMPTS
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.profiles.reader import load_profile
from tests.conductor.dispatching import answer, conductor, request
from tests.conductor.scripted_node import ScriptedWork


class CannotWrite(ScriptedWork):
    """A prefill node to which a decode node does not answer."""

    def __init__(self, peer):
        super().__init__()
        self._peer = peer

    def _answers(self, item):
        if isinstance(item, Granted) and item.target.node_id == self._peer:
            return [Failed(item.request_id, "TransferFailedError", "no such peer")]
        return super()._answers(item)


def pairs(running):
    return [(made.result.prefill_node, made.result.decode_node) for made in running.seen.made]


async def test_a_retry_avoids_the_decode_node_that_could_not_be_written_to():
    """It is dead, perhaps, which its lease tells later."""
    async with conductor() as running:
        await running.attach(CannotWrite("d0"), node_id="p0", roles=(Role.PREFILL,))
        await running.attach(ScriptedWork(), node_id="d0", roles=(Role.DECODE,))
        await running.attach(ScriptedWork(), node_id="d1", roles=(Role.DECODE,))
        tokens, _ = await answer(running.dispatcher, request(max_tokens=3))
        assert len(tokens) == 3
        assert pairs(running) == [("p0", "d0"), ("p0", "d1")]
        first, second = running.seen.made
        assert (first.asked.avoid, second.asked.avoid) == ((), ("d0",))
        settings, cost = SchedulerSettings(), CostModel(load_profile("cpu-smollm2"))
        assert decide_again(second, cost, settings) == second.result


async def test_where_there_is_one_decode_node_a_retry_is_prefilled_elsewhere():
    async with conductor() as running:
        await running.attach(CannotWrite("d0"), node_id="p0", roles=(Role.PREFILL,))
        await running.attach(ScriptedWork(), node_id="p1", roles=(Role.PREFILL,))
        await running.attach(ScriptedWork(), node_id="d0", roles=(Role.DECODE,))
        tokens, _ = await answer(running.dispatcher, request(max_tokens=3))
        assert len(tokens) == 3
        assert pairs(running) == [("p0", "d0"), ("p0", "d0"), ("p1", "d0")]


async def test_a_retry_avoids_the_node_that_gave_the_request_up():
    async with conductor() as running:

        class GivesUp(ScriptedWork):
            def _answers(self, item):
                if isinstance(item, Prefill | Start):
                    name = item.work.request_id if isinstance(item, Prefill) else item.request_id
                    return [Failed(name, "LostError", "the engine gave this prompt up")]
                return super()._answers(item)

        for work, role in ((GivesUp, "bad"), (ScriptedWork, "good")):
            await running.attach(work(), node_id=f"a-{role}-p", roles=(Role.PREFILL,))
            await running.attach(work(), node_id=f"a-{role}-d", roles=(Role.DECODE,))
        assert (await answer(running.dispatcher, request()))[1] is FinishReason.LENGTH
        assert pairs(running) == [
            ("a-bad-p", "a-bad-d"),
            ("a-good-p", "a-bad-d"),
            ("a-good-p", "a-good-d"),
        ]


class FullOnce(ScriptedWork):
    """Says once that it has no blocks, and reports that it has again."""

    def __init__(self):
        super().__init__()
        self.is_full = True

    def _answers(self, item):
        if (
            isinstance(item, Reserve)
            and self.is_full
            and item.work.num_prompt_tokens < len(item.work.token_ids)
        ):
            self.is_full = False
            return [Failed(item.work.request_id, "CapacityError", "no blocks")]
        return super()._answers(item)


async def test_a_stream_that_lost_its_node_goes_on_though_the_next_one_is_full_for_a_moment():
    async with conductor() as running:
        first, second = ScriptedWork(silent_on=Start), FullOnce()
        await running.attach(ScriptedWork(), node_id="p0", roles=(Role.PREFILL,))
        lost = await running.attach(first, node_id="d0", roles=(Role.DECODE,))
        tokens = []
        async with aclosing(running.dispatcher.generate(request(max_tokens=4))) as pieces:
            async for piece in pieces:
                tokens += piece.tokens
                if lost is not None:
                    await running.attach(second, node_id="d1", roles=(Role.DECODE,))
                    lost.cancel()
                    lost = None
        assert not second.is_full
        assert len(tokens) == 4


async def test_a_node_that_is_full_for_a_moment_takes_no_attempt_from_a_stream_that_has_one_left():
    async with conductor() as running:
        await running.attach(ScriptedWork(), node_id="p0", roles=(Role.PREFILL,))
        node = await running.attach(ScriptedWork(silent_on=Start), node_id="d0", roles=(Role.DECODE,))
        tokens, num_lost, full = [], 0, FullOnce()
        async with aclosing(running.dispatcher.generate(request(max_tokens=6))) as pieces:
            async for piece in pieces:
                tokens += piece.tokens
                if num_lost < MAX_ATTEMPTS - 1:
                    num_lost += 1
                    work = full if num_lost == MAX_ATTEMPTS - 1 else ScriptedWork(silent_on=Start)
                    following = await running.attach(work, node_id=f"d{num_lost}", roles=(Role.DECODE,))
                    node.cancel()
                    node = following
        assert (num_lost, full.is_full, len(tokens)) == (MAX_ATTEMPTS - 1, False, 6)
