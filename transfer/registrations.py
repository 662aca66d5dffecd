"""Which rails reach which of our segments: registered where, by which keys, and how near.

Owned by the agent, used by both sides of the rdma transport on their threads: what is found
twice at once is the same. A rail that refuses a segment is left out of it; only a segment that
every rail refuses is unreachable.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from base.errors import TransferFailedError
from transfer.rdma import MAX_RAILS, Rail
from transfer.segment import Segment
from transfer.topology import UNREACHED, Distance, Place, distance, host_place, told

_REACH = struct.Struct(f"<Q{MAX_RAILS}I{MAX_RAILS}B")
_KNOWN = frozenset({*Distance, UNREACHED})


@dataclass(frozen=True, slots=True)
class Reach:
    """One segment as NICs address it."""

    PACKED_BYTES = _REACH.size

    address: int
    """Of its first byte, in work requests."""
    keys: tuple[int, ...]
    """One for each rail, of its own side or for the peer's."""
    distances: tuple[int, ...]
    """Of each rail: a `Distance`, or UNREACHED."""

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


def memory_place(device: int | None) -> Place:
    """Return where memory of this process lies: of the host, or of a CUDA device."""
    return host_place() if device is None else Place()


class Registrations:
    """Knows the rails of this process, and what they have registered of its segments."""

    def __init__(self, rails: Sequence[Rail], place_of: Callable[[int | None], Place] = memory_place) -> None:
        self.rails = tuple(rails)
        self._place_of = place_of
        self._distances: dict[int | None, tuple[Distance, ...]] = {}
        self._reaches: dict[int, tuple[Reach, Reach]] = {}

    def local(self, segment: Segment) -> Reach:
        """Return how our NICs address a segment of ours; raises TransferFailedError if none does."""
        return self._reach(segment)[0]

    def remote(self, segment: Segment) -> Reach:
        """Return how peers' NICs address a segment of ours; raises as `local`."""
        return self._reach(segment)[1]

    def told(self, device: int | None) -> str:
        """Return which rails are near our memory on `device` and which stand by, in one line."""
        return told([rail.name for rail in self.rails], self._distances_to(device))

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
        keys: list[tuple[int, int]] = []
        distances: list[int] = []
        refusals = []
        for rail, near in zip(self.rails, self._distances_to(segment.device), strict=True):
            try:
                keys.append(rail.keys(segment))
                distances.append(near)
            except TransferFailedError as error:
                refusals.append(str(error))
                keys.append((0, 0))
                distances.append(UNREACHED)
        if len(refusals) == len(self.rails):
            raise TransferFailedError("; ".join(refusals))
        local, remote = zip(*keys, strict=True)
        return Reach(segment.address, local, tuple(distances)), Reach(
            segment.address, remote, tuple(distances)
        )

    def _distances_to(self, device: int | None) -> tuple[Distance, ...]:
        known = self._distances.get(device)
        if known is None:
            place = self._place_of(device)
            known = self._distances[device] = tuple(distance(rail.place, place) for rail in self.rails)
        return known
