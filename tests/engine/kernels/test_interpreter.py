"""Kernels of several threads, where there is no GPU: each runs as if it were alone."""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.kernels.merge_part import merge_part
from engine.kernels.sum_words import sum_words
from tests.engine.definitions import merge_part_definition, sum_words_definition
from tests.engine.kernels.paged import DEVICE

ROUNDS = 20


def sums_agree(seed):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**63), 2**63 - 1, (4, 100), generator=generator).to(DEVICE)
    ids = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    return torch.equal(sum_words(words, ids, 0, 100), sum_words_definition(words, ids, 0, 100))


def merges_agree(seed):
    generator = torch.Generator().manual_seed(seed)
    output, part = (torch.randn(3, 2, 16, generator=generator).to(DEVICE) for _ in range(2))
    lse, part_lse = (torch.randn(2, 3, generator=generator).to(DEVICE) for _ in range(2))
    expected = merge_part_definition(output, lse, part, part_lse)
    merge_part(output, lse, part, part_lse)
    return all(torch.allclose(*pair, atol=1e-5) for pair in zip((output, lse), expected, strict=True))


def test_kernels_of_two_threads_at_once_are_not_mixed_up(request):
    interval_s = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval_s))
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(2) as threads:
        sums, merges = (threads.map(agree, range(ROUNDS)) for agree in (sums_agree, merges_agree))
        assert [*sums, *merges] == [True] * 2 * ROUNDS
