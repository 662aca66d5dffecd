"""A segment: contiguous memory of this process that grants can be given on.

Allocated segments are anonymous shared memory (memfd). It has no name, so there is
nothing to unlink: the kernel frees it when the last process that maps it is gone,
however it went. A peer of the same user on the same host opens it by /proc/PID/fd,
which POSIX shared memory could offer only by leaking its file when we are killed.
Where its pages lie: `host_memory.py`.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from transfer.owned import host_memory
from transfer.owned.device_access import DeviceAccess


@dataclass(frozen=True, slots=True)
class Segment:
    """Owner's side of registered memory. Two are equal if they are the same one."""

    segment_id: int
    memory: memoryview
    """Writable, contiguous, format B."""
    address: int
    """Address of the first byte in this process."""
    shared_fd: int | None
    """The memfd behind it; None: private memory, which only copies over a wire reach."""
    num_bytes: int
    device: int | None = None
    """The CUDA device that the memory is on; None: host memory. `memory` is empty then, and
    the memfd holds what peers import it by."""
    access: DeviceAccess | None = None
    """Copies to and from that device."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a GPU, as `transfer/gpu/transport.py` describes it to the rest."""

    address: int
    num_bytes: int
    device: int
    handle: bytes
    """Description by which a process of the same host imports it."""
    access: DeviceAccess


def allocate_shared(segment_id: int, num_bytes: int) -> Segment:
    """Return a new zeroed segment of shared memory.

    Raises:
        ValueError: `num_bytes` is not positive.
        OSError: no descriptor or no memory is left.
    """
    if num_bytes <= 0:
        raise ValueError(f"a segment has at least one byte, not {num_bytes}")
    fd, pages = host_memory.mapped("conductor-segment", num_bytes)
    memory = memoryview(pages)[:num_bytes]
    host_memory.place(address_of(memory), num_bytes)
    return Segment(segment_id, memory, address_of(memory), fd, num_bytes)


def over(segment_id: int, memory: memoryview | bytearray) -> Segment:
    """Return a segment over existing memory, which must stay where it is.

    Raises:
        ValueError: the memory is empty, read-only or not contiguous.
    """
    view = memoryview(memory)
    if view.readonly or not view.c_contiguous or view.nbytes == 0:
        raise ValueError("a segment is writable, contiguous and not empty")
    flat = view.cast("B")
    return Segment(segment_id, flat, address_of(flat), None, flat.nbytes)


def on_device(segment_id: int, memory: DeviceMemory) -> Segment:
    """Return a segment over memory of a GPU, which its owner keeps allocated."""
    fd = os.memfd_create("conductor-segment", os.MFD_CLOEXEC)
    os.write(fd, memory.handle)
    nothing = memoryview(b"")
    return Segment(segment_id, nothing, memory.address, fd, memory.num_bytes, memory.device, memory.access)


def release(segment: Segment) -> None:
    """Close the memfd. The pages live on for as long as anybody maps them."""
    if segment.shared_fd is not None:
        os.close(segment.shared_fd)


def address_of(memory: memoryview) -> int:
    """Return the address of the first byte of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
