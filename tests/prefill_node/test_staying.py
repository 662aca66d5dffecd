"""A sequence that stays where its prompt was computed: its tokens follow, and nothing is left of it."""

import asyncio

import pytest

from base.messages import Failed, Prefill, Prefilled, Tokens
from base.request import FinishReason, StopParams
from prefill_node.role import PrefillRole
from tests.node_parts import parts, work


@pytest.fixture
async def node():
    async with parts(node=PrefillRole) as made:
        yield made["node"]


def ask(node, asked):
    node.role.prefill(Prefill(asked, stays=True))


async def finished(node):
    async with asyncio.timeout(60):
        await node.role.tasks.idle()
        while node.pool.num_held:
            await asyncio.sleep(0)
    node.check_nothing_is_held()


def tokens_of(node):
    told = [item for item in node.sent if isinstance(item, Tokens)]
    return [token.token_id for item in told for token in item.tokens], told[-1].finish_reason


async def test_the_first_token_is_told_and_the_others_follow_it(node):
    ask(node, work(num_tokens=40, max_tokens=5))
    await finished(node)
    first, *rest = node.sent
    assert isinstance(first, Prefilled)
    assert (first.first_token.token_id, first.finish_reason, first.stays) == (1, None, True)
    assert (first.checksums, first.parts) == ((), ())
    assert all(isinstance(item, Tokens) for item in rest)
    assert tokens_of(node) == ([2, 3, 4, 5], FinishReason.LENGTH)


async def test_its_prompts_logprobs_come_with_the_first_token(node):
    asked = Prefill(work(num_tokens=40, max_tokens=5), stays=True)
    node.role.prefill(asked._replace(num_prompt_logprobs=0))
    await finished(node)
    assert len(node.sent[0].prompt_logprobs.logprobs) == 39 * 4
    assert tokens_of(node) == ([2, 3, 4, 5], FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("stop", "reason"),
    [(StopParams(1), None), (StopParams(5, stop_token_ids=(1,)), FinishReason.STOP)],
    ids=["length", "stop token"],
)
async def test_one_that_ends_with_its_first_token_tells_no_other(node, stop, reason):
    ask(node, work(num_tokens=40)._replace(stop=stop))
    await finished(node)
    (only,) = node.sent
    assert (only.first_token.token_id, only.finish_reason, only.stays) == (1, reason, False)


async def test_tokens_generated_elsewhere_count(node):
    ask(node, work(num_tokens=30, max_tokens=5, generated=(1, 2)))
    await finished(node)
    assert (await node.said(Prefilled)).first_token.token_id == 3
    assert tokens_of(node) == ([4, 5], FinishReason.LENGTH)


async def test_the_answers_blocks_are_the_next_turns_prefix(node):
    asked = work(num_tokens=30, max_tokens=20)
    ask(node, asked)
    await finished(node)
    node.sent.clear()
    ask(node, asked._replace(request_id="next", token_ids=(*asked.token_ids, *range(1, 20))))
    assert (await node.said(Prefilled)).num_cached_tokens == 48


@pytest.mark.parametrize("num_turns", range(0, 40, 4))
async def test_a_release_at_any_moment_gives_everything_back(node, num_turns):
    ask(node, work(num_tokens=40, max_tokens=60))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    node.role.tasks.end("r")
    await finished(node)
    assert not any(isinstance(item, Failed) for item in node.sent)


async def test_a_step_that_fails_loses_the_request_at_either_end(node):
    node.runner.broken = True
    ask(node, work(num_tokens=40))
    assert (await node.said(Failed)).reason == "LostError"
    await finished(node)
    node.runner.broken = False
    ask(node, work(num_tokens=40, max_tokens=100, name="later"))
    await node.said(Tokens)
    node.runner.broken = True
    async with asyncio.timeout(60):
        while not any(isinstance(item, Failed) and item.request_id == "later" for item in node.sent):
            await asyncio.sleep(0)
    await finished(node)


async def test_one_that_runs_out_of_time_says_so_and_holds_nothing(node):
    ask(node, work(num_tokens=40, max_tokens=100, deadline_s=0.0))
    assert (await node.said(Failed)).reason == "DeadlineError"
    await finished(node)
