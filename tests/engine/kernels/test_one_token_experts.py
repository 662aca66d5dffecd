"""One token's experts in two launches say what each says of it."""

import pytest
import torch

from engine.kernels import one_token_experts as kernels
from engine.kernels.many_pairs import Tally
from engine.kernels.one_token_experts import one_token_experts
from tests.engine.kernels.paged import DEVICE, relative_error
from tests.engine.kernels.test_grouped_experts import EXPERTS, KINDS, definition, made, of_levels


@pytest.mark.parametrize("chosen", [1, 2, 3, 6])
@pytest.mark.parametrize("is_cut", [False, True])
def test_the_sum_over_a_tokens_experts_is_each_experts_own(chosen: int, is_cut: bool, monkeypatch) -> None:
    if is_cut:  # into several tiles of rows and steps, the last ones not whole
        for name, value in (("COLUMNS", 4), ("STEP", 16), ("DOWN_COLUMNS", 4), ("DOWN_STEP", 32)):
            monkeypatch.setattr(kernels, name, value)
    case = made(1, chosen, inner=50)
    assert relative_error(one_token_experts(*case), definition(*case)) < 3e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("is_cut", [False, True])
def test_levels_say_what_their_floats_say(kind: str, group: int, is_cut: bool, monkeypatch) -> None:
    if is_cut:
        for name, value in (("COLUMNS", 4), ("STEP", 32), ("DOWN_COLUMNS", 4), ("DOWN_STEP", 16)):
            monkeypatch.setattr(kernels, name, value)
    row, gate_up, down, experts, weights = made(1, 3, inner=50)
    experts[0, 1] = EXPERTS + 1
    gate_up, down, scales, floats = of_levels(gate_up, down, group, kind)
    found = one_token_experts(row, gate_up, down, experts, weights, scales=scales)
    assert relative_error(found, definition(row, *floats, experts, weights)) < KINDS[kind]


def test_experts_of_another_rank_add_nothing_and_are_not_counted() -> None:
    rows, gate_up, down, experts, weights = made(1, 3)
    experts[0, 1] = EXPERTS + 3
    case = rows, gate_up, down, experts, weights
    choices = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    slots = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    found = one_token_experts(*case, tally=Tally(choices, slots))
    assert relative_error(found, definition(*case)) < 3e-6
    expected = [int(expert in (experts[0, 0], experts[0, 2])) for expert in range(EXPERTS)]
    assert choices.tolist() == expected
    one_token_experts(*case, tally=Tally(choices, torch.full_like(slots, -1)))
    assert choices.tolist() == expected
    experts[:] = EXPERTS
    assert not one_token_experts(*case).any()


def test_what_the_kernels_do_not_take_is_refused_by_name() -> None:
    rows, gate_up, down, experts, weights = made(1, 2)
    with pytest.raises(ValueError, match="do not fit"):
        one_token_experts(rows[:, :20], gate_up, down, experts, weights)
    with pytest.raises(ValueError, match="contiguous"):
        one_token_experts(rows, gate_up, down.transpose(1, 2).contiguous().transpose(1, 2), experts, weights)
    with pytest.raises(ValueError, match="one token"):
        one_token_experts(rows.repeat(2, 1), gate_up, down, experts, weights)
