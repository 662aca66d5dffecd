"""Which clusters run, by name: each command finds the one it means, and no other."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from base.config import ClusterConfig, ServerConfig
from base.errors import ConfigError
from deploy.clusters import chosen, claimed, described, folder_of, record, running, targets_path
from deploy.ports import require_free, taken, wanted_ports
from deploy.targets import processes_beside, write_targets
from tests.deploy.processes import ROOT, free_ports


def config(cache_dir, name="", http_port=8000, grpc_port=0):
    server = ServerConfig(http_port=http_port, grpc_port=grpc_port)
    return ClusterConfig(cache_dir=str(cache_dir), name=name, server=server)


@pytest.fixture
def two(tmp_path):
    """Two clusters that run: A of a.yaml, with a name, and B of b.yaml, which goes by its port."""
    with ExitStack() as ends:
        for name, port in (("a", 8000), ("", 8100)):
            wanted = config(tmp_path, name, port)
            file = tmp_path / ("a.yaml" if name else "b.yaml")
            ends.enter_context(claimed(described(wanted, file, tuple(wanted_ports(wanted)))))
        yield tmp_path


def test_each_cluster_is_found_by_its_file_and_by_its_name_alone(two):
    assert chosen(config(two), two / "a.yaml", "").name == "a"
    assert chosen(config(two), two / "b.yaml", "").name == "8100"
    assert chosen(config(two, "a"), two / "copy.yaml", "").name == "a", "the name in a file is the cluster's"
    assert chosen(config(two), None, "8100").ports == (8100,)


@pytest.mark.parametrize(
    ("file", "name", "told"),
    [
        (None, "", "2 clusters run: name one"),
        ("c.yaml", "", "no cluster was started with"),
        ("a.yaml", "b", "no cluster is called b"),
    ],
)
def test_cluster_that_is_not_meant_is_refused_and_those_that_run_are_named(two, file, name, told):
    with pytest.raises(ConfigError, match=told) as caught:
        chosen(config(two), file and two / file, name)
    assert "a (pid " in str(caught.value)
    assert "8100 (pid " in str(caught.value)


def test_the_only_cluster_needs_no_name_and_none_is_told(tmp_path):
    with pytest.raises(ConfigError, match="is `conductor up` running"):
        chosen(config(tmp_path), None, "")
    with claimed(described(config(tmp_path), None, ())):
        assert chosen(config(tmp_path), None, "").name == "8000"
    assert running(str(tmp_path)) == []
    assert [path.name for path in folder_of(str(tmp_path)).iterdir()] == ["lock"]


def test_a_name_has_one_cluster_and_the_other_is_told_which(two):
    with (
        pytest.raises(ConfigError, match=r"there is a cluster a \(pid"),
        claimed(described(config(two, "a"), None, ())),
    ):
        pass
    assert len(running(str(two))) == 2


def test_cluster_of_another_host_is_refused_by_that_hosts_name(tmp_path):
    here = described(config(tmp_path), None, ())
    with claimed(here):
        record(type(here)(**{**{key: getattr(here, key) for key in here.__slots__}, "host": "elsewhere"}))
        with pytest.raises(ConfigError, match="runs on host elsewhere"):
            chosen(config(tmp_path), None, "")


def test_what_a_killed_cluster_left_is_no_cluster_and_is_cleared_away(tmp_path):
    code = f"""
import os
from base.config import ClusterConfig
from deploy.clusters import claimed, described
from deploy.targets import write_targets
with claimed(described(ClusterConfig(name="dead", cache_dir={str(tmp_path)!r}), None, ())):
    write_targets({str(tmp_path)!r}, "dead", {{"conductor": "127.0.0.1:1"}}, {{}})
    os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 9
    assert targets_path(str(tmp_path), "dead").exists()
    assert running(str(tmp_path)) == []
    with claimed(described(config(tmp_path), None, ())):
        assert not targets_path(str(tmp_path), "dead").exists()


def test_two_clusters_without_ports_of_their_own_are_called_by_their_processes(tmp_path):
    assert described(config(tmp_path, http_port=0), None, ()).name == f"pid-{os.getpid()}"


# --- ports ---


def test_a_port_that_is_taken_is_named_with_its_key_and_who_has_it(two):
    with pytest.raises(ConfigError, match=r"server\.http_port: port 8000 is that of the cluster a \(pid"):
        require_free(config(two), running(str(two)))


def test_the_process_that_listens_on_a_port_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"server\.grpc_port: port {port} is in use by process {os.getpid()} \("
        ):
            require_free(config(tmp_path, http_port=0, grpc_port=port), [])


def test_ports_that_nobody_has_are_free_and_those_that_any_will_do_are_not_asked_for(tmp_path):
    [port] = free_ports(1)
    require_free(config(tmp_path, http_port=port), [])
    assert taken("127.0.0.1", port, []) == ""
    assert taken("::1", port, []) in ("", f"::1:{port}: Cannot assign requested address")
    assert wanted_ports(config(tmp_path, http_port=0)) == {}


def test_each_conductor_has_ports_of_its_own():
    server = ServerConfig(conductors=2, http_port=8000, grpc_port=9000)
    keys = wanted_ports(ClusterConfig(server=server))
    assert sorted(keys) == [8000, 8001, 9000, 9001]
    assert keys[8001] == "server.http_port"


def test_ports_of_a_head_node_elsewhere_are_not_looked_at(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        wanted = config(tmp_path, http_port=busy.getsockname()[1])
        monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
        assert require_free(wanted, []) is None
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
        with pytest.raises(ConfigError, match=r"server\.http_port"):
            require_free(wanted, [])


# --- targets ---


def test_processes_are_found_by_their_conductor_under_any_name_of_loopback(tmp_path):
    write_targets(str(tmp_path), "a", {"conductor": "127.0.0.1:1"}, {"prefill-0": {"metrics_port": 2}})
    write_targets(
        str(tmp_path),
        "b",
        {"conductor": "https://h:1"},
        {"x": {"metrics_host": "h", "metrics_port": 3}, "y": {}},
    )
    a = [("conductor", "http://127.0.0.1:1"), ("prefill-0", "http://127.0.0.1:2")]
    assert (
        processes_beside(str(tmp_path), "localhost:1") == processes_beside(str(tmp_path), "127.0.0.1:1") == a
    )
    assert processes_beside(str(tmp_path), "https://h:1") == [
        ("conductor", "https://h:1"),
        ("x", "http://h:3"),
    ]
    assert processes_beside(str(tmp_path), "127.0.0.1:3") is None
