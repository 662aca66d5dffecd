"""Everything at once against models that know only sets: three stores with their servers, an
outside client, the directory, leases, and the conductor's index.

After every step: each tier's blocks add up, whoever is said to hold a block holds it and
nobody else, in the directory as in the index, no leased block is gone, and a store without
a disk has no block without the one before it. Each load looks at every byte.

The same steps make the same world: no call runs out, no clock moves by itself, and what is written
to disk together ends in its order.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore import disk
from kvstore.access import RemoteAccess
from kvstore.attached import AttachedStore
from kvstore.index import NodeEvents, PrefixIndex
from kvstore.store import LEASE_S
from tests.kvstore.cluster import BLOCK_BYTES, chain_of, load, running_cluster, save

PATHS = st.text("ab", min_size=1, max_size=5)
ALL = sorted({name for number in range(32) for name in chain_of(f"{number:05b}".translate({48: 97, 49: 98}))})
ROOMY, SMALL, LAYERED = range(3)
"""Room for every block there is; room for few; room for few, and a disk for some more."""
NODES = st.sampled_from([ROOMY, SMALL, LAYERED])


def goes_through(name, block):
    """Whether the chain that ends with `name` has `block` in it."""
    return name.lstrip(b".").startswith(block.lstrip(b"."))


class Party:
    """A store, and what the conductor is told of it."""

    def __init__(self, node, index, number):
        self.node = node
        self.access = RemoteAccess(node.member.address)
        self.attached = AttachedStore(node.store, None, lambda message: None)
        self.events = NodeEvents(index, number)
        self.apply(self.attached.kv_snapshot())
        self.is_behind = False
        self.leased = {}

    def apply(self, told):
        return self.events.apply(told.first_number, told.stored, told.removed, told.is_snapshot)

    def tell(self, is_lost=False):
        """Carry what is new to the index, or lose it; a gap is mended by a snapshot."""
        told = self.attached.kv_events()
        if told is None:
            return
        if is_lost:
            self.is_behind = True
        elif not self.apply(told):
            assert self.is_behind, "a gap where nothing was lost"
            assert self.apply(self.attached.kv_snapshot())
            self.is_behind = False


class StoreMachine(RuleBasedStateMachine):
    """Rules are what users and failures do; the invariants are this file's docstring."""

    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        # Threads end in any order, in which a disk's blocks are evicted.
        self.stack.enter_context(patch.object(disk, "NUM_THREADS", 1))
        self.folder = self.stack.enter_context(TemporaryDirectory(prefix="store-"))
        self.index = PrefixIndex()
        self.num_starts = 0
        self.runner.run(self.begin())
        self.in_roomy = set()

    async def begin(self):
        self.cluster = await self.stack.enter_async_context(running_cluster())
        self.parties = [await self.start(number) for number in (ROOMY, SMALL, LAYERED)]
        self.outside, self.outside_clock = await self.cluster.client()

    async def start(self, number):
        self.num_starts += 1
        options = {"num_blocks": 64 if number == ROOMY else 6}
        if number == LAYERED:
            folder = Path(self.folder, str(self.num_starts))
            options |= {"folder": folder, "num_slots": 8, "high_watermark": 0.7, "low_watermark": 0.4}
        node = await self.cluster.node(f"node-{number}", **options)
        return Party(node, self.index, number)

    def teardown(self):
        async def end():
            for party in self.parties:
                await party.access.close()
            await self.stack.aclose()

        self.runner.run(end())
        self.runner.close()

    def roomy_has(self):
        return set(self.parties[ROOMY].node.store.hashes)

    def roomy_may_gain(self, chain):
        """A step that others decide may have brought blocks of `chain` to the roomy store, and no others."""
        has = self.roomy_has()
        assert self.in_roomy <= has <= self.in_roomy | set(chain)
        self.in_roomy = has

    def roomy_prefix(self, chain):
        return next((at for at, name in enumerate(chain) if name not in self.in_roomy), len(chain))

    # --- what users do ------------------------------------------------------------------

    @rule(number=NODES, path=PATHS)
    def save_beside(self, number, path):
        stored = self.runner.run(save(self.parties[number].node.cache, path))
        if number == ROOMY:
            assert stored == len(set(chain_of(path)) - self.in_roomy)
            self.in_roomy |= set(chain_of(path))

    @rule(path=PATHS)
    def save_from_outside(self, path):
        self.runner.run(save(self.outside, path))
        self.roomy_may_gain(chain_of(path))

    @rule(number=NODES, path=PATHS)
    def load_beside(self, number, path):
        count = self.runner.run(load(self.parties[number].node.cache, path))
        assert count >= self.roomy_prefix(chain_of(path))

    @rule(path=PATHS)
    def load_from_outside(self, path):
        assert self.runner.run(load(self.outside, path)) >= self.roomy_prefix(chain_of(path))

    @rule(number=NODES, path=PATHS)
    def lease(self, number, path):
        party, chain = self.parties[number], chain_of(path)
        leased = self.runner.run(party.access.lease(chain, 0))
        party.leased[leased.ticket] = (chain[: leased.num_blocks], party.node.clock.now_s() + LEASE_S)
        if number == ROOMY:
            assert leased.num_blocks == self.roomy_prefix(chain)

    @rule(number=NODES, at=st.integers(0, 9))
    def release(self, number, at):
        party = self.parties[number]
        if party.leased:
            ticket = list(party.leased)[at % len(party.leased)]
            self.runner.run(party.access.release(ticket))
            del party.leased[ticket]

    @rule(path=PATHS)
    def delete(self, path):
        held = {name for chain, _ in self.parties[ROOMY].leased.values() for name in chain}
        self.runner.run(self.outside.delete(chain_of(path)))
        chain = chain_of(path)
        for name in reversed(chain[: self.roomy_prefix(chain)]):
            if name in held or any(goes_through(other, name) for other in self.in_roomy - {name}):
                break
            self.in_roomy.discard(name)

    # --- what goes on by itself ---------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 31.0]))
    def a_second_later(self, seconds):
        for party in self.parties:
            party.node.clock.advance(seconds)
            self.runner.run(party.node.store.tick())
            now_s = party.node.clock.now_s()
            party.leased = {key: held for key, held in party.leased.items() if held[1] > now_s}
        self.outside_clock.advance(seconds)

    # --- what goes wrong ----------------------------------------------------------------

    @rule(number=NODES)
    def lose_what_the_conductor_is_told(self, number):
        self.parties[number].tell(is_lost=True)

    @rule(number=st.sampled_from([SMALL, LAYERED]))
    def kill_and_start_anew(self, number):
        async def kill():
            party = self.parties[number]
            await party.node.die()
            await party.access.close()
            self.index.remove_node(number)
            self.parties[number] = await self.start(number)

        self.runner.run(kill())

    @precondition(lambda self: self.in_roomy and not self.parties[ROOMY].leased)
    @rule(at=st.integers(0, 99))
    def damage_a_block(self, at):
        node = self.parties[ROOMY].node
        name = sorted(self.in_roomy)[at % len(self.in_roomy)]
        node.store.segment.memory[node.store.pool.record(name).block_id * BLOCK_BYTES] ^= 1
        num_damaged = node.store.num_damaged
        self.runner.run(node.store.report(name))
        assert node.store.num_damaged == num_damaged + 1
        self.in_roomy = {other for other in self.in_roomy if not goes_through(other, name)}

    # --- what holds ---------------------------------------------------------------------

    @invariant()
    def every_block_of_every_tier_is_accounted_for(self):
        for party in self.parties:
            party.node.store.check()
            books = party.node.store.pool.accounts()
            assert books.free + books.in_transfer + books.cached + books.held == books.total
            assert party.node.agent.num_grants <= len(party.leased)

    @invariant()
    def the_roomy_store_has_what_was_saved_and_not_deleted(self):
        assert self.roomy_has() == self.in_roomy

    @invariant()
    def the_directory_knows_who_holds_what(self):
        for party in self.parties:
            epoch = party.node.member.epoch
            said = {name for name, holders in self.cluster.board.holders.items() if epoch in holders}
            assert said == set(party.node.store.hashes)

    @invariant()
    def what_is_leased_is_in_memory_and_chains_are_whole(self):
        for number, party in enumerate(self.parties):
            pool = party.node.store.pool
            assert all(pool.match(chain) == len(chain) for chain, _ in party.leased.values())
            if number != LAYERED:
                for path in (name.lstrip(b".").decode() for name in pool.hashes):
                    assert pool.match(chain_of(path)) == len(path)

    @invariant()
    def the_index_knows_who_holds_what(self):
        for party in self.parties:
            party.tell()
        if any(party.is_behind for party in self.parties):
            return
        self.index.check()
        holds = [set(party.node.store.hashes) for party in self.parties]
        for name in ALL:
            mask = sum(1 << number for number, held in enumerate(holds) if name in held)
            assert self.index.holders(name) == mask
        chain = chain_of("ababa")
        naive = {
            number: next((at for at, name in enumerate(chain) if name not in held), len(chain))
            for number, held in enumerate(holds)
        }
        found = {
            number: depth
            for depth, mask in self.index.match(chain)
            for number in range(len(holds))
            if mask >> number & 1
        }
        assert found == {number: depth for number, depth in naive.items() if depth}


TestWholeStore = StoreMachine.TestCase
TestWholeStore.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)


class ManyStepsMachine(StoreMachine):
    """The same, longer."""


TestWholeStoreForLong = pytest.mark.full(ManyStepsMachine.TestCase)
TestWholeStoreForLong.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
