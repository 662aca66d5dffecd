"""The life of one request over real streams and scripted nodes, and every way it can end."""

import asyncio
import random
from contextlib import aclosing

import pytest

from base.attach import AttachClient
from base.errors import (
    CapacityError,
    DeadlineError,
    LostError,
    RejectedError,
    SloUnreachableError,
    UnavailableError,
)
from base.messages import Failed, Granted, Prefill, Reserve, Reserved, Start, Tokens
from base.request import FinishReason, Role, SampledToken, Slo
from conductor.placing.decisions import decide_again
from conductor.placing.placement import RejectReason
from conductor.placing.scheduler_settings import RejectPolicy
from tests.conductor.dispatching import STAGES, Stuck, answer, conductor, prefills, request, until
from tests.conductor.scripted_node import GRANT, ScriptedWork, node_info
from tests.manual_clock import ManualClock


async def test_tokens_come_from_prefill_and_decode_in_order():
    async with conductor() as running:
        prefill, decode = ScriptedWork(), ScriptedWork()
        await running.attach(prefill, node_id="p", roles=[Role.PREFILL])
        await running.attach(decode, node_id="d", roles=[Role.DECODE])
        assert await answer(running.dispatcher, request()) == ([11, 12, 13], FinishReason.LENGTH)
        await until(lambda: not prefill.held() and not decode.held())
        assert [type(item) for item in prefill.received] == [Prefill, Granted]
        assert [type(item) for item in decode.received] == [Reserve, Start]
        assert running.view.num_in_flight == 0


async def test_the_nodes_of_a_prompt_take_turns_in_keeping_it():
    async with conductor() as running:
        prefill, decode = ScriptedWork(), ScriptedWork()
        await running.attach(prefill, node_id="p", roles=[Role.PREFILL])
        await running.attach(decode, node_id="d", roles=[Role.DECODE])
        for _ in range(8):
            await answer(running.dispatcher, request())
        reserves = [item for item in decode.received if isinstance(item, Reserve)]
        first = [item.work.evict_first for item in prefill.received if isinstance(item, Prefill)]
        assert len(first) == 8
        assert set(first) == {True, False}
        assert [item.work.evict_first for item in reserves] == [not there for there in first]


async def test_a_sequence_stays_on_the_node_that_is_to_do_both():
    async with conductor() as running:
        both = ScriptedWork()
        await running.attach(both)
        assert await answer(running.dispatcher, request()) == ([11, 12, 13], FinishReason.LENGTH)
        await until(lambda: not both.held())
        (prefill,) = both.received
        assert prefill.stays
        assert not prefill.work.evict_first
        assert running.view.num_in_flight == 0


async def test_a_reservation_that_is_refused_is_made_elsewhere():
    async with conductor() as running:
        full, free = ScriptedWork(is_full=True), ScriptedWork()
        await running.attach(ScriptedWork(), node_id="p", roles=[Role.PREFILL])
        await running.attach(full, node_id="d0", roles=[Role.DECODE])
        await running.attach(free, node_id="d1", roles=[Role.DECODE])
        for _ in range(2):
            assert await answer(running.dispatcher, request()) == ([11, 12, 13], FinishReason.LENGTH)
        assert full.received
        await until(lambda: not full.held() and not free.held())
        assert running.view.num_in_flight == 0


async def test_where_every_node_refuses_the_client_is_told():
    async with conductor(patience_s=1e-9) as running:
        full = ScriptedWork(is_full=True)
        await running.attach(ScriptedWork(), node_id="p", roles=[Role.PREFILL])
        await running.attach(full, node_id="d0", roles=[Role.DECODE])
        with pytest.raises(CapacityError):
            await answer(running.dispatcher, request())
        assert len(full.received) == 1
        assert running.view.num_in_flight == 0


async def test_a_short_prompt_may_be_computed_by_the_node_that_decodes_it():
    async with conductor(roles_follow=True) as running:
        prefill, decode = ScriptedWork(), ScriptedWork()
        await running.attach(prefill, node_id="p", roles=[Role.PREFILL])
        await running.attach(decode, node_id="d", roles=[Role.DECODE])
        assert await answer(running.dispatcher, request()) == ([11, 12, 13], FinishReason.LENGTH)
        await until(lambda: not decode.held())
        assert [type(item) for item in decode.received] == [Prefill]
        assert prefill.received == []
        assert running.view.num_in_flight == 0


async def test_the_reservation_is_what_the_prefill_node_is_told_to_write():
    async with conductor() as running:
        prefill, decode = ScriptedWork(), ScriptedWork()
        await running.attach(prefill, node_id="p", roles=[Role.PREFILL])
        await running.attach(decode, node_id="d", roles=[Role.DECODE])
        await answer(running.dispatcher, request())
        asked, granted = prefill.received
        assert granted.request_id == asked.work.request_id
        assert (granted.grant.generation, granted.target.node_id, granted.first_block) == (2, "d", 0)
        started = next(item for item in decode.received if isinstance(item, Start))
        assert (started.first_token_id, started.checksums) == (11, (1, 2))


@pytest.mark.parametrize("roles", [[(Role.PREFILL, Role.DECODE)], [(Role.PREFILL,), (Role.DECODE,)]])
async def test_a_first_token_that_fills_the_decode_nodes_window_is_the_last(roles):
    """The window may be smaller than the model's: an operator's, or what the cache has blocks for."""
    async with conductor() as running:
        works = [ScriptedWork() for _ in roles]
        for number, (work, of_node) in enumerate(zip(works, roles, strict=True)):
            await running.attach(work, node_id=f"n{number}", roles=of_node, max_model_len=21)
        assert await answer(running.dispatcher, request(max_tokens=5)) == ([11], FinishReason.LENGTH)
        await until(lambda: not any(work.held() for work in works))
        assert Start not in {type(item) for work in works for item in work.received}


async def test_one_token_asked_is_one_token_and_no_decode():
    async with conductor() as running:
        work = ScriptedWork()
        await running.attach(work)
        assert await answer(running.dispatcher, request(max_tokens=1)) == ([11], FinishReason.LENGTH)
        await until(lambda: not work.held())
        assert Start not in {type(item) for item in work.received}


async def test_a_request_that_is_closed_at_its_last_token_counts_as_finished():
    async with conductor() as running:
        await running.attach(ScriptedWork())
        async with aclosing(running.dispatcher.generate(request(max_tokens=1))) as pieces:
            await anext(pieces)
        assert [actual.end for _, actual in running.seen.endings] == ["finished"]


async def test_a_prompt_is_sent_while_its_requests_task_sleeps():
    async with conductor() as running:
        prefill, decode = ScriptedWork(), ScriptedWork(silent_on=Reserve)
        await running.attach(prefill, node_id="p", roles=[Role.PREFILL])
        await running.attach(decode, node_id="d", roles=[Role.DECODE])
        asking = asyncio.ensure_future(answer(running.dispatcher, request()))
        await until(lambda: decode.received)
        (session,) = [each for each in running.membership.sessions if each.info.node_id == "d"]
        session.deliver([Reserved("r.1", 0, GRANT)])
        (session,) = [each for each in running.membership.sessions if each.info.node_id == "p"]
        assert session.num_requests == 1
        assert (await asking)[0] == [11, 12, 13]


async def test_a_prefill_node_that_left_before_its_prompt_came_is_replaced():
    async with conductor() as running:
        decode = ScriptedWork(silent_on=Reserve)
        await running.attach(ScriptedWork(), node_id="p", roles=[Role.PREFILL])
        await running.attach(decode, node_id="d", roles=[Role.DECODE])
        asking = asyncio.ensure_future(answer(running.dispatcher, request()))
        await until(lambda: decode.received)
        await running.attach(ScriptedWork(), node_id="b")
        running.clients["p"].cancel()
        await until(lambda: len(running.membership.sessions) == 2)
        decode.send(Reserved("r.1", 0, GRANT))
        assert await asking == ([11, 12, 13], FinishReason.LENGTH)
        await until(lambda: not decode.held())


@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_that_leaves_at_any_await_leaves_nothing_held(stage):
    async with conductor() as running:
        nodes = Stuck(stage)
        await nodes.attach(running)
        asking = asyncio.ensure_future(answer(running.dispatcher, request()))
        await until(nodes.is_stuck)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: not nodes.held())
        assert running.view.num_in_flight == 0


@pytest.mark.parametrize("stage", STAGES)
async def test_a_request_whose_time_runs_out_at_any_await_is_told_so_and_leaves_nothing_held(stage):
    async with conductor(request_timeout_s=0.05) as running:
        nodes = Stuck(stage)
        await nodes.attach(running)
        with pytest.raises(DeadlineError):
            await answer(running.dispatcher, request())
        await until(lambda: not nodes.held())


@pytest.mark.parametrize("stage", STAGES)
async def test_a_node_lost_at_any_await_is_replaced_and_no_token_is_lost_or_repeated(stage):
    async with conductor() as running:
        lengths = []
        running.view.projection.observe = lambda decode_s, num_tokens: lengths.append(num_tokens)
        nodes = Stuck(stage)
        await nodes.attach(running)
        asking = asyncio.ensure_future(answer(running.dispatcher, request()))
        await until(lambda: nodes.is_stuck() and bool(running.seen.firsts) == nodes.is_after_first)
        await running.attach(ScriptedWork(), node_id="b")
        nodes.lose(running)
        tokens, reason = await asking
        # Where the first token was out already, the second node is given it in its prompt,
        # and its own first token is the next.
        expected = [11, 12, 12, 13] if nodes.is_after_first else [11, 12, 13]
        assert (tokens, reason) == (expected, FinishReason.LENGTH)
        assert running.seen.firsts == [*(["r.1"] if nodes.is_after_first else []), "r.2"]
        # Of those that decoded, as long as the last attempt did, and no others.
        assert lengths == [2]


async def test_a_request_that_loses_every_node_it_meets_is_given_up():
    async with conductor() as running:

        class Poisoned(ScriptedWork):
            def _answers(self, item):
                return [Failed(item.work.request_id, "LostError", "x")] if isinstance(item, Prefill) else []

        work = Poisoned()
        await running.attach(work)
        with pytest.raises(LostError):
            await answer(running.dispatcher, request())
        assert len([item for item in work.received if isinstance(item, Prefill)]) == 4


@pytest.mark.parametrize("stage", STAGES)
async def test_a_role_that_is_lost_under_a_request_is_waited_for_and_no_token_is_lost(stage):
    async with conductor(role_wait_s=600.0) as running:
        nodes = Stuck(stage)
        await nodes.attach(running)
        asking = asyncio.ensure_future(answer(running.dispatcher, request()))
        await until(lambda: nodes.is_stuck() and bool(running.seen.firsts) == nodes.is_after_first)
        nodes.lose(running)
        await until(lambda: len(running.dispatcher.queue) == 1)
        await running.attach(ScriptedWork(), node_id="b")
        expected = [11, 12, 12, 13] if nodes.is_after_first else [11, 12, 13]
        assert await asking == (expected, FinishReason.LENGTH)


async def test_requests_that_come_before_any_node_are_served_when_it_comes():
    async with conductor(role_wait_s=600.0) as running:
        asking = [
            asyncio.ensure_future(answer(running.dispatcher, request(request_id=f"r{number}")))
            for number in range(3)
        ]
        await until(lambda: len(running.dispatcher.queue) == 3)
        await running.attach(ScriptedWork(), roles=[Role.PREFILL])
        assert len(running.dispatcher.queue) == 3
        await running.attach(ScriptedWork(), node_id="d", roles=[Role.DECODE])
        assert await asyncio.gather(*asking) == [([11, 12, 13], FinishReason.LENGTH)] * 3
        assert running.view.num_in_flight == 0


async def test_while_a_node_has_enough_ahead_requests_wait_and_the_higher_class_goes_first():
    async with conductor(ahead_s=0.0, clock=ManualClock()) as running:
        work = ScriptedWork(silent_on=Prefill)
        await running.attach(work)
        asking = [
            asyncio.ensure_future(answer(running.dispatcher, request(request_id=name, priority=priority)))
            for name, priority in (("first", 0), ("sheddable", -1), ("standard", 0), ("critical", 1))
        ]
        await until(lambda: len(running.dispatcher.queue) == 3)
        for count in range(1, 5):
            await until(lambda count=count: len(prefills(work)) == count)
            asked = [item for item in work.received if isinstance(item, Prefill)][-1].work
            work.send(work.prefilled(asked, stays=True))
            work.send(Tokens(asked.request_id, (SampledToken(12),), FinishReason.STOP))
        assert prefills(work) == ["first", "critical", "standard", "sheddable"]
        await asyncio.gather(*asking)


async def test_a_waiting_request_that_leaves_leaves_nothing_behind():
    async with conductor(role_wait_s=600.0) as running:
        asking = asyncio.ensure_future(answer(running.dispatcher, request()))
        await until(lambda: len(running.dispatcher.queue) == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (len(running.dispatcher.queue), running.view.num_in_flight) == (0, 0)


async def test_too_many_waiting_lets_one_of_the_lowest_class_go():
    async with conductor(role_wait_s=600.0, max_waiting=1) as running:
        low = asyncio.ensure_future(answer(running.dispatcher, request(request_id="low", priority=-1)))
        await until(lambda: len(running.dispatcher.queue) == 1)
        high = asyncio.ensure_future(answer(running.dispatcher, request(request_id="high")))
        with pytest.raises(RejectedError, match="max_waiting"):
            await low
        assert running.seen.made[0].result.reason is RejectReason.TOO_MANY_WAIT
        await running.attach(ScriptedWork())
        assert await high == ([11, 12, 13], FinishReason.LENGTH)


async def test_a_request_that_waits_in_vain_leaves_one_decision_that_comes_out_the_same_again():
    clock = ManualClock()
    async with conductor(ahead_s=0.0, clock=clock) as running:
        await running.attach(ScriptedWork(silent_on=Prefill))
        stuck = asyncio.ensure_future(answer(running.dispatcher, request(request_id="stuck")))
        await until(lambda: running.seen.made)
        asked = request(request_id="vain", deadline_s=0.05)
        vain = asyncio.ensure_future(answer(running.dispatcher, asked))
        await until(lambda: len(running.dispatcher.queue) == 1)
        clock.advance(0.05)
        with pytest.raises(DeadlineError):
            await vain
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)
        first, vain = running.seen.made
        assert (first.asked.request_id, vain.asked.request_id) == ("stuck.1", "vain.1")
        assert vain.result.reason is RejectReason.WAITED
        assert vain.asked.chain
        assert decide_again(vain, running.cost, running.settings) == vain.result


async def test_a_request_without_a_node_leaves_the_decision_that_placement_makes():
    async with conductor(role_wait_s=0.01) as running:
        with pytest.raises(UnavailableError):
            await answer(running.dispatcher, request())
        (made,) = running.seen.made
        assert made.result.reason is RejectReason.NO_PREFILL_NODE
        assert decide_again(made, running.cost, running.settings) == made.result


async def test_what_was_begun_is_not_let_go_however_many_wait():
    async with conductor(max_waiting=1, role_wait_s=600.0) as running:
        nodes = Stuck("lone Tokens")
        await nodes.attach(running)
        names = ("r", "s", "t")
        asking = [asyncio.ensure_future(answer(running.dispatcher, request(request_id=n))) for n in names]
        await until(lambda: len(running.seen.firsts) == 3)
        nodes.lose(running)
        await until(lambda: len(running.dispatcher.queue) == 3)
        await running.attach(ScriptedWork(), node_id="b")
        assert [await task for task in asking] == [([11, 12, 12, 13], FinishReason.LENGTH)] * 3


async def test_a_ttft_bound_that_the_wait_breaks_is_refused_at_once_with_the_prediction():
    async with conductor(ahead_s=0.0, clock=ManualClock()) as running:
        await running.attach(ScriptedWork(silent_on=Prefill))
        waiting = [
            asyncio.ensure_future(answer(running.dispatcher, request(request_id=f"r{number}")))
            for number in range(5)
        ]
        await until(lambda: len(running.dispatcher.queue) == 4)
        alone_s = running.seen.made[0].result.predicted_ttft_s
        late = request(request_id="late", slo=Slo(ttft_slo_s=4 * alone_s), priority=-1)
        with pytest.raises(SloUnreachableError) as refused:
            await answer(running.dispatcher, late)
        assert refused.value.predicted_ttft_s == pytest.approx(6 * alone_s, rel=0.2)
        assert running.seen.made[-1].asked.request_id == "late.1"
        for asking in waiting:
            asking.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_what_was_begun_and_fits_no_node_any_more_is_lost_and_keeps_nobody_waiting():
    async with conductor(request_timeout_s=600.0) as running:
        await running.attach(ScriptedWork(), node_id="p", roles=[Role.PREFILL])
        await running.attach(ScriptedWork(silent_on=Start), node_id="d0", roles=[Role.DECODE])
        begun = asyncio.ensure_future(answer(running.dispatcher, request()))
        await until(lambda: running.seen.firsts)
        await running.attach(ScriptedWork(), node_id="d1", roles=[Role.DECODE], num_blocks=1)
        running.clients["d0"].cancel()
        await until(lambda: len(running.membership.sessions) == 2)
        small = request(request_id="small", max_tokens=3)._replace(token_ids=(1, 2, 3))
        async with asyncio.timeout(60):
            assert await answer(running.dispatcher, small) == ([11, 12, 13], FinishReason.LENGTH)
            with pytest.raises(LostError, match="large enough"):
                await begun


async def test_a_decode_node_that_is_too_loaded_by_then_refuses_with_what_is_predicted():
    async with conductor(reject=RejectPolicy.LATE) as running:
        work = ScriptedWork()
        await running.attach(work)
        with pytest.raises(SloUnreachableError) as refused:
            await answer(running.dispatcher, request(slo=Slo(tbt_slo_s=1e-6)))
        error = refused.value
        assert error.predicted_tbt_s == pytest.approx(running.seen.made[0].result.predicted_tbt_s)
        assert error.predicted_ttft_s > 0
        assert error.retry_after_s > 1.0
        await until(lambda: not work.held())
        assert running.view.num_in_flight == 0


async def test_each_attempt_is_told_of_with_what_came_of_it():
    async with conductor() as running:

        class Damaging(ScriptedWork):
            def _answers(self, item):
                if isinstance(item, Prefill) and item.work.request_id == "r.1":
                    return [Failed("r.1", "ChecksumError", "x")]
                return super()._answers(item)

        await running.attach(Damaging())
        await answer(running.dispatcher, request())
        assert [made.asked.request_id for made in running.seen.made] == ["r.1", "r.2"]
        (first, lost), (second, finished) = running.seen.endings
        assert (first, lost.end, lost.ttft_s) == ("r.1", "ChecksumError", None)
        assert (second, finished.end, finished.num_output_tokens) == ("r.2", "finished", 3)
        assert 0 < finished.ttft_s <= finished.ended_at_s


async def test_a_late_message_of_a_lost_attempt_is_not_taken_for_the_next_ones():
    async with conductor() as running:

        class Late(ScriptedWork):
            def _answers(self, item):
                if isinstance(item, Prefill) and item.work.request_id == "r.1":
                    return [Failed("r.1", "ChecksumError", "x")]
                if isinstance(item, Prefill):
                    return [Tokens("r.1", (), FinishReason.STOP), *super()._answers(item)]
                return super()._answers(item)

        await running.attach(Late())
        assert await answer(running.dispatcher, request()) == ([11, 12, 13], FinishReason.LENGTH)


async def test_without_a_node_of_each_role_a_request_is_refused_when_it_has_waited():
    async with conductor() as running:
        with pytest.raises(UnavailableError, match="no prefill node"):
            await answer(running.dispatcher, request())
        await running.attach(ScriptedWork(), roles=[Role.PREFILL])
        assert not running.dispatcher.is_ready
        with pytest.raises(UnavailableError, match="decode"):
            await answer(running.dispatcher, request())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_id": "other"}, "serves model"),
        ({"protocol_version": 99}, "same release"),
        ({"layout_id": "other"}, "kv_dtype and quantization"),
        ({"block_size": 32}, "same block_size"),
        ({"layout_id": "layout/weights=int8"}, "weights int8 and none"),
    ],
)
async def test_a_node_that_cannot_serve_with_the_others_is_refused_with_the_reason(change, reason, caplog):
    async with conductor() as running:
        await running.attach(ScriptedWork())
        stranger = AttachClient(node_info(node_id="s", **change), running.address, random.Random(0))
        work = ScriptedWork()
        work.send = stranger.send
        task = asyncio.ensure_future(stranger.run(work))
        await until(lambda: "conductor lost" in caplog.text)
        task.cancel()
        assert reason in caplog.text
        assert len(running.membership.sessions) == 1


async def test_a_node_that_attaches_again_replaces_itself():
    async with conductor() as running:
        first = await running.attach(ScriptedWork(), epoch=1)
        session = running.membership.sessions[0]
        client = AttachClient(node_info(epoch=2), running.address, random.Random(0))
        work = ScriptedWork()
        work.send = client.send
        running.clients["again"] = asyncio.ensure_future(client.run(work))
        await until(lambda: running.membership.sessions != [session])
        first.cancel()
        assert [session.info.epoch for session in running.membership.sessions] == [2]


async def test_a_conductor_that_goes_makes_the_node_let_go_and_dial_again():
    async with conductor() as running:
        work = ScriptedWork()
        await running.attach(work)
        running.close_streams()
        await until(lambda: work.num_lost >= 1)
        assert running.membership.sessions == []


async def test_a_stream_is_ended_when_another_of_its_node_took_its_place():
    async with conductor() as running:
        work = ScriptedWork()
        await running.attach(work)
        session = running.membership.sessions[0]
        again = AttachClient(node_info(), running.address, random.Random(0))
        later = ScriptedWork()
        later.send = again.send
        task = asyncio.ensure_future(again.run(later))
        await until(lambda: running.membership.sessions not in ([], [session]))
        await until(lambda: work.num_lost)
        task.cancel()
        assert session.is_lost
        assert session not in running.membership.sessions
