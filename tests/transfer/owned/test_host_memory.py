"""Pages: what is asked of a kernel that has several memory nodes or huge pages, and that segments
work where it has neither."""

import os
from pathlib import Path

import pytest

from transfer.owned import segment as segments
from transfer.owned.board import Board, PeerBoard
from transfer.owned.host_memory import HUGE_BYTES, MemoryPolicy, bind, cpu_list, memory_nodes, policy_or_none

FREE_HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
TWO = {0: frozenset({0, 1, 2, 3}), 1: frozenset({4, 5, 6, 7})}


def num_free_huge_pages():
    return int(FREE_HUGE_PAGES.read_text()) if FREE_HUGE_PAGES.exists() else 0


@pytest.mark.parametrize(
    ("text", "processors"),
    [("", set()), ("0\n", {0}), ("0-3,8\n", {0, 1, 2, 3, 8}), ("0-1,4-5,7", {0, 1, 4, 5, 7})],
)
def test_lists_of_processors_are_read(text, processors):
    assert cpu_list(text) == processors


def test_nodes_are_read_where_the_kernel_lists_them(tmp_path):
    for node, processors in ((0, "0-3\n"), (1, "4-7\n"), (2, "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(processors)
    (tmp_path / "node7").mkdir()
    (tmp_path / "possible").write_text("0-7\n")
    assert memory_nodes(tmp_path) == TWO


def test_where_nothing_is_listed_there_are_no_nodes(tmp_path):
    assert memory_nodes(tmp_path / "absent") == {}


@pytest.mark.parametrize(
    ("nodes", "processors", "placement"),
    [
        (TWO, {0, 1}, MemoryPolicy((0,), is_spread=False)),
        (TWO, {5}, MemoryPolicy((1,), is_spread=False)),
        (TWO, {3, 4}, MemoryPolicy((0, 1), is_spread=True)),
        (TWO, {99}, None),
        ({0: TWO[0]}, {0}, None),
        ({}, {0}, None),
    ],
)
def test_memory_lies_where_the_processors_are(nodes, processors, placement):
    assert policy_or_none(nodes, processors) == placement


@pytest.mark.parametrize("is_spread", [False, True])
def test_the_kernel_takes_a_placement_on_a_node_it_has_and_refuses_one_it_has_not(is_spread):
    segment = segments.allocate_shared(1, HUGE_BYTES)
    try:
        for node in memory_nodes():
            if not bind(segment.address, segment.num_bytes, MemoryPolicy((node,), is_spread)):
                pytest.skip("this kernel or container takes no advice on memory nodes")
        assert not bind(segment.address, segment.num_bytes, MemoryPolicy((1_000,), is_spread))
        segment.memory[:] = bytes(range(256)) * (HUGE_BYTES // 256)
    finally:
        segments.release(segment)


@pytest.mark.parametrize("num_bytes", [1, 4096, HUGE_BYTES - 1, HUGE_BYTES, 3 * HUGE_BYTES + 5])
def test_a_segment_is_zeroed_writable_and_of_the_size_asked_for_whatever_its_pages(num_bytes):
    segment = segments.allocate_shared(1, num_bytes)
    try:
        assert (segment.num_bytes, segment.memory.nbytes) == (num_bytes, num_bytes)
        assert bytes(segment.memory) == bytes(num_bytes)
        segment.memory[-1] = 7
    finally:
        segments.release(segment)


@pytest.mark.skipif(num_free_huge_pages() < 2, reason="needs two free huge pages (vm.nr_hugepages)")
def test_a_segment_of_reserved_huge_pages_is_seen_by_a_peer():
    segment = segments.allocate_shared(1, HUGE_BYTES + 5)
    board = Board(3)
    try:
        assert os.fstat(segment.shared_fd).st_size == 2 * HUGE_BYTES
        board.show(segment)
        peer = PeerBoard(board.address, 3)
        segment.memory[-1] = 7
        assert peer.memory_of(1)[-1] == 7
        assert peer.memory_of(1).nbytes == segment.num_bytes
        peer.close()
    finally:
        segments.release(segment)
        board.close()
