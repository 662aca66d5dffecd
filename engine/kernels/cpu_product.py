"""Products of rows of floats with 8-bit weights on a CPU, which numba compiles for the processor it finds.

A row is rounded to 16 bits. One instruction (on x86 `pmaddwd`) multiplies numbers of 16 bits with weights and
adds pairs of products; processors without products of 8 bits have it too. Sums of at most `FLUSHED` inputs
are whole numbers and exact. They are added as floats in one order, so that a row's product does not depend on
the rows beside it.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Inputs that are multiplied at once. Rows and weights have a multiple of them."""

FLUSHED = 4096
"""Inputs whose sum 32 bits hold: each of eight lanes adds 512 products of 16 and 8 bits."""

LARGEST = 32767.0
CACHED_BYTES = 1 << 17
"""Bytes of weights that are multiplied with all rows before the next ones."""

try:
    # The one layer of numba's threads that several threads may call at once. It needs the system's libgomp.
    from numba.np.ufunc import omppool  # type: ignore[attr-defined]
except ImportError:
    omppool = None
else:
    numba.config.THREADING_LAYER = "omp"

MOST_THREADS = numba.config.NUMBA_NUM_THREADS if omppool else 1

INT32, INT64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()


def _vector(element, count=LANES):
    return ir.VectorType(element, count)


def _pairs_added(builder, first, second=None):
    """Return the sums of neighbours in one vector, or in two, one after the other."""
    count = first.type.count * (1 if second is None else 2)
    second = ir.Constant(first.type, ir.Undefined) if second is None else second
    halves = [
        builder.shuffle_vector(
            first, second, ir.Constant(_vector(INT32, count // 2), list(range(odd, count, 2)))
        )
        for odd in (0, 1)
    ]
    add = builder.fadd if first.type.element == FLOAT else builder.add
    return add(*halves)


def _loaded(builder, array, element, at, count=LANES):
    """Return `count` elements of an array's memory from the element `at` on."""
    start = builder.gep(builder.bitcast(array.data, element.as_pointer()), [at])
    return builder.load(builder.bitcast(start, _vector(element, count).as_pointer()), align=1)


def _add_products(builder, arrays, begins, sums, first, end):
    """Add the products of inputs [first, end) of some rows and one weight to the rows' sums."""
    numbers, weight = arrays
    with cgutils.for_range_slice(builder, first, end, INT64(LANES), INT64) as (at, _):
        levels = _loaded(builder, weight, ir.IntType(8), builder.add(begins[-1], at))
        levels = builder.sext(levels, _vector(INT32))
        for total, begin in zip(sums, begins, strict=False):
            each = _loaded(builder, numbers, ir.IntType(16), builder.add(begin, at))
            products = builder.mul(builder.sext(each, _vector(INT32)), levels, flags=("nsw",))
            builder.store(builder.add(builder.load(total), _pairs_added(builder, products)), total)


@intrinsic(prefer_literal=True)
def _multiply_rows(typing, count, row, column, numbers, steps, weight, scales, output):
    """Write the products of `count` rows from `row` on with the weight of one output."""
    given = (count, row, column, numbers, steps, weight, scales, output)

    def generate(context, builder, signature, values):
        num_rows = count.literal_value
        row, column = values[1:3]
        arrays = [
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(given[3:], values[3:], strict=True)
        ]
        numbers, steps, weight, scales, output = arrays
        num_inputs = builder.extract_value(weight.shape, 1)
        num_outputs = builder.extract_value(output.shape, 1)
        rows = [builder.add(row, INT64(place)) for place in range(num_rows)]
        begins = [builder.mul(each, num_inputs) for each in (*rows, column)]
        zero = ir.Constant(_vector(FLOAT, LANES // 2), None)
        totals = [cgutils.alloca_once_value(builder, zero) for _ in rows]
        sums = [cgutils.alloca_once(builder, _vector(INT32, LANES // 2)) for _ in rows]
        with cgutils.for_range_slice(builder, INT64(0), num_inputs, INT64(FLUSHED), INT64) as (first, _):
            for each in sums:
                builder.store(ir.Constant(_vector(INT32, LANES // 2), None), each)
            end = builder.add(first, INT64(FLUSHED))
            end = builder.select(builder.icmp_signed("<", end, num_inputs), end, num_inputs)
            _add_products(builder, (numbers, weight), begins, sums, first, end)
            for total, each in zip(totals, sums, strict=True):
                floats = builder.sitofp(builder.load(each), zero.type)
                builder.store(builder.fadd(builder.load(total), floats), total)
        left = [builder.load(total) for total in totals]
        while len(left) > 1:
            left = [_pairs_added(builder, *left[at : at + 2]) for at in range(0, len(left), 2)]
        products = left[0]
        while products.type.count > num_rows:
            products = _pairs_added(builder, products)
        scale = builder.load(builder.gep(scales.data, [column]))
        for place, each in enumerate(rows):
            step = builder.load(builder.gep(steps.data, [each]))
            product = builder.fmul(builder.extract_element(products, INT32(place)), scale)
            at = builder.add(builder.mul(each, num_outputs), column)
            builder.store(builder.fmul(product, step), builder.gep(output.data, [at]))
        return context.get_dummy_value()

    return types.void(*given), generate


@njit("void(float32[:,::1], int16[:,::1], float32[::1])", nogil=True, error_model="numpy")
def round_to_numbers(rows, numbers, steps) -> None:
    """Round each row to 16-bit numbers of steps of its own; numbers past a row's end are not written.

    Args:
        rows: float32 [num_rows, in_features]
        numbers: int16 [num_rows, inputs], written
        steps: float32 [num_rows], written
    """
    for row in range(rows.shape[0]):
        largest = np.float32(0.0)
        for at in range(rows.shape[1]):
            size = abs(rows[row, at])
            if size > largest or np.isnan(size):  # then the row's products are no numbers either
                largest = size
        step = np.float32(largest / np.float32(LARGEST) + np.float32(1e-30))
        steps[row] = step
        for at in range(rows.shape[1]):
            numbers[row, at] = np.int16(np.rint(rows[row, at] / step))


@njit(
    "void(int16[:,::1], float32[::1], int8[:,::1], float32[::1], float32[:,::1], int64, int64)",
    nogil=True,
    error_model="numpy",
)
def _multiply_part(numbers, steps, weight, scales, output, first, end):
    """Write the products of all rows for the outputs [first, end)."""
    num_rows = numbers.shape[0]
    held = max(1, CACHED_BYTES // weight.shape[1])
    for begin in range(first, end, held):
        columns = range(begin, min(begin + held, end))
        row = 0
        while row + 8 <= num_rows:
            for column in columns:
                _multiply_rows(8, row, column, numbers, steps, weight, scales, output)
            row += 8
        if row + 4 <= num_rows:
            for column in columns:
                _multiply_rows(4, row, column, numbers, steps, weight, scales, output)
            row += 4
        if row + 2 <= num_rows:
            for column in columns:
                _multiply_rows(2, row, column, numbers, steps, weight, scales, output)
            row += 2
        if row < num_rows:
            for column in columns:
                _multiply_rows(1, row, column, numbers, steps, weight, scales, output)


def multiply(numbers, steps, weight, scales, output, num_threads) -> None:
    """Write the products of all rows with all weights.

    Args:
        numbers: int16 [num_rows, inputs], of `round_to_numbers`
        steps: float32 [num_rows]
        weight: int8 [out_features, inputs]
        scales: float32 [out_features]
        output: float32 [num_rows, out_features], written
        num_threads: At most so many threads share the outputs.
    """
    parts = min(num_threads, MOST_THREADS)
    if parts > 1:
        numba.set_num_threads(parts)
        _multiply_parts(numbers, steps, weight, scales, output, parts)
    else:  # a loop of one part would wake all of numba's threads
        _multiply_part(numbers, steps, weight, scales, output, 0, len(weight))


@njit(
    "void(int16[:,::1], float32[::1], int8[:,::1], float32[::1], float32[:,::1], int64)",
    nogil=True,
    error_model="numpy",
    parallel=MOST_THREADS > 1,
)
def _multiply_parts(numbers, steps, weight, scales, output, parts):
    num_outputs = weight.shape[0]
    for part in prange(parts):
        first, end = num_outputs * part // parts, num_outputs * (part + 1) // parts
        _multiply_part(numbers, steps, weight, scales, output, first, end)
