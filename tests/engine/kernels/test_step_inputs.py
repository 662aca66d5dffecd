"""A step's tokens are the host's, or what the step before sampled; all inputs become int64."""

import pytest
import torch

from engine.kernels.step_inputs import TILE, step_inputs
from tests.engine.kernels.paged import DEVICE


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(5, 2), (1, 7), (3, 0), (TILE + 3, TILE + 1)])
def test_a_token_comes_from_its_source_where_it_has_one(num_tokens: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids, sources, positions, logit_rows = (
        torch.randint(low, high, (count,), generator=generator, dtype=torch.int32).to(DEVICE)
        for low, high, count in (
            (0, 90, num_tokens), (-2, 4, num_tokens), (0, 2**20, num_tokens), (0, num_tokens, num_rows)
        )
    )  # fmt: skip
    sampled = torch.tensor([100, 101, 102, 2**40], device=DEVICE)
    made = step_inputs(ids, sources, positions, logit_rows, sampled)
    expected = torch.where(sources < 0, ids.long(), sampled[sources.clamp(min=0).long()])
    for found, wanted in zip(made, (expected, positions.long(), logit_rows.long()), strict=True):
        assert found.dtype == torch.int64
        assert torch.equal(found, wanted)
