"""Facts of a device by which launchers choose: its capability, and the shared memory of a program."""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl

HOPPER = (9, 0)

NATIVE = tl.constexpr(torch.cuda.is_available())
"""Whether kernels run on a GPU, in whose instructions a part of some is."""


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; (0, 0) where there is none."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may have; none where there is no GPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
