"""The few largest numbers of a row are those of `torch.topk`, whatever the row holds."""

import pytest
import torch

from engine.kernels.best_few import best_few
from tests.engine.kernels.paged import DEVICE


@pytest.mark.parametrize(
    ("num_rows", "width", "count"), [(5, 128, 8), (3, 60, 6), (1, 4, 4), (0, 8, 2), (2, 2000, 3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_come_in_their_order(num_rows: int, width: int, count: int, dtype: torch.dtype) -> None:
    scores = torch.stack([torch.randperm(width) for _ in range(num_rows)] or [torch.empty(width)])[:num_rows]
    scores = (scores - width / 2).to(dtype).to(DEVICE)
    values, places = best_few(scores, count)
    expected, _ = scores.topk(count)
    assert torch.equal(values, expected)
    assert torch.equal(scores.gather(1, places), expected)


def test_places_are_of_the_row_and_differ_where_numbers_are_equal_infinite_or_none() -> None:
    row = torch.full((12,), float("-inf"))
    row[3], row[7] = float("nan"), 1.0
    for scores in (row, torch.zeros(12), torch.full((12,), float("nan")), torch.full((12,), float("inf"))):
        values, places = best_few(scores[None].to(DEVICE), 5)
        assert len({*places[0].tolist()}) == 5
        assert int(places.min()) >= 0
        assert int(places.max()) < 12
        assert torch.equal(values[0].nan_to_num(), scores[places[0].cpu()].to(DEVICE).nan_to_num())
    assert best_few(row[None].to(DEVICE), 1)[1].item() == 7
