"""Checksums of blocks: the kernel and its definition agree, and a change of any sort shows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from base.kv_layout import Spread
from engine.kernels.sum_words import TILE_WORDS, sum_words
from tests.engine.definitions import sum_words_definition
from tests.engine.kernels.paged import DEVICE

RANDOM = (-(2**63), 2**63 - 1)


def random_words(num_blocks: int, block_words: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(*RANDOM, (num_blocks, block_words), generator=generator).to(DEVICE)


@settings(max_examples=20, deadline=None)
@given(
    block_words=st.sampled_from([2, 100, TILE_WORDS - 2, TILE_WORDS, TILE_WORDS + 2, 3 * TILE_WORDS]),
    cut=st.floats(0, 1),
    block_ids=st.lists(st.integers(0, 3), max_size=4, unique=True),
    seed=st.integers(0, 2**20),
)
def test_kernel_and_definition_agree_and_a_block_is_the_sum_of_its_parts(
    block_words: int, cut: float, block_ids: list[int], seed: int
) -> None:
    words = random_words(4, block_words, seed)
    ids = torch.tensor(block_ids, dtype=torch.int32, device=DEVICE)
    whole = sum_words(words, ids, 0, block_words)
    assert torch.equal(whole, sum_words_definition(words, ids, 0, block_words))
    middle = min(block_words - 1, max(1, int(cut * block_words)))
    parts = sum_words(words, ids, 0, middle) + sum_words(words, ids, middle, block_words - middle)
    assert torch.equal(whole, parts)


@settings(max_examples=20, deadline=None)
@given(
    runs=st.integers(1, 70),
    widths=st.lists(st.integers(1, 130), min_size=1, max_size=4),
    seed=st.integers(0, 2**20),
)
def test_the_sums_of_parts_that_lie_spread_add_up_to_the_whole(
    runs: int, widths: list[int], seed: int
) -> None:
    """Each part has a few words of each run, as a rank has some of the heads of each token."""
    stride = sum(widths)
    words = random_words(2, runs * stride, seed)
    ids = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
    total = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    first = 0
    for width in widths:
        part = words.view(2, runs, stride)[:, :, first : first + width].reshape(2, -1).contiguous()
        places = Spread(0, stride, runs, first, width)
        found = sum_words(part, ids, 0, runs * width, places)
        assert torch.equal(found, sum_words_definition(part, ids, 0, runs * width, places))
        total += found
        first += width
    assert torch.equal(total, sum_words(words, ids, 0, runs * stride))


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    place=st.integers(0, 63),
    other=st.integers(0, 63),
    bit=st.integers(0, 63),
    fill=st.sampled_from([None, 0, -1]),
)
def test_a_flipped_bit_words_that_changed_places_and_a_shift_all_show(
    seed: int, place: int, other: int, bit: int, fill: int | None
) -> None:
    words = random_words(1, 64, seed) if fill is None else torch.full((1, 64), fill, device=DEVICE)
    ids = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    before = sum_words_definition(words, ids, 0, 64)

    def changes(changed: torch.Tensor) -> bool:
        return not torch.equal(before, sum_words_definition(changed, ids, 0, 64))

    flipped = words.clone()
    flipped[0, place] ^= 1 << bit if bit < 63 else -(2**63)
    assert changes(flipped)
    flipped[0, other] ^= 1 << 62
    assert changes(flipped) or torch.equal(flipped, words)
    if fill is None:
        swapped = words.clone()
        swapped[0, [place, other]] = words[0, [other, place]]
        assert changes(swapped) or place == other
        assert changes(words.roll(1, 1))
        assert changes((words >> 32 & 0xFFFFFFFF) | (words << 32)), "halves that changed places"


@pytest.mark.parametrize(
    ("words", "ids", "first", "count", "message"),
    [
        (torch.zeros(2, 4), torch.zeros(1, dtype=torch.int32), 0, 4, "int64"),
        (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 0, 4, "int32"),
        (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), 1, 4, "words 1 to 5"),
        (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), 0, 0, "words 0 to 0"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(
    words: torch.Tensor, ids: torch.Tensor, first: int, count: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sum_words(words, ids, first, count)
