"""Rounding a weight to levels so that its products change least, rather than its numbers.

GPTQ (Frantar et al., arXiv 2210.17323): inputs are rounded one by one, those that carry most first, and what
the rounding of one does to the outputs is taken off the inputs that are still to be rounded, as far as they
vary with it. How inputs vary together is their second moment over a text (`engine/calibration.py`). Scales
are chosen before, by what an error of each input counts, and stay.

Inputs that are rounded themselves, as those of 8-bit floats are, bring noise of their own: the weight is then
fitted to what they become, which is a little less of each input the more it goes with others.
"""

from __future__ import annotations

import torch

from engine.quantized_weight import QuantizedWeight, WeightFormat, grid_of, nearest_levels, quantized

DAMPING = 0.01
"""Share of the mean input's moment that every input has besides, those that never came too."""

SHRINKAGE = 0.2
"""Share that is taken off what two inputs have together: a short text has them vary together by chance.

Of SmolLM2 with 4 bits and 1,536 tokens the divergence is 0.080, and 0.096 without."""

NOISE = {WeightFormat.FP8: 6.5e-4}
"""Mean square of what rounding an input to a level changes, as a share of the input's.

Of SmolLM2 with 8-bit floats the perplexity is 1.005 times that of floats, and 1.011 without."""

SPAN = {WeightFormat.FP8: 8, WeightFormat.INT8: 8, WeightFormat.INT4: 1}
"""Inputs that are rounded at once; what their errors do to each other is not compensated.

Of SmolLM2 with 4 bits the divergence is 0.073 with 8 inputs at once, and 0.066 with one."""

BLOCK = 128
"""Inputs whose errors are put on all those behind them in one product."""


@torch.no_grad()
def compensated(weight: torch.Tensor, weight_format: WeightFormat, moments: torch.Tensor) -> QuantizedWeight:
    """Round a weight [out_features, in_features] to levels for inputs of these moments.

    Moments that say nothing, of zeros or not finite, give the nearest levels.

    Args:
        moments: [in_features, in_features], the sum of the outer products of inputs with themselves.

    Raises ValueError for four bits of an odd number of inputs."""
    weight = weight.float()
    mean = moments.diagonal().mean()
    if not bool(mean > 0) or not bool(mean < float("inf")):
        return quantized(weight, weight_format)
    moments = _smoothed(moments)
    if noise := NOISE.get(weight_format, 0.0):
        noisy = moments + torch.diag(moments.diagonal() * noise)
        weight = torch.linalg.solve(noisy, moments @ weight.double().t()).t().float()
    grid = grid_of(weight, weight_format, moments.diagonal().float())
    order = moments.diagonal().argsort(descending=True, stable=True)
    carry = _carry(moments[order][:, order])
    groups = order // grid.group
    scales, zeros = grid.scales.t(), None if grid.zeros is None else grid.zeros.t()
    rest = weight.t()[order]  # a row for each input, which is a copy
    levels = torch.empty_like(rest)
    for start in range(0, len(rest), BLOCK):
        block, after = slice(start, start + BLOCK), slice(start + BLOCK, None)
        scale = scales[groups[block]]
        zero = torch.zeros_like(scale) if zeros is None else zeros[groups[block]]
        levels[block], errors = _rounded(rest[block], carry[block, block], weight_format, scale, zero)
        rest[after].addmm_(carry[block, after].t(), errors, alpha=-1)
    in_place = torch.empty_like(levels)
    in_place[order] = levels
    return grid.weight_of(in_place.t().contiguous())


def _rounded(
    rest: torch.Tensor,
    carry: torch.Tensor,
    weight_format: WeightFormat,
    scale: torch.Tensor,
    zero: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the levels of some inputs and their errors, all [inputs, out_features]; `rest` is written to."""
    levels, errors = torch.empty_like(rest), torch.empty_like(rest)
    size = SPAN[weight_format]
    for start in range(0, len(rest), size):
        span, after = slice(start, start + size), slice(start + size, None)
        levels[span] = nearest_levels(rest[span], weight_format, scale[span], zero[span])
        wrong = rest[span] - (levels[span] - zero[span]) * scale[span]
        errors[span] = torch.linalg.solve_triangular(carry[span, span].t(), wrong, upper=False)
        rest[after].addmm_(carry[span, after].t(), errors[span], alpha=-1)
    return levels, errors


def _smoothed(moments: torch.Tensor) -> torch.Tensor:
    """Return moments in double precision as more text would have them: less correlated, none of them zero."""
    alone = moments.diagonal().double()
    return moments.double() * (1 - SHRINKAGE) + torch.diag(alone * SHRINKAGE + alone.mean() * DAMPING)


def _carry(moments: torch.Tensor) -> torch.Tensor:
    """Return the upper factor of the inverse of moments; row n: what n's error puts on those after."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()
