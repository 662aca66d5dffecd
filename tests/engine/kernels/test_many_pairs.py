"""What goes around grouped products: the gate between them, and the sum of each token's pairs after them."""

import pytest
import torch
from torch.nn.functional import silu

from engine.kernels.many_pairs import Tally, added_up, gated, ordered_pairs
from tests.engine.kernels.paged import DEVICE, relative_error


@pytest.mark.parametrize(("num_pairs", "inner"), [(1, 1), (7, 24), (3, 1500), (0, 8)])
def test_gate_and_up_become_one_row(num_pairs: int, inner: int) -> None:
    both = torch.randn(num_pairs, 2 * inner, device=DEVICE)
    gate, up = both.chunk(2, -1)
    assert gated(both).shape == (num_pairs, inner)
    assert relative_error(gated(both), silu(gate) * up) < 2e-6


@pytest.mark.parametrize("is_ordered", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_tokens_pairs_are_found_weighted_and_added_and_those_of_other_ranks_are_not(
    is_ordered: bool,
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_chosen, num_experts, hidden = 900, 3, 4, 1100
    chosen = torch.randint(0, num_experts + 2, (num_tokens, num_chosen), generator=generator).to(DEVICE)
    weights = torch.rand(num_tokens, num_chosen, generator=generator).to(DEVICE)
    slots = torch.randint(-1, 3, (num_tokens,), generator=generator, dtype=torch.int32).to(DEVICE)
    choices = torch.full((num_experts,), 7, dtype=torch.int64, device=DEVICE)
    tokens, places, ends = ordered_pairs(chosen, num_experts, Tally(choices, slots))
    counted = chosen[slots >= 0].flatten().bincount(minlength=num_experts + 2)[:num_experts]
    assert torch.equal(choices, 7 + counted)
    assert sorted(places.tolist()) == list(range(num_tokens * num_chosen))
    assert tokens[places].tolist() == [token for token in range(num_tokens) for _ in range(num_chosen)]
    assert ends.tolist() == [(chosen <= expert).sum().item() for expert in range(num_experts)]
    placed = chosen.reshape(-1)[torch.argsort(places)]
    assert torch.equal(placed.clamp(max=num_experts), chosen.reshape(-1).clamp(max=num_experts).sort().values)
    rows = torch.randn(num_tokens * num_chosen, hidden, generator=generator).to(DEVICE)
    is_here = (chosen < num_experts).reshape(-1)
    made = torch.where(is_here[:, None], rows, float("nan"))
    expected = torch.where(is_here[:, None], rows * weights.reshape(-1, 1), 0.0)
    if is_ordered:
        made = made[torch.argsort(places)]
    output = added_up(made, places if is_ordered else None, chosen, weights, num_experts)
    assert relative_error(output, expected.view(num_tokens, num_chosen, hidden).sum(1)) < 2e-6


def test_what_the_kernels_do_not_take_is_refused_by_name() -> None:
    rows, chosen = torch.zeros(4, 8, device=DEVICE), torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="contiguous"):
        gated(rows.t())
    with pytest.raises(ValueError, match="places"):
        added_up(rows, torch.zeros(3, dtype=torch.int32, device=DEVICE), chosen, chosen.float(), 2)
