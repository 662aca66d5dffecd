"""Where nodes keep blocks, as the doctor sees it before they start."""

from types import SimpleNamespace

import pytest

from base.config import GIB, ClusterConfig, PoolConfig, StoreConfig
from deploy.doctor import DiskSeen, check_disk, look_at_disk


def config_of(path, disk_gib=8.0):
    return ClusterConfig(
        store=StoreConfig(dram_gib=1.0, disk_path=str(path), disk_gib=disk_gib),
        prefill=PoolConfig(nodes=1),
        decode=PoolConfig(nodes=2),
    )


@pytest.fixture(autouse=True)
def _local_ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("seen", "level", "said"),
    [
        (DiskSeen("store.disk_path: /kv: Permission denied"), "wrong", "Permission denied"),
        (DiskSeen("", "tmpfs", 100 * GIB), "warning", "/kv is this host's memory (tmpfs)"),
        (DiskSeen("", "nfs4", 100 * GIB), "warning", "/kv is another host's disk (nfs4)"),
        (DiskSeen("", "ext4", 24 * GIB - 1), "warning", "24.0 GiB are left in /kv, for 3 nodes of 8 GiB"),
        (DiskSeen("", "ext4", 24 * GIB), "ok", "/kv has room for 3 times 8 GiB"),
    ],
)
def test_a_disk_is_judged_by_what_it_is_and_what_is_left_of_it(seen, level, said):
    [found] = check_disk(seen, config_of("/kv"))
    assert found.level == level
    assert said in found.what
    assert bool(found.mend) == (level != "ok")


def test_without_a_disk_there_is_nothing_to_look_at(tmp_path, monkeypatch):
    assert look_at_disk(ClusterConfig()) is None
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert look_at_disk(config_of(tmp_path)) is None
    assert list(check_disk(None, ClusterConfig())) == []


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    seen = look_at_disk(config_of(tmp_path / "file" / "kv"))
    assert "store.disk_path" in seen.problem


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path):
    inner = tmp_path / "a disk" / "kv"
    mounts = tmp_path / "mounts"
    rows = (
        "/ ext4",
        f"{tmp_path} xfs",
        rf"{tmp_path}/a\040disk nfs",
        rf"{tmp_path}/a\040disk tmpfs",
        "/b zfs",
    )
    mounts.write_text("".join(f"device {row} rw 0 0\n" for row in rows))
    assert look_at_disk(config_of(inner), mounts).kind == "tmpfs"
    assert look_at_disk(config_of(tmp_path / "other"), mounts).kind == "xfs"
    assert look_at_disk(config_of(tmp_path / "other")).kind  # of this host


def test_what_nodes_have_there_already_is_left_for_them(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=0))
    (tmp_path / "prefill-0").mkdir()
    (tmp_path / "prefill-0" / "blocks.slots").write_bytes(bytes(1 << 20))
    assert look_at_disk(config_of(tmp_path)).left_bytes >= 1 << 20
