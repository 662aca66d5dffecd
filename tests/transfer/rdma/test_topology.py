"""Distances of NICs to memory, read from trees that look like sysfs."""

import os
from pathlib import Path

import pytest

from transfer.rdma import topology
from transfer.rdma.topology import (
    UNREACHED,
    Distance,
    Place,
    active_nics,
    described_choice,
    distance,
    gpu_place,
    gpus,
    host_place,
    nic_place,
    overview,
    tiers,
)

SWITCH = "pci0000:17/0000:17:01.0/0000:18:00.0"
OUR_GPU = f"{SWITCH}/0000:19:00.0/0000:1a:00.0"
HERE = frozenset({0})


class Sysfs:
    """A host of two sockets: a GPU and NICs at every distance from it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gpu(OUR_GPU, 0)
        self.nic("mlx5_0", f"{SWITCH}/0000:19:10.0/0000:1b:00.0", 0)
        self.nic("mlx5_1", f"{SWITCH}/0000:19:20.0/0000:1c:00.0/0000:1d:00.0/0000:1e:00.0", 0)
        self.nic("mlx5_2", "pci0000:17/0000:17:03.0/0000:20:00.0", 0)
        self.nic("mlx5_3", "pci0000:40/0000:40:01.0/0000:41:00.0", 0)
        self.nic("mlx5_4", "pci0000:97/0000:97:01.0/0000:98:00.0", 1)
        self.nic("rxe0", None, -1)
        for node, processors in ((0, "0-63"), (1, "64-127")):
            self.write(f"devices/system/node/node{node}/cpulist", processors)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def link(self, path: str, target: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / "devices" / target)

    def nic(self, name: str, path: str | None, node: int, state: str = "4: ACTIVE") -> None:
        self.write(f"class/infiniband/{name}/ports/1/state", state)
        if path is not None:
            self.write(f"devices/{path}/numa_node", str(node))
            self.link(f"class/infiniband/{name}/device", path)

    def gpu(self, path: str, node: int) -> None:
        for file, text in (("numa_node", str(node)), ("vendor", "0x10de"), ("class", "0x030200")):
            self.write(f"devices/{path}/{file}", text)
        self.link(f"bus/pci/devices/{path.rpartition('/')[2]}", path)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


@pytest.fixture
def on_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


@pytest.mark.parametrize(
    ("nic", "expected"),
    [
        ("mlx5_0", Distance.SWITCH),
        ("mlx5_1", Distance.SWITCHES),
        ("mlx5_2", Distance.ROOT),
        ("mlx5_3", Distance.NODE),
        ("mlx5_4", Distance.ANY),
        ("rxe0", Distance.ANY),
        ("absent", Distance.ANY),
    ],
)
def test_a_nic_is_as_near_to_a_gpu_as_what_joins_them(sysfs: Sysfs, nic: str, expected: Distance) -> None:
    assert distance(nic_place(nic, sysfs.root), gpu_place("0000:1A:00.0", sysfs.root)) is expected


def test_two_functions_of_one_card_are_as_near_as_can_be() -> None:
    card = ("pci0000:17", "0000:17:01.0")
    assert distance(Place(HERE, (*card, "0000:18:00.0")), Place(HERE, (*card, "0000:18:00.1"))) == 0


def test_devices_of_a_virtual_machine_that_all_hang_on_its_root_are_alike() -> None:
    memory = Place(path=("pci0000:00", "0000:00:05.0"))
    nics = [Place(path=("pci0000:00", f"0000:00:{slot:02}.0")) for slot in range(6, 9)]
    assert {distance(nic, memory) for nic in nics} == {Distance.ROOT}


def test_host_memory_is_near_the_nics_of_its_node(sysfs: Sysfs, on_node_0: None) -> None:
    memory = host_place(sysfs.root)
    near = [name for name in active_nics(sysfs.root) if distance(nic_place(name, sysfs.root), memory) < 4]
    assert near == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]


def test_memory_of_a_process_on_both_nodes_is_near_the_nics_of_both(
    sysfs: Sysfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 64})
    assert distance(nic_place("mlx5_4", sysfs.root), host_place(sysfs.root)) is Distance.NODE


def test_on_a_host_of_one_node_all_nics_are_alike(tmp_path: Path) -> None:
    assert host_place(tmp_path) == Place()
    assert {distance(Place(frozenset(nodes)), Place()) for nodes in ((), (0,), (1,))} == {Distance.ANY}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ((4, 4), (4, 4), ((0, 1),)),
        ((3, 4), (4, 4), ((0,), (1,))),
        # Near at one end each: both, before what is near at none.
        ((0, 4, 4), (4, 0, 4), ((0, 1), (2,))),
        # A switch that a GPU shares with its NIC counts for more than a node.
        ((0, 3), (4, 3), ((0,), (1,))),
        ((3, UNREACHED, 4), (4, 3, 4), ((0,), (2,))),
        ((3, 3), (UNREACHED, UNREACHED), ()),
        ((3, 3, 3), (4, 3), ((1,), (0,))),
    ],
)
def test_rails_are_ranked_by_what_both_ends_add_up_to(ours, theirs, expected) -> None:
    assert tiers(ours, theirs) == expected


def test_the_choice_is_told_in_a_line() -> None:
    names = ("a", "b", "c")
    assert described_choice(names, (3, 3, 4)) == "a, b (same NUMA node); c stand by"
    assert described_choice(names, (4, 4, 4)) == "a, b, c (no nearer is known)"
    assert described_choice(names, (UNREACHED,) * 3) == "no rail"
    assert described_choice(names[:2], (4, 3, 0)) == "b (same NUMA node); a stand by"


def test_a_host_is_told_of_by_its_memories(sysfs: Sysfs, on_node_0: None) -> None:
    sysfs.nic("mlx5_9", "pci0000:17/0000:17:09.0/0000:29:00.0", 0, state="1: DOWN")
    assert list(overview(sysfs.root)) == [
        "host memory: mlx5_0, mlx5_1, mlx5_2, mlx5_3 (same NUMA node); mlx5_4, rxe0 stand by",
        "GPU 0000:1a:00.0: mlx5_0 (same PCIe switch); mlx5_1, mlx5_2, mlx5_3, mlx5_4, rxe0 stand by",
    ]


def test_a_host_without_nics_has_nothing_to_tell(tmp_path: Path) -> None:
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    assert list(overview(tmp_path)) == []
    assert gpus(tmp_path) == {}


def test_this_host_can_be_asked() -> None:
    assert all(isinstance(line, str) for line in topology.overview())
