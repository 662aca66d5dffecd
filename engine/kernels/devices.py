"""Facts of a device by which launchers choose: its capability, and the shared memory of a program."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TypeVar

import torch
import triton.language as tl

HOPPER = (9, 0)
KIB = 1024
Launch = TypeVar("Launch")

NATIVE = tl.constexpr(torch.cuda.is_available())
"""Whether kernels run on a GPU, in whose instructions a part of some is."""


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; (0, 0) where there is none."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def largest_of(launches: Mapping[int, Launch], like: torch.Tensor) -> Launch:
    """Return the first launch whose shared memory a program has on a tensor's device; the last if none fits.

    Args:
        launches: By the bytes that they take of numbers of 16 bits, the most first.
    """
    most = shared_memory_bytes(like.device) * 2 // like.element_size()
    return next((launch for size, launch in launches.items() if size <= most), [*launches.values()][-1])


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may have; none where there is no GPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
