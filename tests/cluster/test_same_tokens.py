"""The whole cluster gives the tokens that transformers gives. The specification."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from engine.weights import load_model
from tests.cluster.asking import EOS, generated
from tests.cluster.conftest import BLOCK_SIZE
from tests.engine.builders import reference
from tests.engine.test_smollm2 import all_prompts, fast_prompts

NEW_TOKENS = 16


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return Tokenizer.from_file(str(Path(smollm2.path) / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(smollm2):
    torch.set_num_threads(1)
    return load_model(Path(smollm2.path), torch.float32, torch.device("cpu"))


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


@pytest.mark.full
@pytest.mark.timeout(900)
def test_greedy_tokens_equal_those_of_generate_on_thirty_prompts(cluster, model, tokenizer):
    prompts = token_prompts(tokenizer, all_prompts())
    prompts.append(prompts[0][:1])
    assert len(prompts) >= 30
    assert max(map(len, prompts)) > 3_900
    check_all(cluster, model, prompts)
