"""The table of grants, by example and by random histories."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from base.errors import CapacityError, LeaseExpiredError, ProtocolError, StaleError
from base.grants import Grant, Operation
from tests.manual_clock import ManualClock
from transfer.owned.grant import GrantTable

SEGMENT = 7


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def table(clock: ManualClock) -> GrantTable:
    return GrantTable(clock, num_slots=4)


def issue(table: GrantTable, offsets: tuple[int, ...] = (0, 100), lease_s: float = 5.0) -> Grant:
    return table.issue(SEGMENT, Operation.WRITE, offsets, 50, lease_s)


def check(
    table: GrantTable,
    generation: int,
    offset: int,
    length: int,
    operation: Operation = Operation.WRITE,
    segment_id: int = SEGMENT,
) -> None:
    """Ask for one range."""
    table.check(segment_id, generation, operation, np.array([offset]), np.array([length]))


@pytest.mark.parametrize(("offset", "length"), [(0, 50), (100, 50), (10, 5), (149, 1)])
def test_what_lies_inside_a_granted_range_is_allowed(table: GrantTable, offset: int, length: int) -> None:
    check(table, issue(table).generation, offset, length)


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (50, 1),
        (0, 51),
        (99, 2),
        (149, 2),
        (150, 1),
        (0, 0),
        (10, -1),
        (-1, 1),
        (-(1 << 63), 1),
        (0, (1 << 63) - 1),
        (149, (1 << 63) - 1),
    ],
)
def test_a_byte_outside_every_granted_range_is_refused(table: GrantTable, offset: int, length: int) -> None:
    generation = issue(table).generation
    with pytest.raises(ProtocolError, match="outside"):
        check(table, generation, offset, length)


def test_a_run_over_granted_neighbours_is_allowed_at_once(table: GrantTable) -> None:
    grant = issue(table, offsets=(100, 0, 50))
    check(table, grant.generation, 0, 150)


def test_a_grant_to_write_does_not_allow_to_read(table: GrantTable) -> None:
    with pytest.raises(ProtocolError, match="to WRITE, not to READ"):
        check(table, issue(table).generation, 0, 1, Operation.READ)


def test_a_grant_holds_on_its_own_segment_alone(table: GrantTable) -> None:
    with pytest.raises(ProtocolError, match="segment"):
        check(table, issue(table).generation, 0, 1, segment_id=SEGMENT + 1)


def test_a_generation_that_was_guessed_is_stale(table: GrantTable) -> None:
    grant = issue(table)
    for guess in (0, grant.generation ^ 1 << 20, grant.generation + 1, (1 << 64) - 1):
        with pytest.raises(StaleError):
            check(table, guess, 0, 1)


def test_a_revoked_grant_is_stale_also_when_its_slot_is_used_again(table: GrantTable) -> None:
    revoked = issue(table).generation
    table.revoke(revoked)
    for _ in range(5):
        with pytest.raises(StaleError):
            check(table, revoked, 0, 1)
        table.retire(revoked)
        other = issue(table).generation
        table.revoke(other)
        table.retire(other)


def test_a_lease_that_ran_out_is_told_from_a_revocation(table: GrantTable, clock: ManualClock) -> None:
    generation = issue(table, lease_s=5.0).generation
    clock.advance(5.0)
    with pytest.raises(LeaseExpiredError):
        check(table, generation, 0, 1)
    assert table.expire() == [generation]
    with pytest.raises(LeaseExpiredError):
        check(table, generation, 0, 1)


def test_slots_of_ended_grants_are_not_used_before_they_are_retired(table: GrantTable) -> None:
    generations = [issue(table).generation for _ in range(4)]
    table.revoke(generations[0])
    with pytest.raises(CapacityError):
        issue(table)
    table.retire(generations[0])
    issue(table)
    table.check_invariant()


def test_a_generation_is_not_drawn_twice_in_a_row_for_one_slot(clock: ManualClock) -> None:
    draws = iter([0, 5, 5, 5, 9])
    table = GrantTable(clock, num_slots=1, random_bits=lambda bits: next(draws))
    first = issue(table).generation
    table.revoke(first)
    table.retire(first)
    assert (first >> 16, issue(table).generation >> 16) == (5, 9)


def test_a_drawn_zero_marks_no_grant_in_any_slot(clock: ManualClock) -> None:
    asked: list[int] = []
    draws = iter([5, 0, 9])

    def drawn(bits: int) -> int:
        asked.append(bits)
        return next(draws)

    table = GrantTable(clock, num_slots=2, random_bits=drawn)
    assert [issue(table).generation >> 16 for _ in range(2)] == [5, 9]
    assert set(asked) == {48}


@pytest.mark.parametrize("num_slots", [0, 65_537])
def test_a_table_has_as_many_slots_as_a_generation_can_name(clock: ManualClock, num_slots: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 65536"):
        GrantTable(clock, num_slots)
    assert GrantTable(clock, 65_536).num_live == 0


@pytest.mark.parametrize(
    ("offsets", "length", "lease_s"), [((), 1, 1.0), ((0,), 0, 1.0), ((0,), 1, 0.0), ((0,), -1, 1.0)]
)
def test_a_grant_of_nothing_or_for_no_time_is_refused(
    table: GrantTable, offsets: tuple[int, ...], length: int, lease_s: float
) -> None:
    with pytest.raises(ValueError, match="a range, a length and a lease"):
        table.issue(SEGMENT, Operation.WRITE, offsets, length, lease_s)
    assert table.issue(SEGMENT, Operation.WRITE, (0,), 1, 1.0).length == 1


def test_who_asks_for_a_grant_alone_is_told_that_it_ended(table: GrantTable, clock: ManualClock) -> None:
    generation = issue(table, lease_s=5.0).generation
    table.require_live(generation)
    clock.advance(5.0)
    with pytest.raises(LeaseExpiredError):
        table.require_live(generation)


def test_a_slot_that_the_table_does_not_have_is_stale(table: GrantTable) -> None:
    with pytest.raises(StaleError):
        table.require_live(1 << 16 | 4)


def test_the_next_expiry_is_that_of_the_shortest_lease_and_never_past(
    table: GrantTable, clock: ManualClock
) -> None:
    assert table.next_expiry_in_s() is None
    clock.advance(10.0)
    issue(table, lease_s=5.0)
    issue(table, lease_s=3.0)
    assert table.next_expiry_in_s() == 3.0
    clock.advance(4.0)
    assert table.next_expiry_in_s() == 0.0


def test_a_grant_is_retired_only_when_it_has_ended_and_was_let_go(table: GrantTable) -> None:
    generation = issue(table).generation
    assert not table.is_retired(generation)
    assert table.revoke(generation)
    assert not table.revoke(generation)
    assert not table.is_retired(generation)
    table.retire(generation)
    assert table.is_retired(generation)


class GrantHistory(RuleBasedStateMachine):
    """Whatever is done in whatever order: live ones pass, no other ever does."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.table = GrantTable(self.clock, num_slots=5, random_bits=random.Random(1).getrandbits)
        self.expiry: dict[int, float] = {}
        self.dead: list[int] = []

    def pick(self, index: int) -> int | None:
        known = [*self.expiry, *self.dead]
        return known[index % len(known)] if known else None

    @rule(lease_s=st.integers(1, 5))
    def issue(self, lease_s: int) -> None:
        try:
            generation = issue(self.table, lease_s=lease_s).generation
        except CapacityError:
            assert self.table.num_live + self.table.num_ended == 5
        else:
            assert generation not in self.expiry
            assert generation not in self.dead
            self.expiry[generation] = self.clock.now_s() + lease_s

    @rule(index=st.integers(0, 20))
    def revoke(self, index: int) -> None:
        generation = self.pick(index)
        if generation is not None:
            self.table.revoke(generation)
            if self.expiry.pop(generation, None) is not None:
                self.dead.append(generation)

    @rule(index=st.integers(0, 20))
    def retire(self, index: int) -> None:
        generation = self.pick(index)
        if generation is not None:
            self.table.retire(generation)

    @rule(seconds=st.integers(0, 3))
    def pass_time(self, seconds: int) -> None:
        self.clock.advance(seconds)
        due = [each for each, at_s in self.expiry.items() if at_s <= self.clock.now_s()]
        assert sorted(self.table.expire()) == sorted(due)
        for generation in due:
            del self.expiry[generation]
            self.dead.append(generation)

    @invariant()
    def only_live_grants_pass(self) -> None:
        self.table.check_invariant()
        for generation in self.expiry:
            check(self.table, generation, 0, 1)
        for generation in self.dead:
            with pytest.raises((StaleError, LeaseExpiredError)):
                check(self.table, generation, 0, 1)


TestGrantHistory = GrantHistory.TestCase
TestGrantHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
