"""`python -m bench.few_bit_products`: products by weights of few bits on a GPU, by the number of rows.

The four products of a layer of Llama-3.1-8B, of random levels, each number of rows in a CUDA graph over as
many weights as no cache holds. Beside what the engine does (`engine/fused_projections.py`) stands the same
product by the weight written out, and cuBLAS's by bfloat16. Each is first compared with float32.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.about_run import current_commit, write_result
from engine.fused_projections import QuantizedProduct
from engine.kernels.nibble_product import written_out_nibbles
from engine.kernels.quantized_product import written_out
from engine.nibbles import Nibbles
from engine.quantized_linear import QuantizedLinear
from engine.quantized_weight import QuantizedWeight, WeightFormat, packed

SHAPES = ((28_672, 4_096), (4_096, 14_336), (6_144, 4_096), (4_096, 4_096))
"""Outputs and inputs of gate and up, down, q with k and v, and the output projection."""

ROWS = (8, 17, 24, 48, 64, 96, 128, 192, 256, 384, 512, 1_024, 2_048, 4_096)

NO_CACHE_BYTES = 250e6
"""Bytes of weights that are multiplied by turns."""

LARGEST_ERROR = 0.04
"""Relative error up to which a product is right: rows may be rounded to 8-bit floats."""

FORMATS = ("int4", "int8", "fp8 blocks")


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of the four products with so many rows."""

    format: str
    rows: int
    used: float
    written_out: float
    bfloat16: float


def random_weight(kind: str, out_features: int, in_features: int) -> QuantizedWeight:
    """Return a weight on the GPU: int4 in groups of 128, int8 with a scale an output, or fp8 of 128 x 128."""
    shape = out_features, in_features
    if kind == "fp8 blocks":
        levels = torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)
        blocks = torch.rand(out_features // 128, in_features // 128, device="cuda") * 0.01 + 0.001
        return QuantizedWeight(WeightFormat.FP8, levels, blocks.repeat_interleave(128, 0), 128)
    groups = in_features // 128 if kind == "int4" else 1
    scales = torch.rand(out_features, groups, device="cuda") * 0.01 + 0.001
    if kind == "int8":
        levels = torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")
        return QuantizedWeight(WeightFormat.INT8, levels, scales, in_features)
    levels = packed(torch.randint(-8, 8, shape, dtype=torch.int8, device="cuda"))
    return QuantizedWeight(WeightFormat.INT4, levels, scales, 128)


def whole(product: QuantizedProduct, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of a product without zero points, written out."""
    levels, scales = product.get_buffer("levels"), product.get_buffer("scales")
    if product.is_four_bits:
        return written_out_nibbles(Nibbles(levels, scales, *product.sizes), dtype)
    return written_out(levels, scales, None, product.group, dtype)


def microseconds(call: Callable[[Any], object], weights: Sequence[object]) -> float:
    """Return what one call takes, of one with each weight in a CUDA graph; the median of seven."""
    for weight in weights[:2]:
        call(weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    times = []
    for _ in range(8):
        began: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(float(began.elapsed_time(ended)) * 1e3 / len(weights))
    return statistics.median(times[1:])


@torch.no_grad()
def times_of(kind: str, out_features: int, in_features: int) -> list[Times]:
    """Return the times of one product with each number of rows."""
    first = random_weight(kind, out_features, in_features)
    count = int(NO_CACHE_BYTES // first.num_bytes) + 2
    weights = [first, *(random_weight(kind, out_features, in_features) for _ in range(count))]
    floats = first.dequantized()
    plain = [floats.to(torch.bfloat16) for _ in range(int(NO_CACHE_BYTES // (2 * floats.numel())) + 2)]
    products = [QuantizedProduct(QuantizedLinear(weight, None)) for weight in weights]
    del weights
    return [_times(kind, num_rows, floats, products, plain) for num_rows in ROWS]


def _times(
    kind: str,
    num_rows: int,
    floats: torch.Tensor,
    products: list[QuantizedProduct],
    plain: list[torch.Tensor],
) -> Times:
    rows = torch.randn(num_rows, floats.shape[1], device="cuda", dtype=torch.bfloat16)
    expected = rows.float() @ floats.t()
    error = (products[0](rows).float() - expected).norm() / expected.norm()
    if not error < LARGEST_ERROR:
        raise ArithmeticError(f"{kind}, {num_rows} rows of {floats.shape[1]}: off by {error:.3f}")
    return Times(
        kind,
        num_rows,
        microseconds(lambda product: product(rows), products),
        microseconds(lambda product: torch.mm(rows, whole(product, rows.dtype).t()), products),
        microseconds(lambda weight: torch.mm(rows, weight.t()), plain),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time products by weights of few bits on a GPU.")
    parser.add_argument("--out", type=Path, help="write a JSON file with the times")
    args = parser.parse_args()
    sums: list[Times] = []
    for kind in FORMATS:
        layers = [times_of(kind, *shape) for shape in SHAPES]
        for each in zip(*layers, strict=True):
            one = Times(
                kind,
                each[0].rows,
                *(
                    round(sum(getattr(t, name) for t in each), 1)
                    for name in ("used", "written_out", "bfloat16")
                ),
            )
            print(
                f"{kind:10} {one.rows:5} rows: {one.used:7.0f} us, written out {one.written_out:7.0f}, "
                f"bfloat16 {one.bfloat16:7.0f}",
                flush=True,
            )
            sums.append(one)
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": current_commit()}
    write_result(args.out, about | {"times": [asdict(each) for each in sums]})


if __name__ == "__main__":
    main()
