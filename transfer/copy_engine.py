"""Copy many ranges between GPU and host memory by the GPU's copy engines, in one call of the driver.

The kernel (`kernels/copy_ranges.py`) takes the link's rate too, but it takes it with the processors that
compute: a layer that runs beside it waits. The engines leave them alone. They need a microsecond or two
for each range, so that short ones are the kernel's.

The driver's batched copy is of CUDA 12.8 and later; before that there is the kernel.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

MIN_BYTES = 64 << 10
"""Ranges that are shorter on average go by the kernel."""

Addresses = npt.NDArray[np.int64]

_IN_STREAM_ORDER = 1
_BESIDE_COMPUTING = 1


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("device", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


@functools.cache
def _batched_copy() -> Callable[..., int] | None:
    """Return the driver's function, with what `copy` passes to it; None: it has none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    attributes = _Attributes(_IN_STREAM_ORDER, _Location(), _Location(), _BESIDE_COMPUTING)
    first = (ctypes.c_size_t * 1)(0)
    if hasattr(driver, "cuMemcpyBatchAsync_v2"):
        newer = driver.cuMemcpyBatchAsync_v2

        def call(targets: int, sources: int, sizes: int, count: int, stream: int) -> int:
            pointers = map(ctypes.c_void_p, (targets, sources, sizes))
            size = ctypes.c_size_t
            code: int = newer(
                *pointers, size(count), ctypes.byref(attributes), first, size(1), ctypes.c_void_p(stream)
            )
            return code

        return call
    if hasattr(driver, "cuMemcpyBatchAsync"):
        older = driver.cuMemcpyBatchAsync

        def call_older(targets: int, sources: int, sizes: int, count: int, stream: int) -> int:
            pointers = map(ctypes.c_void_p, (targets, sources, sizes))
            size, failed = ctypes.c_size_t, ctypes.c_size_t()
            code: int = older(
                *pointers,
                size(count),
                ctypes.byref(attributes),
                first,
                size(1),
                ctypes.byref(failed),
                ctypes.c_void_p(stream),
            )
            return code

        return call_older
    return None


def can_copy() -> bool:
    """Return whether this machine's driver can."""
    return _batched_copy() is not None


def copy(sources: Addresses, targets: Addresses, sizes: Addresses, stream: int) -> None:
    """Queue copies on a stream that is not the default one.

    Args:
        sources, targets, sizes: [num_ranges], contiguous; bytes.
        stream: The handle of a stream of the GPU that is current.

    Raises:
        RuntimeError: the driver refuses; or it has no such call.
    """
    call = _batched_copy()
    if call is None:
        raise RuntimeError("this driver has no batched copy")
    code = call(targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes), stream)
    if code:
        raise RuntimeError(f"the driver refused a batch of {len(sizes)} copies: CUDA error {code}")
