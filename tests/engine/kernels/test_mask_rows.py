"""The masking kernel leaves what its definition leaves."""

import pytest
import torch

from engine.kernels.mask_rows import TILE, mask_rows
from engine.sampler import mask_logits
from tests.engine.kernels.paged import DEVICE


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 263, TILE, TILE + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_without_a_bit_become_minus_infinity(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator).to(dtype)
    rows = torch.tensor([4, 0, 2])
    words = -(-vocab_size // 32) + 1
    masks = torch.randint(-(2**31), 2**31, (3, words), generator=generator).int()
    expected = logits.clone()
    mask_logits(expected, rows.tolist(), masks)
    found = logits.to(DEVICE)
    mask_rows(found, rows.to(DEVICE), masks.to(DEVICE))
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(expected[[1, 3]], logits[[1, 3]]), "rows without a mask are as they were"


def test_a_bit_is_counted_from_the_lowest_of_the_first_word() -> None:
    logits = torch.zeros(1, 70, device=DEVICE)
    masks = torch.tensor([[1 | 1 << 5, -(2**31), 2]], dtype=torch.int32, device=DEVICE)
    mask_rows(logits, torch.tensor([0], device=DEVICE), masks)
    assert (logits[0] == 0).nonzero()[:, 0].tolist() == [0, 5, 63, 65]


def test_nothing_is_done_for_no_mask() -> None:
    logits = torch.zeros(2, 40, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    mask_rows(logits, none, torch.zeros(0, 2, dtype=torch.int32, device=DEVICE))
    assert not logits.any()


@pytest.mark.parametrize(
    ("logits", "rows", "masks"),
    [
        (torch.zeros(2, 40), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)),
        (torch.zeros(2, 40), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)),
        (torch.zeros(2, 40), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)),
        (torch.zeros(2, 40), torch.zeros(2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int32)),
        (torch.zeros(40, 2).T, torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int32)),
        (torch.zeros(2, 40).int(), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int32)),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(logits, rows, masks) -> None:
    with pytest.raises(ValueError, match=r"masks must|rows must|logits must"):
        mask_rows(logits, rows, masks)
