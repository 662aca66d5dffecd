"""Vectors of prompts: of transformers' own hidden states, whatever is cached, cut or preempted."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from base.errors import InvalidRequestError
from base.request import FinishReason, Pooling
from tests.engine.builders import make_loop, make_model, make_sequence, run_sequences
from tests.engine.fakes import FakeDevice, continuation, run_at_random
from tests.engine.test_families import FAMILIES, random_model

BLOCK_SIZE = 4


class PoolingDevice(FakeDevice):
    """Has each token's place, and its square, for a hidden state; counts what it pools."""

    def execute(self, plan):
        result = super().execute(plan)
        return replace(result, pooled=tuple(map(self._of, plan.entries)))

    @staticmethod
    def _of(entry):
        weighs = entry.sequence.pooling is Pooling.WEIGHTED_MEAN
        rows = [np.array([at, at * at], float) * (at + 1 if weighs else 1) for at in entry.pooled]
        return sum(rows) if rows else None


def expected_of(sequence):
    places = np.arange(sequence.num_tokens, dtype=float)
    weights = {
        Pooling.LAST: (places == places[-1]).astype(float),
        Pooling.MEAN: np.ones_like(places),
        Pooling.WEIGHTED_MEAN: places + 1,
    }[sequence.pooling]
    return [float(weights @ places / weights.sum()), float(weights @ places**2 / weights.sum())]


@pytest.mark.parametrize("seed", range(40))
def test_each_token_is_pooled_once_whatever_is_cached_and_preempted(seed):
    rng = random.Random(seed)

    def fields():
        return {"pooling": rng.choice([None, *Pooling])}

    for sequence in run_at_random(PoolingDevice, BLOCK_SIZE, rng, fields):
        if sequence.pooling is None:
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            made = sequence.token_ids[len(prompt) :]
            assert made == continuation(prompt, len(made))
            continue
        assert sequence.num_generated_tokens == 0
        assert sequence.finish_reason is FinishReason.STOP
        assert np.frombuffer(sequence.vector(), "<f4") == pytest.approx(expected_of(sequence))


def hidden_states(model, prompt):
    with torch.no_grad():
        return model.base_model(input_ids=torch.tensor([prompt])).last_hidden_state[0].double()


def pooled(states, pooling):
    if pooling is Pooling.LAST:
        return states[-1]
    weights = torch.ones(len(states)) if pooling is Pooling.MEAN else torch.arange(1, len(states) + 1)
    return (states * weights[:, None]).sum(0) / weights.sum()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "granite", "gpt2", "deepseek_v3"])
async def test_they_are_the_models_own_also_when_the_prompt_is_cached(family):
    model, reference = (random_model(family, **FAMILIES[family]) for _ in range(2))
    rng = random.Random(1)
    prompts = [[rng.randrange(211) for _ in range(size)] for size in (1, 2, 16, 33, 150)]
    loop = make_loop(make_model(model))
    for attempt in range(2):
        sequences = [
            make_sequence(f"{attempt}-{at}-{pooling.value}", prompt, 4, pooling=pooling)
            for at, prompt in enumerate(prompts)
            for pooling in Pooling
        ]
        plain = make_sequence(f"{attempt}-plain", prompts[-1], 4)
        await run_sequences(loop, [*sequences, plain])
        for sequence in sequences:
            expected = pooled(hidden_states(reference, sequence.token_ids), sequence.pooling)
            found = torch.frombuffer(bytearray(sequence.vector()), dtype=torch.float32)
            far = (found - expected).norm() / expected.norm()
            assert far < 1e-5, (sequence.request_id, far)
            if attempt and len(sequence.token_ids) == 150:
                assert sequence.num_matched_tokens == (144 if sequence.pooling is Pooling.LAST else 0)


async def test_an_engine_that_cannot_says_so():
    loop = make_loop(make_model(random_model("llama")))
    loop._runner.poolings = (Pooling.LAST,)
    with pytest.raises(InvalidRequestError, match="mean pooling"):
        loop.add(make_sequence("s", range(5), pooling=Pooling.MEAN), lambda output: None)
    assert loop.scheduler.num_waiting == 0
