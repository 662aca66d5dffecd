"""Products of 8-bit weights on a CPU, in integers.

A row of activations is rounded to 16 bits, and its sums with the weights are exact. So nearly all of the
error is that of the weights, and what a row gives does not depend on the rows beside it. Activations of 8
bits would be sooner done, and would turn the last bit of a float that attention summed in another order into
a whole level: the same prompt in other chunks would then say other things.

torch has no such product. Its `_weight_int8pack_mm` and `_weight_int4pack_mm_for_cpu` compute in bfloat16,
slower than float32 from a few rows on; oneDNN's takes 8 bits on both sides, two calls' worth of rows, on few
processors. Weights of 4 bits are widened to 8. `bench/quantized_cpu.py` measures what is won.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.functional import pad

from engine.kernels.cpu_product import LANES, multiply, round_to_numbers
from engine.quantized_weight import QuantizedWeight, WeightFormat, quantized


class IntegerLinear(nn.Module):
    """A linear layer on a CPU, with weights of 8 bits and a scale for each output."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        if weight.format is not WeightFormat.INT8 or weight.scales.shape[1] > 1 or weight.zeros is not None:
            weight = quantized(weight.dequantized(), WeightFormat.INT8)
        self.bias = bias
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self._levels = pad(weight.levels, (0, -weight.in_features % LANES)).contiguous().numpy()
        self._scales = weight.scales[:, 0].float().contiguous().numpy()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, self.in_features).to(torch.float32).contiguous().numpy()
        # What rows lack up to a multiple of `LANES` stays zero.
        numbers = np.zeros((len(rows), self._levels.shape[1]), np.int16)
        steps = np.empty(len(rows), np.float32)
        output = torch.empty((*hidden.shape[:-1], self.out_features))
        products = output.numpy().reshape(len(rows), self.out_features)
        round_to_numbers(rows, numbers, steps)
        multiply(numbers, steps, self._levels, self._scales, products, torch.get_num_threads())
        if self.bias is not None:
            output += self.bias
        return output.to(hidden.dtype)
