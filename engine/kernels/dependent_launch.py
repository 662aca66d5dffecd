"""Kernels that are launched while the one before them ends (programmatic dependent launch, from Hopper on).

A step of decoding is some four hundred kernels of a few microseconds, and each would be launched when the one
before it has ended. Here it is resident by then, has computed what follows from its arguments, and waits for
the other's results alone. An 8B model at one and at eight sequences, ms on H200s, without / with:

    weights of 4 bits   2.51/2.19   2.84/2.55
    bfloat16            4.52/4.30   4.98/4.73

Every kernel waits first, and lets the next one come after that: so all kernels but the last one have ended
when a kernel begins, whether it waits or not. The compiler's own keep the same rule (`compiled.py`). It comes
as the loop over a weight ends: in one run that took 0.92 to 0.99 of the time of coming at once. To have the
weight's first tiles brought into the cache before the wait gained nothing. Kernels of experts and latents are
launched as ever, but for the join of parts: what they would gain was not measured.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from engine.kernels.devices import HOPPER, capability


@cache
def overlapping(device: torch.device) -> dict[str, bool]:
    """Return the launch options, by name, of a kernel that takes `OVERLAPS`."""
    if capability(device) < HOPPER:
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}


@triton.jit
def _await_inputs(OVERLAPS: tl.constexpr):
    """Wait until everything that earlier kernels wrote can be read, and may be written over."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _launch_next(OVERLAPS: tl.constexpr):
    """Let the next kernel be launched as soon as all programs of this one came here or ended."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
