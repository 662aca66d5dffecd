"""The host pool: single situations, then random histories against a naive model."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from base.block_hash import BlockHash
from base.errors import LeaseExpiredError, ProtocolError
from kvstore.eviction import BY_NAME
from kvstore.pool import Accounts, HostPool, PoolLimits
from tests.effort import counting
from tests.manual_clock import ManualClock


def chain_of(path):
    """Block hashes that stand for the prefixes of `path`."""
    return [BlockHash(path[: length + 1].encode().rjust(16, b".")) for length in range(len(path))]


def make_pool(num_blocks, clock=None, policy="lru", **limits):
    return HostPool(num_blocks, BY_NAME[policy], clock or ManualClock(), PoolLimits(**limits))


def store(pool, path, tenant="", checksum=7):
    put = pool.reserve(chain_of(path), tenant, 30.0)
    return pool.commit(put.put_id, [checksum] * len(put.missing))


def test_uncommitted_blocks_are_not_found():
    pool = make_pool(4)
    put = pool.reserve(chain_of("abc"), "", 30.0)
    assert (put.missing, pool.match(chain_of("abc"))) == ((0, 1, 2), 0)
    pool.commit(put.put_id, [1, 2, 3])
    assert pool.match(chain_of("abcd")) == 3
    assert pool.lease(chain_of("ab"), 1.0).checksums == (1, 2)


def test_a_put_that_exists_costs_no_bytes():
    pool = make_pool(4)
    store(pool, "abc")
    assert pool.reserve(chain_of("abcd"), "", 30.0).missing == (3,)
    assert pool.reserve(chain_of("abcd"), "", 30.0).missing == ()


def test_a_chain_longer_than_the_pool_is_stored_as_far_as_it_fits():
    pool = make_pool(3)
    assert store(pool, "abcdef") == chain_of("abc")


def test_a_leased_chain_survives_a_full_pool():
    pool = make_pool(3)
    store(pool, "ab")
    lease = pool.lease(chain_of("ab"), 10.0)
    assert store(pool, "xyz") == chain_of("x")
    pool.end(lease.lease_id)
    store(pool, "xyz")
    assert pool.match(chain_of("ab")) == 0


def test_a_lease_that_ran_out_holds_until_it_is_ended():
    clock = ManualClock()
    pool = make_pool(2, clock)
    store(pool, "ab")
    lease = pool.lease(chain_of("ab"), 10.0)
    clock.advance(11)
    assert pool.expired() == ([], [lease.lease_id])
    assert pool.accounts().held == 2
    pool.end(lease.lease_id)
    pool.end(lease.lease_id)
    assert pool.accounts() == Accounts(free=0, in_transfer=0, cached=2, held=0, total=2)


def test_a_hard_pin_never_runs_out():
    clock = ManualClock()
    pool = make_pool(2, clock)
    store(pool, "a")
    pool.lease(chain_of("a"), math.inf)
    clock.advance(1e9)
    assert pool.expired() == ([], [])


def test_a_put_that_ran_out_cannot_be_committed():
    clock = ManualClock()
    pool = make_pool(2, clock)
    put = pool.reserve(chain_of("ab"), "", 30.0)
    clock.advance(31)
    with pytest.raises(LeaseExpiredError):
        pool.commit(put.put_id, [1, 2])
    assert pool.expired() == ([put.put_id], [])
    pool.abort(put.put_id)
    assert pool.accounts().free == 2


def test_a_commit_with_a_wrong_number_of_checksums_changes_nothing():
    pool = make_pool(2)
    put = pool.reserve(chain_of("ab"), "", 30.0)
    with pytest.raises(ProtocolError):
        pool.commit(put.put_id, [1])
    assert pool.commit(put.put_id, [1, 2]) == chain_of("ab")


def test_a_block_whose_parent_never_came_is_not_stored():
    pool = make_pool(4)
    head = pool.reserve(chain_of("a"), "", 30.0)
    tail = pool.reserve(chain_of("ab"), "", 30.0)
    assert tail.missing == (1,)
    pool.abort(head.put_id)
    assert pool.commit(tail.put_id, [1]) == []
    assert pool.accounts().free == 4


def test_a_tenant_at_its_quota_evicts_its_own_blocks():
    pool = make_pool(4, tenant_quota=0.5)
    store(pool, "ab", tenant="one")
    store(pool, "xyz", tenant="two")
    assert pool.match(chain_of("ab")) == 2
    assert pool.match(chain_of("xyz")) == 2


def test_room_is_taken_from_the_tenant_that_has_most():
    pool = make_pool(4)
    store(pool, "xyz", tenant="two")
    store(pool, "a", tenant="one")
    store(pool, "bc", tenant="three")
    assert pool.match(chain_of("a")) == 1
    assert pool.match(chain_of("xyz")) == 1


def test_to_find_the_tenant_that_has_most_takes_no_look_at_all_of_them_for_each_block():
    """Anybody may name tenants, and a chain has thousands of blocks."""
    pool = make_pool(1_000, high_watermark=0.9, low_watermark=0.1)
    for number in range(1_000):
        store(pool, chr(0x4E00 + number), tenant=f"tenant {number}")
    with counting() as effort:
        put = pool.reserve([BlockHash(number.to_bytes(16, "little")) for number in range(500)], "", 30.0)
        assert len(pool.leave(300)) == 300
    assert len(put.missing) == 500
    assert effort.lines < 100_000


def test_delete_stops_where_another_chain_goes_through():
    pool = make_pool(5)
    store(pool, "abc")
    store(pool, "abx")
    assert pool.delete(chain_of("abc")) == chain_of("abc")[2:]
    assert pool.match(chain_of("abx")) == 3


def test_delete_leaves_what_is_held():
    pool = make_pool(5)
    store(pool, "abc")
    pool.lease(chain_of("ab"), 10.0)
    assert pool.delete(chain_of("abc")) == chain_of("abc")[2:]


def test_a_damaged_block_goes_with_all_after_it():
    pool = make_pool(6)
    store(pool, "abcd")
    store(pool, "abx")
    assert pool.discard(chain_of("ab")[1]) == [
        *chain_of("abcd")[:1:-1],
        chain_of("abx")[2],
        chain_of("ab")[1],
    ]
    assert pool.match(chain_of("abcd")) == 1
    pool.check()


def test_a_damaged_block_that_is_held_stays():
    pool = make_pool(6)
    store(pool, "abc")
    lease = pool.lease(chain_of("ab"), 10.0)
    assert pool.discard(chain_of("a")[0]) == chain_of("abc")[2:]
    pool.end(lease.lease_id)
    assert pool.discard(chain_of("a")[0]) == chain_of("ab")[::-1]


def test_blocks_leave_only_above_the_high_watermark_and_down_to_the_low_one():
    pool = make_pool(10, high_watermark=0.8, low_watermark=0.5)
    store(pool, "abcdefgh")
    assert pool.leave(100) == []
    store(pool, "abcdefghi")
    leaving = pool.leave(100)
    assert [record.block_hash for record in leaving] == chain_of("abcdefghi")[:4:-1]
    assert pool.accounts().in_transfer == 4
    for record in leaving:
        pool.left(record)
        pool.left(record)
    assert pool.accounts().free == 5


def test_bytes_that_did_not_come_are_not_stored_nor_what_follows_them():
    pool = make_pool(4)
    put = pool.reserve(chain_of("abc"), "", 30.0)
    assert pool.commit(put.put_id, [1, None, 3]) == chain_of("a")
    assert pool.accounts().free == 3


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a model that knows only what was stored and what is lent."""

    def __init__(self):
        super().__init__()
        self.clock = ManualClock()
        self.pool = make_pool(8, self.clock, policy="admission", high_watermark=0.8, low_watermark=0.6)
        self.stored = {}  # hash -> checksum, everything ever committed
        self.puts = []
        self.leases = []
        self.leaving = []
        self.next_checksum = 0

    @rule(path=st.text("ab", min_size=1, max_size=5), tenant=st.sampled_from(["", "t"]))
    def reserve(self, path, tenant):
        chain = chain_of(tenant + path)
        matched = self.pool.match(chain)
        put = self.pool.reserve(chain, tenant, 30.0)
        assert all(index >= matched for index in put.missing)
        self.puts.append(put)

    @precondition(lambda self: self.puts)
    @rule(at=st.integers(0, 100), commits=st.booleans())
    def finish_put(self, at, commits):
        put = self.puts.pop(at % len(self.puts))
        if not commits:
            self.pool.abort(put.put_id)
            return
        checksums = [self.next_checksum + index for index in range(len(put.missing))]
        self.next_checksum += len(checksums)
        try:
            stored = self.pool.commit(put.put_id, checksums)
        except LeaseExpiredError:
            assert put.expires_at_s <= self.clock.now_s()
            self.pool.abort(put.put_id)
            return
        by_hash = {put.chain[index]: value for index, value in zip(put.missing, checksums, strict=True)}
        self.stored.update({name: by_hash[name] for name in stored})

    @rule(path=st.text("ab", min_size=1, max_size=5), seconds=st.sampled_from([1.0, math.inf]))
    def lease(self, path, seconds):
        chain = chain_of(path)
        lease = self.pool.lease(chain, seconds)
        assert len(lease.records) == self.pool.match(chain)
        for name, checksum in zip(chain, lease.checksums, strict=False):
            assert self.stored[name] == checksum, "bytes of another commit"
        self.leases.append((chain, lease))

    @precondition(lambda self: self.leases)
    @rule(at=st.integers(0, 100))
    def end(self, at):
        self.pool.end(self.leases.pop(at % len(self.leases))[1].lease_id)

    @rule(path=st.text("ab", min_size=1, max_size=5))
    def delete(self, path):
        self.pool.delete(chain_of(path))

    @rule()
    def forget_idle_tenants(self):
        self.pool.forget_idle_tenants()

    @rule()
    def leave(self):
        self.leaving += self.pool.leave(2)

    @precondition(lambda self: self.leaving)
    @rule()
    def left(self):
        self.pool.left(self.leaving.pop())

    @rule()
    def wait(self):
        self.clock.advance(10.0)
        puts, leases = self.pool.expired()
        assert set(puts) <= {put.put_id for put in self.puts}
        assert all(lease.expires_at_s < math.inf for _, lease in self.leases if lease.lease_id in leases)

    @invariant()
    def every_block_is_accounted_for(self):
        self.pool.check()

    @invariant()
    def what_is_leased_is_still_there(self):
        for chain, lease in self.leases:
            assert self.pool.match(chain) >= len(lease.records)


TestPoolAgainstModel = PoolMachine.TestCase
TestPoolAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
