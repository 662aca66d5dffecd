"""The conductor's list of a node's blocks is the union of its tiers, whatever moves between them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.findable import Findable

NAMES = "abcd"
STEPS = st.lists(st.tuples(st.sampled_from(["engine", "store", "take"]), st.sampled_from(NAMES)), max_size=60)


class Net:
    """An engine's cache: tells its net changes, as the block pool does."""

    def __init__(self):
        self.held = set()
        self.told = set()

    def take(self):
        stored, removed = sorted(self.held - self.told), sorted(self.told - self.held)
        self.told = set(self.held)
        return stored, removed


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_the_list_told_is_the_union_of_both_tiers(steps):
    engine, store, known = Net(), set(), set()
    findable = Findable(engine.held.__contains__, store.__contains__)

    def check():
        stored, removed = findable.take(*engine.take())
        assert not set(stored) & set(removed)
        assert len(stored) == len(set(stored))
        assert len(removed) == len(set(removed))
        known.difference_update(removed)
        known.update(stored)
        assert known == engine.held | store

    for what, name in steps:
        if what == "engine":
            engine.held.symmetric_difference_update(name)
        elif what == "store":
            store.symmetric_difference_update(name)
            findable.store_changed([name])
        else:
            check()
    check()


def test_a_block_that_moves_from_tier_to_tier_is_not_spoken_of():
    engine, store = {"a"}, set()
    findable = Findable(engine.__contains__, store.__contains__)
    assert findable.take(["a"], []) == (["a"], [])
    store.add("a")
    findable.store_changed("a")
    assert findable.take([], []) == ([], [])
    engine.clear()
    assert findable.take([], ["a"]) == ([], [])
