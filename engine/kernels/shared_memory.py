"""The memory that the programs of a kernel share, by which launchers choose how many loads are under way."""

from __future__ import annotations

from functools import cache

import torch


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may have; none where there is no GPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
