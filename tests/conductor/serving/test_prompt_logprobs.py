"""Log probabilities of a prompt: asked of the node that computes it, once, whatever is lost meanwhile."""

import asyncio
from contextlib import aclosing

import pytest

from base.messages import Granted, Prefill, Prefilled
from base.prompt_logprobs import PromptLogprobs
from base.request import FinishReason
from tests.conductor.dispatching import STAGES, Stuck, conductor, request, until
from tests.conductor.scripted_node import ScriptedWork

SCORED = PromptLogprobs(bytes(19 * 4), bytes(19 * 4), bytes(19 * 4))


class Scoring(ScriptedWork):
    """Answers with the log probabilities that it was asked for."""

    def _answers(self, item):
        answers = super()._answers(item)
        prefill = self.asked.get(item.request_id) if isinstance(item, Granted) else item
        asked = isinstance(prefill, Prefill) and prefill.num_prompt_logprobs is not None
        return [
            each._replace(prompt_logprobs=SCORED) if asked and isinstance(each, Prefilled) else each
            for each in answers
        ]


async def answered(dispatcher, asked):
    async with aclosing(dispatcher.generate(asked)) as parts:
        return [part async for part in parts]


def prompts(work):
    return [item.num_prompt_logprobs for item in work.received if isinstance(item, Prefill)]


@pytest.mark.parametrize("stage", STAGES)
async def test_they_come_once_with_the_first_token_whatever_is_lost(stage):
    async with conductor() as running:
        nodes = Stuck(stage)
        for work in nodes.works:
            work.__class__ = Scoring
        await nodes.attach(running)
        asking = asyncio.ensure_future(answered(running.dispatcher, request(num_prompt_logprobs=1)))
        await until(lambda: nodes.is_stuck() and bool(running.seen.firsts) == nodes.is_after_first)
        other = Scoring()
        await running.attach(other, node_id="b")
        nodes.lose(running)
        parts = await asking
        assert [part.prompt_logprobs for part in parts] == [SCORED] + [None] * (len(parts) - 1)
        assert parts[-1].finish_reason is FinishReason.LENGTH
        # The one that goes on after the first token need not compute them.
        assert prompts(other) == [None if nodes.is_after_first else 1]


async def test_placement_counts_on_no_cached_block_for_them():
    async with conductor() as running:
        await running.attach(Scoring(), node_id="b")
        await answered(running.dispatcher, request(num_prompt_logprobs=0))
        await answered(running.dispatcher, request(request_id="plain"))
        scored, plain = running.seen.made
        assert (len(scored.asked.chain), len(plain.asked.chain)) == (0, 1)
