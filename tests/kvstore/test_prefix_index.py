"""The prefix index against its definition, and the numbering of events."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.index import Key, NodeEvents, PrefixIndex

NODES = 5
KEYS = st.lists(st.integers(0, 12), max_size=8)


class CountingChain(Sequence[Key]):
    """A chain that counts how many of its blocks were looked at."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = keys
        self.num_probes = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        self.num_probes += 1
        return self._keys[at]


def depth_of(held: set[Key], chain: Sequence[Key]) -> int:
    depth = 0
    while depth < len(chain) and chain[depth] in held:
        depth += 1
    return depth


@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "remove", "replace", "leave"]), st.integers(0, NODES - 1), KEYS)
    )
)
def test_index_agrees_with_one_set_for_each_node(history: list[tuple[str, int, list[int]]]) -> None:
    index = PrefixIndex()
    model: dict[int, set[Key]] = {node: set() for node in range(NODES)}
    for action, node, keys in history:
        if action == "store":
            index.store(node, keys)
            model[node] |= set(keys)
        elif action == "remove":
            index.remove(node, keys)
            model[node] -= set(keys)
        elif action == "replace":
            index.replace(node, keys)
            model[node] = set(keys)
        else:
            index.remove_node(node)
            model[node] = set()
        index.check()
    chain = list(range(12))
    groups = index.match(chain)
    found = {node: depth for depth, mask in groups for node in range(NODES) if mask >> node & 1}
    assert found == {node: depth for node, held in model.items() if (depth := depth_of(held, chain))}
    assert [depth for depth, _ in groups] == sorted((depth for depth, _ in groups), reverse=True)


@pytest.mark.parametrize("held", [0, 1, 7, 20])
def test_query_looks_at_one_block_more_than_matches(held: int) -> None:
    index = PrefixIndex()
    for node in range(300):
        index.store(node, range(held if node == 150 else held // 2))
    chain = CountingChain(range(20))
    index.match(chain)
    assert chain.num_probes <= held + 1


def test_repeated_message_changes_nothing() -> None:
    index = PrefixIndex()
    events = NodeEvents(index, 0)
    assert events.apply(1, ["a", "b"], [])
    assert events.apply(3, [], ["b"])
    assert events.apply(1, ["a", "b"], [])
    assert index.match(["a", "b"]) == [(1, 1)]


def test_gap_drops_the_node_until_its_snapshot() -> None:
    index = PrefixIndex()
    events = NodeEvents(index, 3)
    assert events.apply(1, ["a"], [])
    assert not events.apply(5, ["c"], [])
    assert index.match(["a"]) == []
    assert not events.apply(6, ["d"], [])
    assert events.waits_for_snapshot
    assert events.apply(7, ["a", "b"], [], is_snapshot=True)
    assert events.apply(9, ["c"], ["b"])
    assert index.match(["a"]) == [(1, 1 << 3)]
    assert index.num_blocks(3) == 2


def test_gap_of_one_node_leaves_others_alone() -> None:
    index = PrefixIndex()
    first, second = NodeEvents(index, 0), NodeEvents(index, 1)
    first.apply(1, ["a"], [])
    second.apply(1, ["a"], [])
    first.apply(9, ["b"], [])
    assert index.match(["a"]) == [(1, 2)]
