"""Connections that ask nothing make room for others, the oldest first, and those at work for nobody."""

import resource

import pytest

from base.arrivals import MAX_CONNECTIONS, OpenConnections, num_allowed


class Connection:
    is_aborted = False

    def abort(self):
        self.is_aborted = True


def arrived(arrivals, count):
    connections = [Connection() for _ in range(count)]
    for connection in connections:
        arrivals.came(connection)
    return connections


def test_the_oldest_that_asks_nothing_makes_room():
    arrivals = OpenConnections(3)
    connections = arrived(arrivals, 5)
    assert [connection.is_aborted for connection in connections] == [True, True, False, False, False]
    assert len(arrivals) == 3


def test_who_is_at_work_keeps_its_place_and_gives_it_up_when_answered():
    arrivals = OpenConnections(2)
    first, second = arrived(arrivals, 2)
    arrivals.begun(first)
    (third,) = arrived(arrivals, 1)
    assert (first.is_aborted, second.is_aborted, third.is_aborted) == (False, True, False)
    arrivals.begun(third)
    (fourth,) = arrived(arrivals, 1)
    assert fourth.is_aborted
    arrivals.ended(first)
    arrived(arrivals, 1)
    assert first.is_aborted
    assert not third.is_aborted


def test_who_is_gone_counts_no_more():
    arrivals = OpenConnections(2)
    first, second = arrived(arrivals, 2)
    arrivals.begun(second)
    arrivals.gone(first)
    arrivals.gone(second)
    arrivals.ended(second)
    assert len(arrivals) == 0


@pytest.mark.parametrize(
    ("soft", "expected"), [(600, 300), (1 << 20, MAX_CONNECTIONS), (resource.RLIM_INFINITY, MAX_CONNECTIONS)]
)
def test_a_listener_has_a_part_of_the_descriptors(soft, expected, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda which: (soft, soft))
    assert num_allowed(0.5) == expected
