"""The sampling kernel takes the token that its definition takes, and draws what it should."""

import numpy as np
import pytest
import torch

from engine.kernels.sample_rows import FIELDS, sample_rows
from tests.engine.definitions import noise_definition, sample_rows_definition
from tests.engine.kernels.paged import DEVICE


def numbers(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0) -> list[int]:
    floats = np.array([temperature, min_p, top_p], np.float32).view(np.int32).tolist()
    return [*floats, top_k, *np.array([seed], np.int64).view(np.int32).tolist(), position, 0]


def sampled(logits: torch.Tensor, rows: list[list[int]]) -> list[int]:
    tokens = torch.full((len(rows) + 1,), -7, device=DEVICE)
    sampling = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    assert sampling.shape[1] == FIELDS
    sample_rows(logits.to(DEVICE), sampling, tokens)
    assert tokens[-1] == -7
    return tokens[:-1].tolist()


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(50, torch.float32), (50, torch.float16), (50, torch.bfloat16), (5000, torch.float32)],
)
def test_every_kind_of_row_takes_the_token_of_the_definition(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.3, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 2.0, "top_p": 0.0},
        {"temperature": 3.0, "top_k": 30, "top_p": 0.6, "min_p": 0.01},
    ]
    rows = [
        numbers(**kind, seed=(-5) ** (index + 20), position=100 * index) for index, kind in enumerate(kinds)
    ]
    logits = (4 * torch.randn(len(rows), vocab_size, generator=generator)).to(dtype)
    expected = sample_rows_definition(logits, torch.tensor(rows, dtype=torch.int32))
    assert sampled(logits, rows) == expected.tolist()


def test_of_equal_logits_a_greedy_row_takes_the_lowest_id() -> None:
    logits = torch.zeros(3, 300)
    logits[1, [20, 130, 299]] = 2.0
    logits[2] = float("-inf")
    assert sampled(logits, [numbers()] * 3) == [0, 20, 0]


def test_rows_of_one_seed_draw_by_their_probabilities() -> None:
    count = 2000
    probs = torch.tensor([0.5, 0.25, 0.15, 0.1])
    rows = [numbers(temperature=2.0, seed=11, position=position) for position in range(count)]
    logits = (2 * probs.log()).expand(count, 4)
    # the definition: the interpreter takes 50 ms for a row
    tokens = sample_rows_definition(logits, torch.tensor(rows, dtype=torch.int32))
    seen = np.bincount(tokens, minlength=4)
    expected = count * probs.double().numpy()
    # chi-square with 3 degrees of freedom: 16.3 is exceeded once in a thousand
    assert ((seen - expected) ** 2 / expected).sum() < 16.3


def test_the_noise_is_philox_and_exponential() -> None:
    # the first known answer of Random123's Philox4x32-10: all of key and counter 0
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    noise = noise_definition(0, 0, 4096)[[0, 1024, 2048, 3072]]
    np.testing.assert_allclose(noise, [-np.log1p(-(word + 0.5) / 2**32) for word in words])
    drawn = noise_definition(3, 9, 100_000)
    assert abs(drawn.mean() - 1) < 0.02
    assert abs((drawn > 2).mean() - np.exp(-2)) < 0.005
