"""A GPU's memory as a DMA-BUF: a descriptor by which the kernel lets a NIC's driver reach it.

Straight to the CUDA driver, because what registers memory must not import torch. What it demands:

* The range begins and ends at pages of the host. Memory of a GPU is allocated in pieces of 2 MiB, so
  to round outwards stays within one.
* The calling thread has a context of the device.
* The descriptor may be closed once a NIC has registered the range, which keeps the buffer alive; the
  memory is its owner's to keep.

A GPU whose writes from NICs are not ordered for its own kernels (as the driver says) would need a
flush after each batch, on the owner's side, which a one-sided write does not wake: refused.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_DMA_BUF_SUPPORTED = 124
_WRITES_ORDERING = 118
_ORDERED_FOR_OWNER = 100
_DMA_BUF_FD = 1
_BUS_ID_BYTES = 32


def offset_of(address: int) -> int:
    """Return where memory at an address lies in what is exported."""
    return address % PAGE_BYTES


class CudaDriver:
    """Calls of the CUDA driver. Any thread."""

    def __init__(self, load: Callable[[], Any] = lambda: ctypes.CDLL("libcuda.so.1")) -> None:
        """`load`: returns the driver's library, or raises OSError. Called when a GPU is first asked about."""
        self._load = load
        self._library: Any = None
        self._refusals: dict[int, str | None] = {}

    def refusal_or_none(self, device: int) -> str | None:
        """Return why the memory of a device cannot be exported to NICs; None: nothing is known against it."""
        if device not in self._refusals:
            try:
                self._refusals[device] = self._find_refusal(device)
            except (OSError, RuntimeError) as error:
                self._refusals[device] = str(error)
        return self._refusals[device]

    def bus_id_or_none(self, device: int) -> str | None:
        """Return a device's PCI bus id (`0000:3B:00.0`); None: the driver does not say."""
        name = ctypes.create_string_buffer(_BUS_ID_BYTES)
        try:
            self._call("cuDeviceGetPCIBusId", name, _BUS_ID_BYTES, self._handle(device))
        except (OSError, RuntimeError):
            return None
        return name.value.decode()

    @contextmanager
    def exported(self, device: int, address: int, num_bytes: int) -> Iterator[int]:
        """Have a descriptor of memory of a device, and of pages to either side, for the body.

        Raises:
            RuntimeError: the driver does not export this memory.
            OSError: there is no driver.
        """
        offset = offset_of(address)
        length = -(-(offset + num_bytes) // PAGE_BYTES) * PAGE_BYTES
        fd = ctypes.c_int(-1)
        begin, size = ctypes.c_uint64(address - offset), ctypes.c_size_t(length)
        with self._context(device):
            self._call(
                "cuMemGetHandleForAddressRange",
                ctypes.byref(fd),
                begin,
                size,
                _DMA_BUF_FD,
                ctypes.c_uint64(0),
            )
        try:
            yield fd.value
        finally:
            os.close(fd.value)

    def _find_refusal(self, device: int) -> str | None:
        handle = self._handle(device)
        if not hasattr(self._opened(), "cuMemGetHandleForAddressRange"):
            return "the CUDA driver exports no memory: 11.7 or later is needed"
        if not self._attribute(_DMA_BUF_SUPPORTED, handle):
            return f"GPU {device} exports no DMA-BUF: NVIDIA's open kernel modules are needed"
        if self._attribute(_WRITES_ORDERING, handle) < _ORDERED_FOR_OWNER:
            return f"GPU {device} does not order what NICs write: each batch would need a flush"
        return None

    @contextmanager
    def _context(self, device: int) -> Iterator[None]:
        """Have the device's primary context, which the runtime uses as well, on this thread."""
        handle, context = self._handle(device), ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(context))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", handle)

    def _handle(self, device: int) -> ctypes.c_int:
        handle = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        return handle

    def _attribute(self, number: int, handle: ctypes.c_int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, handle)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._opened(), name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def _opened(self) -> Any:
        if self._library is None:
            self._library = self._load()
        return self._library
