"""Where a decode step goes, kernel by kernel, as torch's profiler sees it: for `bench.engine --profile`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

from bench.engine_rows import CONTEXT
from bench.engine_work import Driver

STEPS = 8
"""Steps that are profiled, after one that is not counted by itself."""

MOST_KERNELS = 24
"""Kernels that are listed, those that take longest."""

Span = tuple[float, float, str]
"""Begin and end in microseconds, and name of what ran."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """What a step spends in one kernel."""

    name: str
    count: float
    """Launches in a step."""
    us: float
    """Microseconds of all of them."""


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A step of decoding, in the mean."""

    batch: int
    step_us: float
    busy: float
    """Share of the step in which at least one kernel ran."""
    kernels: list[KernelTime]


async def step_profile(driver: Driver, batch: int) -> StepProfile:
    """Return where a decode step of `batch` sequences goes."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        await driver.decode_step_s(batch, CONTEXT, STEPS)
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in seen.events()
        if event.device_type.name == "CUDA"
    ]
    return summed(spans, batch, STEPS + 1)


def summed(spans: Iterable[Span], batch: int, steps: int) -> StepProfile:
    """Return what spans of `steps` steps say of one."""
    ordered = sorted(spans)
    counts: dict[str, int] = {}
    times: dict[str, float] = {}
    busy = 0.0
    end = ordered[0][0]
    for began, ended, name in ordered:
        short = short_name(name)
        counts[short] = counts.get(short, 0) + 1
        times[short] = times.get(short, 0.0) + ended - began
        busy += max(0.0, ended - max(began, end))
        end = max(end, ended)
    whole = end - ordered[0][0]
    longest = sorted(times, key=times.__getitem__, reverse=True)[:MOST_KERNELS]
    kernels = [
        KernelTime(name, round(counts[name] / steps, 2), round(times[name] / steps, 2)) for name in longest
    ]
    return StepProfile(batch, round(whole / steps, 1), round(busy / whole, 4), kernels)


def short_name(name: str) -> str:
    """Return a kernel's name without what a reader has no use for: return types, templates, arguments."""
    bare = re.sub(r"<.*|\(.*", "", re.sub(r"^(void|static void) ", "", name))
    return bare.rpartition("::")[2][:60] or name[:60]
