"""Products of 8-bit weights on a CPU, in integers.

A row of activations is rounded to 16 bits, and its sums with the weights are exact. So the one error is that
of the weights, and what a row gives does not depend on the rows beside it. Activations of 8 bits would be
sooner done, and would turn the last bit of a float that attention summed in another order into a whole level:
the same prompt in other chunks would then say other things.

torch has no such product. Its `_weight_int8pack_mm` and `_weight_int4pack_mm_for_cpu` compute in bfloat16,
slower than float32 from a few rows on; oneDNN's takes 8 bits on both sides, on few processors, at two to
three times the time. Weights of 4 bits are widened to 8. `bench/quantized_cpu.py` measures what is won.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import pad

from engine.kernels.cpu_product import LANES, multiply, round_to_numbers
from engine.quantized_weight import QuantizedWeight, WeightFormat, quantized

Array = np.ndarray[Any, Any]

PART_PRODUCTS = 8_000_000
"""Products of numbers, some 0.2 ms, that are worth another thread, which takes 0.05 ms to begin."""


class IntegerLinear(nn.Module):
    """A linear layer on a CPU, with weights of 8 bits and a scale for each output."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        if weight.format is not WeightFormat.INT8 or weight.scales.shape[1] > 1 or weight.zeros is not None:
            weight = quantized(weight.dequantized(), WeightFormat.INT8)
        self.bias = bias
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self._missing = -weight.in_features % LANES
        self._levels = pad(weight.levels, (0, self._missing)).contiguous().numpy()
        self._scales = weight.scales[:, 0].float().contiguous().numpy()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, self.in_features).float().contiguous()
        num_rows = len(rows)
        numbers = torch.zeros(num_rows, self.in_features + self._missing, dtype=torch.int16).numpy()
        steps = torch.empty(num_rows).numpy()
        output = torch.empty(num_rows, self.out_features)
        round_to_numbers(rows.numpy(), numbers, steps)
        _multiply(numbers, steps, self._levels, self._scales, output.numpy())
        if self.bias is not None:
            output += self.bias
        return output.to(hidden.dtype).view(*hidden.shape[:-1], self.out_features)


def _multiply(numbers: Array, steps: Array, levels: Array, scales: Array, output: Array) -> None:
    """Let as many threads multiply as torch's operations have, where each has enough to do."""
    num_outputs, num_threads = len(levels), torch.get_num_threads()
    parts = min(num_threads, max(1, len(numbers) * levels.size // PART_PRODUCTS))
    ends = [num_outputs * part // parts for part in range(parts + 1)]

    def multiply_part(part: int) -> None:
        multiply(numbers, steps, levels, scales, output, ends[part], ends[part + 1])

    others = [_threads(num_threads).submit(multiply_part, part) for part in range(1, parts)]
    multiply_part(0)
    for each in others:
        each.result()


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "product")
