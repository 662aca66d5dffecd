"""The bounds of an answer where it goes on in another request, or is more than a client may send back."""

import json
import random
from contextlib import aclosing

import httpx
import pytest

from base.metrics import ConductorMetrics, exposition, process_registry
from base.request import RequestId, Slo
from conductor.api.chat_template import ChatMessage
from conductor.api.completion import Completions
from conductor.api.headers import Caller
from conductor.api.options import Options, make_request
from conductor.api.turn import Reasoning, Tools, prepare_turn, taken_apart
from tests.conductor.api.conversing import talking
from tests.conductor.fakes import MODEL, spoken
from tests.manual_clock import ManualClock

USER = {"role": "user", "content": "1 + 2?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "array"}}}


async def test_tokens_of_reasoning_that_is_ended_count_for_the_least_that_an_answer_has(tooled):
    def script(request):
        thinks = "</think>" not in tooled.tokenizer.decode(request.token_ids, False)
        return spoken(tooled, "one two three" if thinks else "3")

    body = {"model": MODEL, "messages": [USER], "thinking_token_budget": 7, "max_tokens": 40}
    async with talking(tooled, script) as api, httpx.AsyncClient(timeout=60) as client:
        for least in (30, 5):
            asked = {**body, "min_tokens": least}
            assert (await client.post(f"{api.url}/v1/chat/completions", json=asked)).status_code == 200
    first, second, _, fourth = api.dispatcher.requests
    spent = len(second.token_ids) - len(first.token_ids)
    assert (second.stop.max_tokens, second.stop.min_tokens) == (40 - spent, 30 - spent)
    assert fourth.stop.min_tokens == 0


@pytest.mark.parametrize("stop", [None, ["two four"], ["o three", "x"]])
async def test_reasoning_that_is_ended_within_what_may_be_a_stop_string_is_shown(tooled, stop):
    def script(request):
        thinks = "</think>" not in tooled.tokenizer.decode(request.token_ids, False)
        return spoken(tooled, "one two three" if thinks else "3")

    body = {"model": MODEL, "messages": [USER], "thinking_token_budget": 7, "stop": stop}
    async with talking(tooled, script) as api, httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{api.url}/v1/chat/completions", json=body)
        metrics = await api.metrics()
    assert 'conductor_sequences_total{outcome="stop"} 2.0' in metrics, "nobody has left"
    message = answer.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("one two", "3")


class SlowDispatcher:
    """Takes a second for each token."""

    is_ready = True

    def __init__(self, model, clock):
        self.model, self.clock = model, clock

    async def generate(self, request):
        thinks = "</think>" not in self.model.tokenizer.decode(request.token_ids, False)
        for step in spoken(self.model, "one two three" if thinks else "3"):
            self.clock.advance(1.0)
            yield step


async def test_the_seconds_of_reasoning_that_is_ended_are_no_part_of_the_ttft_of_what_goes_on(tooled):
    clock, metrics, rng = ManualClock(), ConductorMetrics(process_registry(), MODEL), random.Random(1)
    completions = Completions(tooled, SlowDispatcher(tooled, clock), metrics, clock, max_calls=1)
    messages = [ChatMessage("user", USER["content"])]
    turn = await prepare_turn(
        tooled, messages, Tools(), Reasoning(budget_tokens=7), {"enable_thinking": True}
    )
    asked = make_request(RequestId("r"), turn.token_ids, Options(), Caller(0.0, Slo()), tooled, rng)
    async with aclosing(taken_apart(completions, turn, asked)) as pieces:
        assert "".join([piece.text async for piece in pieces]).endswith("3")
    told = exposition(metrics.registry).decode().splitlines()
    assert "conductor_ttft_seconds_sum 2.0" in told


@pytest.mark.parametrize(("levels", "num_calls"), [(90, 1), (150, 0)])
async def test_a_call_that_no_client_could_send_back_is_text(tooled, levels, num_calls):
    arguments = f'{{"a": {"[" * levels}{"]" * levels}}}'
    called = json.dumps({"name": "add", "arguments": arguments})
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}]
    body = {"model": MODEL, "input": "1 + 2?", "tools": tools}
    async with (
        talking(tooled, f"<tool_call>\n{called}\n</tool_call>") as api,
        httpx.AsyncClient(timeout=60) as client,
    ):
        answer = await client.post(f"{api.url}/v1/responses", json=body)
        assert answer.status_code == 200
        found = answer.json()
        kinds = [item["type"] for item in found["output"]]
        assert kinds.count("function_call") == num_calls
        assert "[[[" in str(found["output"])
        assert found["status"] == "completed"
        more = {"model": MODEL, "previous_response_id": found["id"], "input": "4?"}
        assert (await client.post(f"{api.url}/v1/responses", json=more)).status_code == 200
