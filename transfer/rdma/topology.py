"""Distances between NICs and memory, from what Linux shows in sysfs.

Where a device is plugged in is its path below `/sys/devices`: the root complex, its root port, the
bridges of switches, the device. Distances are the classes that `nvidia-smi topo` shows too:

    SWITCH    meet at one PCIe switch, or are one card         PIX
    SWITCHES  behind one root port, through several switches   PXB
    ROOT      under one root complex                           PHB
    NODE      at one memory node (NUMA)                        NODE
    ANY       elsewhere, or nobody knows                       SYS

Host memory has no path: a NIC of one of its nodes is at NODE, every other at ANY. So NICs of which
nothing is known (node -1, no PCI device, as software NICs have none) are all alike.

The rule: a batch goes by the rails for which the distances at both ends add up to the least, striped
over ties. Farther ones stand by and carry it when none of the nearer is usable. Weighed and left: work
for all rails in shares by distance. What crosses the link between processors' sockets takes its rate
from all memory traffic there, and a batch ends when its slowest rail does.
"""

from __future__ import annotations

import enum
import functools
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from transfer.owned.host_memory import memory_nodes, policy_or_none

SYSFS = Path("/sys")
UNREACHED = 255
"""Stands for a distance where a rail has not registered the memory."""
_ROOT_COMPLEX = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")

Tiers = tuple[tuple[int, ...], ...]
"""Numbers of rails, those of equal distance together, nearest first."""


class Distance(enum.IntEnum):
    """Distance between a NIC and memory. Distances add up: two ends at the same switch beat anything else."""

    SWITCH = 0
    SWITCHES = 1
    ROOT = 2
    NODE = 3
    ANY = 4


_REASONS = {
    Distance.SWITCH: "same PCIe switch",
    Distance.SWITCHES: "same PCIe root port",
    Distance.ROOT: "same PCIe root",
    Distance.NODE: "same NUMA node",
    Distance.ANY: "no nearer is known",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device is plugged in, or memory lies."""

    nodes: frozenset[int] = frozenset()
    """Memory nodes; empty: not known."""
    path: tuple[str, ...] = ()
    """PCI devices from the root complex down; empty: not on PCI, or not known."""


def distance(nic: Place, memory: Place) -> Distance:
    """Return how near a NIC is to memory."""
    pairs = zip(nic.path, memory.path, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    # Below a port of the switch where they meet there is nothing but the device.
    if shared > 1 and max(len(nic.path), len(memory.path)) - shared <= 2:
        return Distance.SWITCH
    if shared:
        return Distance.SWITCHES if shared > 1 else Distance.ROOT
    return Distance.ANY if nic.nodes.isdisjoint(memory.nodes) else Distance.NODE


@functools.lru_cache(256)
def tiers(ours: Sequence[int], theirs: Sequence[int]) -> Tiers:
    """Return the rails that reach the memory at both ends, by the sum of their distances.

    Args:
        ours, theirs: For each rail, of which the shorter has as many as connect: a `Distance`, or
            UNREACHED. Tuples, because answers are remembered.
    """
    sums: dict[int, list[int]] = {}
    for rail, (near, far) in enumerate(zip(ours, theirs, strict=False)):
        if UNREACHED not in (near, far):
            sums.setdefault(near + far, []).append(rail)
    return tuple(tuple(sums[total]) for total in sorted(sums))


def described_choice(names: Sequence[str], distances: Sequence[int]) -> str:
    """Return in one line which of the named rails are nearest, why, and which stand by."""
    ranked = tiers(tuple(distances), (0,) * len(names))
    if not ranked:
        return "no rail"
    nearest, *others = (", ".join(names[rail] for rail in tier) for tier in ranked)
    why = _REASONS[Distance(distances[ranked[0][0]])]
    return f"{nearest} ({why})" + (f"; {', '.join(others)} stand by" if others else "")


def nic_place(name: str, root: Path = SYSFS) -> Place:
    """Return where an RDMA device is plugged in."""
    return _place(root / "class/infiniband" / name / "device")


def gpu_place(bus_id: str, root: Path = SYSFS) -> Place:
    """Return where the GPU of a PCI bus id (`0000:3b:00.0`, in any case of letters) is plugged in."""
    return _place(root / "bus/pci/devices" / bus_id.lower())


def host_place(root: Path = SYSFS) -> Place:
    """Return where host memory of this process lies, as `owned/host_memory.py` places it."""
    nodes = memory_nodes(root / "devices/system/node")
    policy = policy_or_none(nodes, os.sched_getaffinity(0))
    return Place() if policy is None else Place(frozenset(policy.nodes))


def active_nics(root: Path = SYSFS) -> dict[str, Place]:
    """Return the RDMA devices of this host whose first port is active, without asking the driver."""
    found = {}
    for device in sorted((root / "class/infiniband").glob("*")):
        if _text(device / "ports/1/state").startswith("4:"):
            found[device.name] = nic_place(device.name, root)
    return found


def gpus(root: Path = SYSFS) -> dict[str, Place]:
    """Return the GPUs of this host that CUDA may use, by their PCI bus ids."""
    return {
        device.name: gpu_place(device.name, root)
        for device in sorted((root / "bus/pci/devices").glob("*"))
        if _text(device / "vendor") == _NVIDIA and _text(device / "class").startswith(_GPU_CLASSES)
    }


def overview(root: Path = SYSFS) -> Iterable[str]:
    """Yield a line for host memory and for each GPU: which NICs carry its bytes. Without NICs, nothing."""
    nics = active_nics(root)
    if not nics:
        return
    memories = {"host memory": host_place(root)} | {
        f"GPU {name}": place for name, place in gpus(root).items()
    }
    for name, place in memories.items():
        yield f"{name}: {described_choice(tuple(nics), [distance(nic, place) for nic in nics.values()])}"


def _place(device: Path) -> Place:
    try:
        parts = device.resolve(strict=True).parts
    except (OSError, RuntimeError):
        return Place()
    first = next((at for at, part in enumerate(parts) if _ROOT_COMPLEX.fullmatch(part)), len(parts))
    node = -1
    with suppress(ValueError):
        node = int(_text(device / "numa_node"))
    return Place(frozenset((node,) if node >= 0 else ()), parts[first:])


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
