"""Log probabilities of a prompt: transformers' own, whatever is cached, cut into chunks or preempted."""

import random
from array import array
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from base.errors import InvalidRequestError
from base.prompt_logprobs import PromptLogprobs
from engine import scheduler as scheduling
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from tests.engine.builders import make_loop, make_model, make_sequence, run_sequences
from tests.engine.fakes import FakeDevice, continuation, run_at_random
from tests.engine.test_families import SMALL

BLOCK_SIZE = 4


class ScoringDevice(FakeDevice):
    """Reports of each token of a prompt its place as its log probability, and the token as the likeliest."""

    def execute(self, plan):
        result = super().execute(plan)
        return replace(result, prompt_logprobs=tuple(map(self._of, plan.entries)))

    @staticmethod
    def _of(entry):
        places = range(entry.start + 1, entry.start + 1 + entry.num_scored)
        values = array("f", map(float, places)).tobytes()
        ids = array("I", [entry.sequence.token_ids[at] for at in places]).tobytes()
        return PromptLogprobs(values, ids, values) if entry.num_scored else None


def places(sequence):
    found = sequence.prompt_logprobs
    assert array("I", found.top_ids).tolist() == sequence.token_ids[1 : 1 + found.num_tokens]
    return array("f", found.logprobs).tolist()


@pytest.mark.parametrize("seed", range(40))
def test_each_token_is_scored_once_whatever_is_cached_and_preempted(seed):
    rng = random.Random(seed)

    def fields():
        return {"num_prompt_logprobs": rng.choice([None, 1])}

    for sequence in run_at_random(ScoringDevice, BLOCK_SIZE, rng, fields):
        num_prompt = sequence.num_prompt_tokens
        told = sequence.num_prompt_logprobs is not None
        assert places(sequence) == ([float(at) for at in range(1, num_prompt)] if told else [])
        prompt, made = sequence.token_ids[:num_prompt], sequence.token_ids[num_prompt:]
        assert made == continuation(prompt, len(made))
        assert sequence.finish_reason is not None


def test_a_scored_prompt_takes_the_room_of_its_logits(monkeypatch):
    monkeypatch.setattr(scheduling, "SCORED_TOKENS", 4)
    pool = BlockPool(64)
    scheduler = Scheduler(pool, BLOCK_SIZE, 16, 8, 64)
    device = ScoringDevice(64, BLOCK_SIZE)
    for number in range(2):
        name, prompt = f"s{number}", range(number * 100, number * 100 + 10)
        scheduler.add(make_sequence(name, prompt, max_tokens=1, num_prompt_logprobs=0))
    scheduler.add(make_sequence("plain", range(30), max_tokens=1, arrived_at_s=9.0))
    while (plan := scheduler.schedule()) is not None:
        assert sum(entry.num_scored for entry in plan.entries) <= 4
        for output in scheduler.commit(plan, device.execute(plan)):
            if output.finish_reason is not None:
                scheduler.release(output.sequence)
    assert [entry.num_tokens for entry in device.plans[0].entries] == [4]


def test_a_prompt_that_is_computed_again_is_not_scored_again():
    """Its chunks are as long as any, and so would its logits be."""
    pool = BlockPool(9)
    scheduler = Scheduler(pool, BLOCK_SIZE, 16, 8, 64)
    device = ScoringDevice(9, BLOCK_SIZE)
    scheduler.add(make_sequence("old", range(16), max_tokens=10))
    scored = make_sequence("scored", range(50, 65), 9, num_prompt_logprobs=0, arrived_at_s=1.0)
    scheduler.add(scored)
    num_scored = 0
    while (plan := scheduler.schedule()) is not None:
        num_scored += sum(entry.num_scored for entry in plan.entries)
        for output in scheduler.commit(plan, device.execute(plan)):
            if output.finish_reason is not None:
                scheduler.release(output.sequence)
        if scheduler.num_preemptions:
            pool.release(pool.allocate(pool.num_available))  # nothing of it is cached when it comes back
    assert scheduler.num_preemptions > 0
    assert num_scored == 14
    assert places(scored) == [float(at) for at in range(1, 15)]
    assert scored.token_ids[15:] == continuation(range(50, 65), 9)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL)).eval()


async def test_they_are_the_models_own_also_when_the_prompt_is_cached(model):
    rng = random.Random(1)
    prompts = [[rng.randrange(211) for _ in range(size)] for size in (1, 2, 16, 33, 150)]
    with torch.no_grad():
        expected = [model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in prompts]
    loop = make_loop(make_model(model))
    for attempt in range(2):
        sequences = [
            make_sequence(f"{attempt}-{at}", prompt, 4, num_prompt_logprobs=at)
            for at, prompt in enumerate(prompts)
        ]
        plain = make_sequence(f"{attempt}-plain", prompts[-1], 4)
        await run_sequences(loop, [*sequences, plain])
        assert not attempt or plain.num_matched_tokens == 144
        for num_top, (sequence, logprobs) in enumerate(zip(sequences, expected, strict=True)):
            check(sequence, logprobs, num_top)


def check(sequence, logprobs, num_top):
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]
    first, *others = sequence.prompt_logprobs.tokens(prompt, 0, len(prompt))
    assert first == (prompt[0], None)
    assert [token.token_id for token in others] == prompt[1:]
    for at, token in enumerate(others, start=1):
        assert token.logprobs.logprob == pytest.approx(logprobs[at - 1, prompt[at]].item(), abs=1e-4)
        top = logprobs[at - 1].topk(num_top)
        assert [item for item, _ in token.logprobs.top] == top.indices.tolist()
        assert [value for _, value in token.logprobs.top] == pytest.approx(top.values.tolist(), abs=1e-4)


async def test_an_engine_that_cannot_says_so(model):
    loop = make_loop(make_model(model))
    loop._runner.can_score = False
    with pytest.raises(InvalidRequestError, match="echo"):
        loop.add(make_sequence("s", range(5), num_prompt_logprobs=0), lambda output: None)
    assert loop.scheduler.num_waiting == 0
