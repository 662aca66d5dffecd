"""What a call asks for is spread over turns of the event loop, so that others are served between."""

import asyncio
from collections import Counter

import httpx
import pytest

from base.request import FinishReason, SampledToken, TokenLogprobs
from base.turns import TURN_UNITS, TurnBudget
from conductor.api.completion import PART_UNITS, Piece
from conductor.api.openai_format import CHAT, COMPLETION, Choice, Envelope, Shown
from conductor.serving.generated import Generated
from tests.conductor.fakes import MAX_MODEL_LEN, MODEL, serving, spoken


class Counting:
    """Counts turns of the event loop, and what is done in each."""

    def __init__(self) -> None:
        self.turn = 0
        self.done = Counter()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)

    def do(self, count: int) -> None:
        self.done[self.turn] += count

    def stop(self) -> None:
        self._task.cancel()


async def test_no_turn_has_more_than_its_share_and_all_come_in_order():
    turns, counting, order = TurnBudget(10), Counting(), []

    async def work(number: int, units: int) -> None:
        if not turns.take(units):
            await turns.later(units)
        counting.do(units)
        order.append(number)

    await asyncio.gather(*(work(number, 1 + number % 4) for number in range(100)))
    counting.stop()
    assert max(counting.done.values()) <= 10
    assert order == list(range(100))


async def test_more_than_a_turn_has_is_done_in_a_turn_of_its_own():
    turns = TurnBudget(10)
    assert turns.take(50)
    assert not turns.take(1)
    await turns.later(1)
    assert turns.take(1)


async def test_who_is_cancelled_while_it_waits_takes_no_turn():
    turns = TurnBudget(10)
    assert turns.take(10)
    gone, stays = turns.later(10), turns.later(10)
    gone.cancel()
    await stays
    assert gone.cancelled()


@pytest.mark.parametrize("stream", [True, False])
async def test_choices_of_a_long_prompt_begin_in_turns(model, stream):
    counting = Counting()

    def script(request):
        counting.do(1)
        return spoken(model, "hi")

    body = {"model": MODEL, "prompt": "a" * (MAX_MODEL_LEN - 20), "max_tokens": 3, "n": 64, "stream": stream}
    body["logit_bias"] = {str(token_id): 1.0 for token_id in range(200)}
    async with (
        serving(model, script, max_calls=128) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        answer = await client.post("/v1/completions", json=body)
    counting.stop()
    assert answer.status_code == 200
    assert sum(counting.done.values()) == 64
    assert max(counting.done.values()) <= TURN_UNITS // 50


async def test_many_tokens_at_once_are_told_of_in_pieces(model):
    tokens = tuple(SampledToken(100, TokenLogprobs(-0.5, ((100, -0.5),) * 20)) for _ in range(200))
    steps = [Generated(tokens, FinishReason.LENGTH, 0)]
    async with (
        serving(model, lambda request: steps) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        asked = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 200,
            "stream": True,
        }
        answer = await client.post(
            "/v1/chat/completions", json=asked | {"logprobs": True, "top_logprobs": 20}
        )
    most = PART_UNITS // 21
    counts = [line.count('"top_logprobs"') for line in answer.text.splitlines() if line]
    assert sum(counts) == 200
    assert max(counts) == most


@pytest.mark.parametrize("shape", [CHAT, COMPLETION], ids=["chat", "completion"])
async def test_a_prompt_is_shown_by_all_choices_from_one_text(model, shape):
    answer = Envelope(shape, "a", 1, "tiny", model.tokenizer, with_token_ids=True)
    prompt = Shown(list(range(50_000)), "echo" * 10_000)
    parts = []
    for index in range(128):
        choice = Choice(answer, index, prompt)
        choice.keep(Piece("hi", (SampledToken(100),), FinishReason.STOP, 0))
        parts += choice.whole()
    assert len({id(part) for part in parts if len(part) > 1_000}) == 2
