"""Experts in one launch for all say what each says of its tokens."""

import pytest
import torch
from torch.nn.functional import silu

from engine.kernels import grouped_experts as kernels
from engine.kernels.expert_scales import ExpertScales
from engine.kernels.grouped_experts import ExpertTiles, grouped_experts
from engine.kernels.many_pairs import Tally
from engine.nibbles import in_words
from engine.quantized_weight import packed
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


def of_levels(gate_up: torch.Tensor, down: torch.Tensor, group: int, kind: str = "fp8"):
    """Return experts rounded to levels, with a scale for each output and group (0: all), and their floats."""
    if kind != "fp8":
        return of_whole_numbers(gate_up, down, group, kind)
    made = []
    for weight in (gate_up, down):
        size = group or weight.shape[2]
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[2] % size))
        parts = padded.unflatten(2, (-1, size))
        scales = parts.abs().amax(3) / 448
        levels = (parts / scales[..., None]).to(torch.float8_e4m3fn)
        floats = (levels.float() * scales[..., None]).flatten(2)[..., : weight.shape[2]]
        kept = levels.float().flatten(2)[..., : weight.shape[2]].to(torch.float8_e4m3fn).contiguous()
        made.append((kept, scales.contiguous(), floats))
    (gate_up, gate_up_scales, gate_up_floats), (down, down_scales, down_floats) = made
    return gate_up, down, ExpertScales(gate_up_scales, down_scales, group), (gate_up_floats, down_floats)


def of_whole_numbers(gate_up: torch.Tensor, down: torch.Tensor, group: int, kind: str):
    """Return experts of integers of 8 bits, or of 4 with zero points, as `of_levels`."""
    made = []
    for weight in (gate_up, down):
        size = group or weight.shape[2]
        groups = -(-weight.shape[2] // size)
        most = 127 if kind == "int8" else 7
        scales = weight.abs().amax(2, keepdim=True).expand(-1, -1, groups) / most
        scales = scales * torch.linspace(0.8, 1.2, groups, device=weight.device)
        zeros = (torch.arange(scales.numel(), device=weight.device) % 17 - 8).float().view_as(scales)
        zeros = torch.zeros_like(scales) if kind == "int8" else zeros
        spread = [part.repeat_interleave(size, 2)[..., : weight.shape[2]] for part in (scales, zeros)]
        levels = (weight / spread[0] + spread[1]).round().clamp(-most - 1, most)
        floats = (levels - spread[1]) * spread[0]
        if kind == "int8":
            made.append((levels.to(torch.int8), scales.contiguous(), floats))
        else:
            pairs = packed(levels.to(torch.int8).flatten(0, 1)).view(*weight.shape[:2], -1)
            made.append((pairs, in_words(scales, zeros), floats))
    (gate_up, gate_up_scales, gate_up_floats), (down, down_scales, down_floats) = made
    return gate_up, down, ExpertScales(gate_up_scales, down_scales, group), (gate_up_floats, down_floats)


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


KINDS = {"fp8": 3e-6, "int8": 3e-6, "int4": 2e-5}
"""Kinds of levels and how far the kernels may be off: a zero point takes the last bits of its scale."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_tokens", "chosen", "group"),
    [(3, 2, 0), (3, 2, 32), (40, 3, 32), pytest.param(40, 3, 0, marks=pytest.mark.full)],
)
def test_levels_say_what_their_floats_say(num_tokens: int, chosen: int, group: int, kind: str) -> None:
    rows, gate_up, down, experts, weights = made(num_tokens, chosen, inner=50)
    experts[0, 0] = EXPERTS + 3
    gate_up, down, scales, floats = of_levels(gate_up, down, group, kind)
    expected = definition(rows, *floats, experts, weights)
    found = grouped_experts(rows, gate_up, down, experts, weights, scales=scales)
    assert relative_error(found, expected) < KINDS[kind]
    tiles = ExpertTiles(16, 16, 16, 4, 2)
    found = grouped_experts(rows, gate_up, down, experts, weights, tiles, scales=scales)
    assert relative_error(found, expected) < KINDS[kind]


def test_levels_are_widened_to_rows_of_few_bits() -> None:
    rows, gate_up, down, experts, weights = made(20, 2)
    gate_up, down, scales, floats = of_levels(gate_up, down, 32)
    found = grouped_experts(rows.half(), gate_up, down, experts, weights, scales=scales)
    assert found.dtype == torch.float16
    assert relative_error(found.float(), definition(rows, *floats, experts, weights)) < 2e-3


def test_blocks_of_128_are_groups_whose_scale_outputs_share() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2 * 160, 200), (2, 200, 160))
    levels = [torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn) for shape in shapes]
    blocks = [torch.rand(2, -(-rows // 128), 2, generator=generator) for _, rows, _ in shapes]
    of_outputs = [
        block.repeat_interleave(128, 1)[:, : shape[1]].contiguous()
        for block, shape in zip(blocks, shapes, strict=True)
    ]
    floats = [
        level.float() * scale.repeat_interleave(128, 2)[..., : level.shape[2]] / 16
        for level, scale in zip(levels, of_outputs, strict=True)
    ]
    rows = torch.randn(5, 200, generator=generator)
    experts, weights = torch.tensor([[0, 1]] * 5), torch.rand(5, 2, generator=generator)
    case = [item.to(DEVICE) for item in (rows, *levels, experts, weights)]
    scales = ExpertScales(*(scale.to(DEVICE) / 16 for scale in of_outputs), 128)
    expected = definition(rows, *floats, experts, weights).to(DEVICE)
    assert relative_error(grouped_experts(*case, scales=scales), expected) < 3e-6


@pytest.mark.parametrize("is_scaled", [False, True])
def test_more_pairs_than_one_program_orders_change_no_number(is_scaled: bool, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "MAX_PAIRS", 16)
    rows, gate_up, down, experts, weights = made(30, 2)
    experts[3, 0] = EXPERTS
    scales, floats = None, (gate_up, down)
    if is_scaled:
        gate_up, down, scales, floats = of_levels(gate_up, down, 0)
    choices = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    tally = Tally(choices, torch.ones(30, dtype=torch.int32, device=DEVICE))
    found = grouped_experts(rows, gate_up, down, experts, weights, tally=tally, scales=scales)
    assert relative_error(found, definition(rows, *floats, experts, weights)) < 3e-6
    assert choices.sum() == 59


def test_what_the_kernels_do_not_take_is_refused_by_name() -> None:
    rows, gate_up, down, experts, weights = made(4, 2)
    with pytest.raises(ValueError, match="do not fit"):
        grouped_experts(rows[:, :20].contiguous(), gate_up, down, experts, weights)
    with pytest.raises(ValueError, match="contiguous"):
        grouped_experts(rows, gate_up, down.transpose(1, 2).contiguous().transpose(1, 2), experts, weights)
    with pytest.raises(ValueError, match="scales"):
        grouped_experts(rows, gate_up.to(torch.float8_e4m3fn), down, experts, weights)
    gate_up, down, scales, _ = of_levels(gate_up, down, 32)
    with pytest.raises(ValueError, match="do not fit"):
        grouped_experts(rows, gate_up, down, experts, weights, scales=scales._replace(group=64))
    pairs = [each.view(torch.uint8)[..., ::2].contiguous() for each in (gate_up, down)]
    with pytest.raises(ValueError, match=r"scales of torch\.float32 do not fit levels of torch\.uint8"):
        grouped_experts(rows, *pairs, experts, weights, scales=scales)
    few = scales._replace(down=scales.down[:1])
    with pytest.raises(ValueError, match="do not fit levels"):
        grouped_experts(rows, gate_up, down, experts, weights, scales=few)
