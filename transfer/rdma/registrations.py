"""Registrations of our segments with our rails: by which keys, and how near each rail is.

Owned by the agent, used by both sides of the rdma transport on their threads: what is found
twice at once is the same. A rail that refuses a segment is left out of it; only a segment that
every rail refuses is unreachable. Of a GPU's memory that is remembered: to try again takes a
call of two drivers, and they would say the same.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from base.errors import TransferFailedError
from transfer.owned.segment import Segment
from transfer.rdma.dma_buf import CudaDriver
from transfer.rdma.topology import UNREACHED, Distance, Place, distance, gpu_place, host_place
from transfer.rdma.verbs import MAX_RAILS, NO_DMA_BUF, Rail, address_of

_REACH = struct.Struct(f"<Q{MAX_RAILS}I{MAX_RAILS}B")
_KNOWN = frozenset({*Distance, UNREACHED})


@dataclass(frozen=True, slots=True)
class Reach:
    """One segment as NICs address it."""

    PACKED_BYTES = _REACH.size

    address: int
    """Address of its first byte in work requests."""
    keys: tuple[int, ...]
    """Key for each rail: our own, or the one that the peer uses."""
    distances: tuple[int, ...]
    """Distance of each rail: a `Distance`, or UNREACHED."""

    def pack(self) -> bytes:
        """Return its wire form: rails that there are not are not reached."""
        missing = MAX_RAILS - len(self.keys)
        return _REACH.pack(
            self.address, *self.keys, *(0,) * missing, *self.distances, *(UNREACHED,) * missing
        )


def unpack_reach(data: bytes) -> Reach:
    """Return what a peer packed."""
    address, *rest = _REACH.unpack(data)
    distances = (each if each in _KNOWN else Distance.ANY for each in rest[MAX_RAILS:])
    return Reach(address, tuple(rest[:MAX_RAILS]), tuple(distances))


def memory_place(driver: CudaDriver, device: int | None) -> Place:
    """Return where memory of this process lies: of the host, or of a CUDA device."""
    if device is None:
        return host_place()
    bus_id = driver.bus_id_or_none(device)
    return Place() if bus_id is None else gpu_place(bus_id)


def device_refusal_or_none(driver: CudaDriver, device: int) -> str | None:
    """Return why no NIC can register memory of a device, as far as can be known without one."""
    return NO_DMA_BUF or driver.refusal_or_none(device)


class Registrations:
    """Knows the rails of this process, and what they have registered of its segments."""

    def __init__(
        self,
        rails: Sequence[Rail],
        place_of: Callable[[int | None], Place],
        refusal_of: Callable[[int], str | None] = lambda device: None,
    ) -> None:
        """`place_of`: where memory lies; `refusal_of`: why no NIC can register memory of a device."""
        self.rails = tuple(rails)
        self._place_of = place_of
        self._refusal_of = refusal_of
        self._distances: dict[int | None, tuple[Distance, ...]] = {}
        self._reaches: dict[int, tuple[Reach, Reach]] = {}
        self._refused: dict[int, str] = {}
        self._refused_of: dict[int, str] = {}

    def refusal_or_none(self, device: int | None) -> str | None:
        """Return why our memory on `device` cannot be reached; None: it is the host's, or may be tried."""
        if device is None:
            return None
        return self._refusal_of(device) or self._refused_of.get(device)

    def local(self, segment: Segment) -> Reach:
        """Return how our NICs address a segment of ours; raises TransferFailedError if none does."""
        return self._reach(segment)[0]

    def remote(self, segment: Segment) -> Reach:
        """Return how peers' NICs address a segment of ours; raises as `local`."""
        return self._reach(segment)[1]

    def close(self) -> None:
        """Give the rails back."""
        for rail in self.rails:
            rail.close()

    def _reach(self, segment: Segment) -> tuple[Reach, Reach]:
        known = self._reaches.get(segment.segment_id)
        if known is None:
            known = self._reaches[segment.segment_id] = self._registered(segment)
        return known

    def _registered(self, segment: Segment) -> tuple[Reach, Reach]:
        device = segment.device
        if device is not None:
            refusal = self._refused.get(segment.segment_id) or self._refusal_of(device)
            if refusal:
                raise TransferFailedError(refusal)
        keys: list[tuple[int, int]] = []
        distances: list[int] = []
        refusals = []
        for rail, near in zip(self.rails, self._distances_to(device), strict=True):
            try:
                keys.append(rail.keys(segment))
                distances.append(near)
            except TransferFailedError as error:
                refusals.append(str(error))
                keys.append((0, 0))
                distances.append(UNREACHED)
        if len(refusals) == len(self.rails):
            refusal = "; ".join(refusals)
            if device is not None:
                self._refused[segment.segment_id] = self._refused_of[device] = refusal
            raise TransferFailedError(refusal)
        if device is not None:
            self._refused_of.pop(device, None)
        (local, remote), address = zip(*keys, strict=True), address_of(segment)
        return Reach(address, local, tuple(distances)), Reach(address, remote, tuple(distances))

    def _distances_to(self, device: int | None) -> tuple[Distance, ...]:
        known = self._distances.get(device)
        if known is None:
            place = self._place_of(device)
            known = self._distances[device] = tuple(distance(rail.place, place) for rail in self.rails)
        return known
