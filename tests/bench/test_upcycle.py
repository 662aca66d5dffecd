"""A mixture of equal experts says what the dense model says that it was made of."""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.upcycle import upcycled
from tests.engine.builders import greedy, make_loop, make_model, reference
from tests.engine.test_families import SMALL, prompts_of


async def test_a_mixture_of_equal_experts_says_what_its_dense_model_says() -> None:
    torch.manual_seed(0)
    dense = LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation="eager")).eval()
    prompts = prompts_of(2)
    expected = [reference(dense, prompt, 12) for prompt in prompts]
    loop = make_loop(make_model(upcycled(copy.deepcopy(dense))), chunk_tokens=23)
    assert await greedy(loop, prompts, 12) == expected
    assert await greedy(loop, prompts, 12) == expected, "with prefixes from the cache"
