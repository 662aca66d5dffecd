"""The whole cluster gives the tokens that transformers gives. The specification."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch
from openai import OpenAI

from protos.inference_pb2_grpc import InferenceStub
from tests.cluster.asking import EOS, PATIENCE_S, generate_request, generated
from tests.cluster.conftest import BLOCK_SIZE
from tests.engine.builders import reference
from tests.engine.test_smollm2 import all_prompts, fast_prompts

NEW_TOKENS = 16


def token_prompts(tokenizer, texts):
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def expected_tokens(model, prompts):
    found = [reference(model, prompt, NEW_TOKENS, EOS) for prompt in prompts]
    return [[token for token in tokens if token != EOS] for tokens in found]


def check_all(cluster, model, prompts):
    expected = expected_tokens(model, prompts)
    address = cluster.grpc_address
    alone = [generated(address, prompt, NEW_TOKENS) for prompt in prompts]
    assert [tokens for tokens, _ in alone] == expected
    again = [generated(address, prompt, NEW_TOKENS) for prompt in prompts]
    assert [tokens for tokens, _ in again] == expected, "with prefixes from the cache"
    for prompt, (_, usage) in zip(prompts, again, strict=True):
        assert usage.prompt_tokens == len(prompt)
        assert usage.cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    with ThreadPoolExecutor(16) as pool:
        together = pool.map(lambda prompt: generated(address, prompt, NEW_TOKENS), prompts)
        assert [tokens for tokens, _ in together] == expected, "16 at once"


@pytest.mark.timeout(600)
def test_greedy_tokens_equal_those_of_generate(cluster, model, tokenizer):
    check_all(cluster, model, token_prompts(tokenizer, fast_prompts()))


def test_a_prompts_logprobs_are_those_of_transformers(cluster, model, tokenizer):
    prompts = token_prompts(tokenizer, fast_prompts())
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in prompts]
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        for turn in ("cold", "with prefixes from the cache"):
            answer = client.completions.create(
                model="smollm2", prompt=prompts, echo=True, logprobs=3, max_tokens=1, temperature=0
            )
            for prompt, choice, logprobs in zip(prompts, answer.choices, expected, strict=True):
                first, *given, _ = choice.logprobs.token_logprobs
                wanted = logprobs[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
                assert first is None
                assert given == pytest.approx(wanted, abs=1e-4), turn
                best = [max(top.values()) for top in choice.logprobs.top_logprobs[1:]]
                assert best == pytest.approx(logprobs.amax(-1).tolist(), abs=1e-4), turn


def test_grpc_shows_the_same_of_a_prompt_to_two_choices_that_say_the_same(cluster, model, tokenizer):
    (prompt,) = token_prompts(tokenizer, fast_prompts()[:1])
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    shown, token_ids = [], {0: [], 1: []}
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        asked = generate_request(prompt, 8, echo=True, num_logprobs=0, n=2)
        for response in InferenceStub(channel).Generate(asked, timeout=PATIENCE_S * 5):
            shown += zip(response.prompt.token_ids, response.prompt.logprobs, strict=True)
            token_ids[response.index] += response.token_ids
    assert [token_id for token_id, _ in shown] == prompt
    assert [found.sampled.logprob for _, found in shown[1:]] == pytest.approx(expected, abs=1e-4)
    assert token_ids[0] == token_ids[1] != []


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_greedy_tokens_equal_those_of_generate_on_thirty_prompts(cluster, model, tokenizer):
    prompts = token_prompts(tokenizer, all_prompts())
    prompts.append(prompts[0][:1])
    assert len(prompts) >= 30
    assert max(map(len, prompts)) > 3_900
    check_all(cluster, model, prompts)
