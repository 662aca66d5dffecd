"""Where the pages of a large segment lie: huge ones, and near the processors that use them.

Both are advice. A kernel that has no huge pages to give, one memory node, or a container
that may not say where its memory goes leave the segment as it is: slower, never wrong. So
none of it is an error, and nothing is logged.

* Huge pages: of the kernel's reserve (`vm.nr_hugepages`) where it has enough; else the kernel
  is asked to make them (`MADV_HUGEPAGE`), which for shared memory it does where
  `/sys/kernel/mm/transparent_hugepage/shmem_enabled` is `advise` or more.
* Memory nodes: a process whose processors are all of one node gets its memory there, as far
  as it goes; one that runs on several gets its pages from all of them in turn, so that no
  node's link carries all copies. Which processors a process has is its operator's choice:
  `numactl`, a cpuset, Kubernetes' topology manager.

Pages are placed when they are first touched, so this comes before that.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NODES = Path("/sys/devices/system/node")
HUGE_BYTES = 2 << 20
"""Size of a huge page, on the architectures that GPUs and NICs are plugged into."""
_MPOL_PREFERRED = 1
_MPOL_INTERLEAVE = 3
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call; there is no other way to it without libnuma."""
_MAX_NODES = 1024


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """The memory nodes that a segment's pages come from."""

    nodes: tuple[int, ...]
    is_spread: bool
    """Whether pages come from all nodes in turn; else from the one, while it has some."""


def memory_nodes(folder: Path = NODES) -> dict[int, frozenset[int]]:
    """Return the processors of each memory node that has any; empty where the kernel does not say."""
    found = {}
    for path in folder.glob("node[0-9]*"):
        with suppress(OSError, ValueError):
            if processors := cpu_list((path / "cpulist").read_text()):
                found[int(path.name.removeprefix("node"))] = processors
    return found


def cpu_list(text: str) -> frozenset[int]:
    """Return the numbers in a list as the kernel writes it (`0-3,8`); raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def policy_or_none(nodes: Mapping[int, Collection[int]], processors: Collection[int]) -> MemoryPolicy | None:
    """Return where memory for a process on `processors` should lie; None: there is no choice."""
    ours = tuple(sorted(node for node, its in nodes.items() if not set(its).isdisjoint(processors)))
    if len(nodes) < 2 or not ours:
        return None
    return MemoryPolicy(ours, is_spread=len(ours) > 1)


def place(address: int, num_bytes: int) -> None:
    """Advise the kernel about untouched memory at a page boundary, as this file says."""
    policy = policy_or_none(memory_nodes(), os.sched_getaffinity(0))
    if policy is not None:
        bind(address, num_bytes, policy)


def bind(address: int, num_bytes: int, policy: MemoryPolicy) -> bool:
    """Ask that untouched pages come from the policy's nodes; return whether the kernel agreed."""
    number = _MBIND.get(platform.machine())
    if number is None or max(policy.nodes) >= _MAX_NODES:
        return False
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    for node in policy.nodes:
        mask[node // 64] |= 1 << node % 64
    mode = _MPOL_INTERLEAVE if policy.is_spread else _MPOL_PREFERRED
    # One more than the bits there are: the kernel takes the count for exclusive.
    length, num_bits = ctypes.c_ulong(num_bytes), ctypes.c_ulong(_MAX_NODES + 1)
    call = ctypes.CDLL(None).syscall
    failed = call(number, ctypes.c_void_p(address), length, mode, ctypes.byref(mask), num_bits, 0)
    return int(failed) == 0


def mapped(name: str, num_bytes: int) -> tuple[int, mmap.mmap]:
    """Return new zeroed shared memory: its memfd, and the mapping; whoever asks closes the memfd.

    Raises:
        OSError: no descriptor or no memory is left.
    """
    if num_bytes >= HUGE_BYTES:
        with suppress(OSError):  # the kernel has too few of them in reserve, or none
            return _mapped(name, -(-num_bytes // HUGE_BYTES) * HUGE_BYTES, os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    fd, memory = _mapped(name, num_bytes, 0)
    if num_bytes >= HUGE_BYTES:
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return fd, memory


def _mapped(name: str, num_bytes: int, flags: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | flags)
    try:
        os.ftruncate(fd, num_bytes)
        return fd, mmap.mmap(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
