"""Sequences that begin with the same blocks are put in groups, whoever comes and goes."""

import random

import numpy as np
import pytest

from engine.prefix_groups import MOST_MEMBERS, NUM_FIELDS, UNIT, PrefixGroups, num_common
from engine.sequence import Sequence
from engine.step import StepEntry, StepPlan
from engine.step_memory import StepShape, StepWriter
from tests.engine.builders import make_sequence

BLOCK_SIZE = 16


def entry(name: str, table: tuple[int, ...], start: int | None = None) -> StepEntry:
    start = len(table) * BLOCK_SIZE - 1 if start is None else start
    return StepEntry(make_sequence(name, [1, 2, 3]), start, 1, table, samples=True)


def tables(*families: tuple[int, int]) -> list[tuple[int, ...]]:
    """Return block tables of families of so many members and common blocks, with three of their own."""
    own = 10_000
    found = []
    for family, (members, shared) in enumerate(families):
        for _ in range(members):
            found.append((*range(1000 * family, 1000 * family + shared), own, own + 1, own + 2))
            own += 3
    return found


def groups_of(groups: PrefixGroups) -> list[tuple[int, list[int]]]:
    """Return the shared blocks and the rows of each group."""
    numbers = groups.numbers()
    assert numbers.shape[0] == NUM_FIELDS
    found = []
    for index in range(numbers.shape[1]):
        begin, end, size = numbers[2:5, index].tolist()
        if size:
            rows = numbers[5 : 5 + size, index].tolist()
            assert set(numbers[0, rows].tolist()) == {(end - begin) * UNIT}
            assert set(numbers[1, rows].tolist()) == {begin}
            found.append(((end - begin) * UNIT // BLOCK_SIZE, rows))
    assert sum(len(rows) for _, rows in found) == np.count_nonzero(numbers[0])
    return found


def test_families_of_sequences_are_groups_wherever_they_stand() -> None:
    groups = PrefixGroups(BLOCK_SIZE, 4)
    first, second = tables((3, 40), (2, 20))[:3], tables((3, 40), (2, 20))[3:]
    order = [first[0], second[0], first[1], (5, 6, 7, 8), second[1], first[2]]
    groups.arrange(tuple(entry(str(row), table) for row, table in enumerate(order)))
    assert groups_of(groups) == [(40, [0, 2, 5]), (20, [1, 4])]
    groups.check()


def test_sixteen_agents_are_four_groups() -> None:
    groups = PrefixGroups(BLOCK_SIZE, 4)
    groups.arrange(tuple(entry(str(row), table) for row, table in enumerate(tables((16, 100)))))
    assert [size for size, _ in groups_of(groups)] == [100] * 4
    assert sorted(row for _, rows in groups_of(groups) for row in rows) == list(range(16))


def test_a_short_prefix_is_not_shared() -> None:
    groups = PrefixGroups(BLOCK_SIZE, 4)
    groups.arrange(tuple(entry(str(row), table) for row, table in enumerate(tables((4, 15), (2, 16)))))
    assert groups_of(groups) == [(16, [4, 5])]


def test_a_group_takes_nobody_who_shortens_what_it_shares_by_more_than_they_gain() -> None:
    deep = (*range(200), 500)
    others = [(*range(200), 501), (*range(20), 600, *range(700, 800)), (*range(20), 601, *range(800, 900))]
    groups = PrefixGroups(BLOCK_SIZE, 4)
    groups.arrange(tuple(entry(str(row), table) for row, table in enumerate([deep, *others])))
    assert groups_of(groups) == [(200, [0, 1]), (20, [2, 3])]


def test_only_what_is_computed_is_shared() -> None:
    groups = PrefixGroups(BLOCK_SIZE, 4)
    table = tuple(range(40))
    groups.arrange((entry("a", (*table, 100)), entry("b", (*table, 101), start=30 * BLOCK_SIZE)))
    assert groups_of(groups) == [(30, [0, 1])]


def test_shared_tokens_are_whole_units() -> None:
    groups = PrefixGroups(BLOCK_SIZE, 4)
    groups.arrange(tuple(entry(str(row), table) for row, table in enumerate(tables((2, 17)))))
    assert groups_of(groups) == [(16, [0, 1])]


def test_without_places_nobody_is_in_a_group() -> None:
    groups = PrefixGroups(BLOCK_SIZE, 1)
    groups.arrange(tuple(entry(str(row), table) for row, table in enumerate(tables((4, 40)))))
    assert groups.version == 0


def test_the_same_sequences_are_arranged_once() -> None:
    groups = PrefixGroups(BLOCK_SIZE, 4)
    entries = tuple(entry(str(row), table) for row, table in enumerate(tables((4, 40))))
    groups.arrange(entries)
    groups.arrange(entries)
    assert groups.version == 1


def test_who_is_left_of_a_group_joins_others() -> None:
    groups = PrefixGroups(BLOCK_SIZE, 4)
    entries = [entry(str(row), table) for row, table in enumerate(tables((8, 40)))]
    groups.arrange(tuple(entries))
    left = [entries[0], entries[1], entries[4], entries[5]]
    groups.arrange(tuple(left))
    assert groups_of(groups) == [(40, [0, 1, 2, 3])]
    groups.check()


def test_a_sequence_on_other_blocks_is_compared_by_those() -> None:
    """A sequence may be moved out and in between two steps; its old blocks hold anything then."""
    groups = PrefixGroups(BLOCK_SIZE, 4)
    mover = entry("mover", tuple(range(40)))
    groups.arrange((mover,))
    moved = StepEntry(mover.sequence, mover.start + 1, 1, tuple(range(100, 141)), samples=True)
    newcomer = entry("newcomer", (*range(30), *range(500, 510)))
    groups.arrange((moved, newcomer))
    assert groups_of(groups) == []


@pytest.mark.parametrize("seed", range(6))
def test_groups_hold_whatever_comes_and_goes(seed: int) -> None:
    random_ = random.Random(seed)
    groups = PrefixGroups(BLOCK_SIZE, random_.choice([2, 3, 4, MOST_MEMBERS]))
    present: list[StepEntry] = []
    next_block = 100_000
    for step in range(60):
        for _ in range(random_.randrange(4)):
            shared = random_.choice([3, 20, 40, 41])
            start = 1000 * random_.randrange(3)
            table = (*range(start, start + shared), *range(next_block, next_block + 5))
            next_block += 5
            present.append(entry(f"{step}-{next_block}", table))
        random_.shuffle(present)
        del present[: random_.randrange(3)]
        groups.arrange(tuple(present))
        groups.check()
        for shared, rows in groups_of(groups):
            begins = {present[row].block_table[:shared] for row in rows}
            assert len(begins) == 1, "all begin alike"
            assert all(present[row].start >= shared * BLOCK_SIZE for row in rows)


def test_both_buffers_hold_the_groups_of_their_own_step() -> None:
    groups = PrefixGroups(BLOCK_SIZE, 4)
    writers = [StepWriter(4096, BLOCK_SIZE, False, groups) for _ in range(2)]
    shape = StepShape(8, 8, 0, 64)
    entries = [entry(str(row), table) for row, table in enumerate(tables((3, 40), (2, 30)))]

    def rows(writer: StepWriter, wanted: list[StepEntry], of: StepShape = shape) -> list[int]:
        ids: dict[Sequence, int] = {item.sequence: 0 for item in wanted}
        memory = writer.write(StepPlan(tuple(wanted), len(wanted)), of, ids)
        at = sum(-(-int(np.prod(region)) // 4) * 4 for region in of.regions[:7])
        return memory[at : at + of.num_single].tolist()

    assert rows(writers[0], entries) == [640] * 3 + [480] * 2 + [0] * 3
    assert rows(writers[1], entries) == [640] * 3 + [480] * 2 + [0] * 3
    assert rows(writers[0], entries[2:]) == [0, 480, 480] + [0] * 5
    assert rows(writers[1], entries[2:]) == [0, 480, 480] + [0] * 5
    other = StepShape(16, 16, 0, 64)
    assert rows(writers[0], entries[3:], other) == [480] * 2 + [0] * 14
    assert rows(writers[1], entries[:2]) == [640] * 2 + [0] * 6


def test_tables_are_compared_from_their_beginning() -> None:
    assert num_common((), (1,)) == 0
    assert num_common((1, 2, 3), (1, 2, 3)) == 3
    assert num_common((1, 2, 3, 9), (1, 2, 4, 9)) == 2
    for length in range(40):
        one, other = (*range(length), 777, 5), (*range(length), 778, 5)
        assert num_common(one, other) == length
