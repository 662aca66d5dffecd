"""Experts in one launch for all say what each says of its tokens."""

import pytest
import torch
from torch.nn.functional import silu

from engine.kernels.grouped_experts import MAX_PAIRS, ExpertTiles, grouped_experts
from tests.engine.kernels.paged import DEVICE, relative_error

HIDDEN, INNER, EXPERTS = 40, 24, 6


def made(num_tokens: int, chosen: int, seed: int = 0, inner: int = INNER) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_tokens, HIDDEN, generator=generator)
    gate_up = torch.randn(EXPERTS, 2 * inner, HIDDEN, generator=generator) / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, inner, generator=generator) / inner**0.5
    scores = torch.rand(num_tokens, EXPERTS, generator=generator)
    weights, experts = scores.topk(chosen, dim=-1)
    return tuple(item.to(DEVICE) for item in (rows, gate_up, down, experts, weights))


def definition(rows, gate_up, down, experts, weights) -> torch.Tensor:
    output = torch.zeros_like(rows)
    for token, (ids, shares) in enumerate(zip(experts.tolist(), weights, strict=True)):
        for expert, share in zip(ids, shares, strict=True):
            if expert < len(gate_up):
                gate, up = (gate_up[expert] @ rows[token]).chunk(2)
                output[token] += share * (down[expert] @ (silu(gate) * up))
    return output


@pytest.mark.parametrize(("num_tokens", "chosen"), [(1, 1), (1, 2), (7, 2), (40, 3), (100, 6)])
def test_the_sum_over_experts_is_each_experts_own(num_tokens: int, chosen: int) -> None:
    case = made(num_tokens, chosen)
    assert relative_error(grouped_experts(*case), definition(*case)) < 3e-6


@pytest.mark.parametrize("tiles", [ExpertTiles(16, 16, 16, 4, 2), ExpertTiles(32, 32, 32, 4, 2)])
def test_tiles_change_no_number(tiles: ExpertTiles) -> None:
    case = made(50, 2, inner=50)
    assert relative_error(grouped_experts(*case, tiles=tiles), definition(*case)) < 3e-6


def test_experts_of_another_rank_add_nothing_and_all_tokens_may_want_one() -> None:
    rows, gate_up, down, experts, weights = made(30, 2)
    experts[:, 0] = EXPERTS + 3
    experts[:, 1] = 4
    case = rows, gate_up, down, experts, weights
    assert relative_error(grouped_experts(*case), definition(*case)) < 3e-6
    experts[:] = EXPERTS
    assert not grouped_experts(*case).any()


def test_what_the_kernels_do_not_take_is_refused_by_name() -> None:
    rows, gate_up, down, experts, weights = made(4, 2)
    with pytest.raises(ValueError, match="do not fit"):
        grouped_experts(rows[:, :20].contiguous(), gate_up, down, experts, weights)
    with pytest.raises(ValueError, match="contiguous"):
        grouped_experts(rows, gate_up, down.transpose(1, 2).contiguous().transpose(1, 2), experts, weights)
    many = torch.zeros(MAX_PAIRS + 1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="more than"):
        grouped_experts(rows, gate_up, down, many, many)
