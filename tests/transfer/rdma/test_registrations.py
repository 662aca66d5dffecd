"""What rails have registered of a segment, how near they are, and what peers are told of it."""

import pytest

from base.errors import TransferFailedError
from transfer.owned import segment as segments
from transfer.rdma.registrations import Reach, Registrations, unpack_reach
from transfer.rdma.topology import UNREACHED, Distance, Place
from transfer.rdma.verbs import MAX_RAILS

SEGMENT = segments.over(7, bytearray(64))
NODES = [Place(frozenset({node})) for node in (0, 1)]


class FakeRail:
    def __init__(self, name: str, place: Place, key: int) -> None:
        self.name = name
        self.place = place
        self.key = key
        self.refuses = False
        self.asked = 0

    def keys(self, segment: segments.Segment) -> tuple[int, int]:
        self.asked += 1
        if self.refuses:
            raise TransferFailedError(f"{self.name}: no memory may be locked")
        return self.key, self.key + 100


@pytest.fixture
def rails() -> list[FakeRail]:
    return [FakeRail("a", NODES[0], 1), FakeRail("b", NODES[1], 2)]


@pytest.fixture
def registrations(rails: list[FakeRail]) -> Registrations:
    return Registrations(rails, lambda device: NODES[1])


def test_each_side_gets_its_own_keys_with_the_rails_distances(registrations: Registrations) -> None:
    distances = (Distance.ANY, Distance.NODE)
    assert registrations.local(SEGMENT) == Reach(SEGMENT.address, (1, 2), distances)
    assert registrations.remote(SEGMENT) == Reach(SEGMENT.address, (101, 102), distances)


def test_a_segment_is_registered_once(registrations: Registrations, rails: list[FakeRail]) -> None:
    for _ in range(3):
        registrations.local(SEGMENT)
        registrations.remote(SEGMENT)
    assert [rail.asked for rail in rails] == [1, 1]


def test_a_rail_that_refuses_is_left_out(registrations: Registrations, rails: list[FakeRail]) -> None:
    rails[1].refuses = True
    assert registrations.local(SEGMENT).distances == (Distance.ANY, UNREACHED)


def test_when_every_rail_refuses_each_says_why(registrations: Registrations, rails: list[FakeRail]) -> None:
    for rail in rails:
        rail.refuses = True
    with pytest.raises(TransferFailedError, match=r"a: no memory .*; b: no memory"):
        registrations.remote(SEGMENT)
    rails[0].refuses = False
    assert registrations.remote(SEGMENT).distances == (Distance.ANY, UNREACHED)


def test_a_peer_reads_what_was_packed_and_that_there_are_no_more_rails(registrations: Registrations) -> None:
    reach = registrations.remote(SEGMENT)
    data = reach.pack()
    assert len(data) == Reach.PACKED_BYTES
    missing = MAX_RAILS - 2
    assert unpack_reach(data) == Reach(
        reach.address, reach.keys + (0,) * missing, reach.distances + (UNREACHED,) * missing
    )


def test_a_distance_that_nobody_knows_is_far() -> None:
    told = Reach(0, (0,) * MAX_RAILS, (77,) * MAX_RAILS)
    assert unpack_reach(told.pack()).distances == (Distance.ANY,) * MAX_RAILS
