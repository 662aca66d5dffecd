"""Copy many ranges between GPU and host memory by the GPU's copy engines, in one call of the driver.

The kernel (`kernels/copy_ranges.py`) takes the link's rate too, but with the processors that compute: 40
products of 8192^3 take 65 ms, and 101 beside 2 GiB that the kernel copies from host memory, and 66 beside
the same by an engine, in ranges of 256 KiB and more. Those of 16 KiB come to 4 GB/s by an engine and to 50 by
the kernel, and a call that finds the driver's queue full waits (one H200, 2026-11-21). Between
two GPUs the kernel is several times as fast at any size.

The driver's batched copy is of CUDA 12.8 and later; before that there is the kernel.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

MIN_BYTES = 128 << 10
"""Ranges that are shorter on average go by the kernel."""

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
def _batched_copy() -> Callable[[int, int, int, int, int], int] | None:
    """Return the driver's function of (targets, sources, sizes, count, stream); None: it has none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if driver.cuInit(0):  # a driver whose GPUs are hidden from this process
        return None
    # From 13.0 on it does not say which copy failed, and has another name.
    is_newer = hasattr(driver, "cuMemcpyBatchAsync_v2")
    if not is_newer and not hasattr(driver, "cuMemcpyBatchAsync"):
        return None
    function = driver.cuMemcpyBatchAsync_v2 if is_newer else driver.cuMemcpyBatchAsync
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    failed = () if is_newer else (ctypes.byref(size()),)
    function.argtypes = [pointer] * 3 + [size] + [pointer] * 2 + [size] + [pointer] * len(failed) + [pointer]
    attributes = _Attributes(_IN_STREAM_ORDER, _Location(), _Location(), _BESIDE_COMPUTING)
    from_first = (size * 1)(0)

    def call(targets: int, sources: int, sizes: int, count: int, stream: int) -> int:
        code: int = function(
            targets, sources, sizes, count, ctypes.byref(attributes), from_first, 1, *failed, stream
        )
        return code

    return call


@functools.cache
def _copy_to_device() -> Callable[[int, int, int, int], int]:
    function = ctypes.CDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2
    function.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return function


def to_device(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Queue one copy from pinned host memory. A tensor's `copy_` wants the stream made current before.

    Raises:
        RuntimeError: the driver refuses.
    """
    code = _copy_to_device()(target, source, num_bytes, stream)
    if code:
        raise RuntimeError(f"the driver refused to copy {num_bytes} bytes: CUDA error {code}")


def suits(num_bytes: int, num_ranges: int) -> bool:
    """Return whether so many bytes in so many ranges should be copied by `copy`, and can be."""
    return num_bytes >= MIN_BYTES * num_ranges and _batched_copy() is not None


def copy(sources: int, targets: int, sizes: int, count: int, stream: int) -> None:
    """Queue copies on a stream that is not the default one.

    Args:
        sources, targets, sizes: Where arrays of `count` numbers of 64 bits begin.
        stream: The handle of a stream of the GPU that is current.

    Raises:
        RuntimeError: the driver refuses; or it has no such call.
    """
    call = _batched_copy()
    if call is None:
        raise RuntimeError("this driver has no batched copy")
    code = call(targets, sources, sizes, count, stream)
    if code:
        raise RuntimeError(f"the driver refused a batch of {count} copies: CUDA error {code}")
