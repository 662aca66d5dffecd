import dataclasses
import json
import socket

import pytest

from base.config import ClusterConfig, EngineConfig, PoolConfig, ServerConfig, TransferConfig
from deploy import cli
from deploy.doctor import GIB, REQUIRED, Host, check_cluster, check_host

HEALTHY = Host(
    versions=dict.fromkeys(REQUIRED, "1"),
    open_files=65536,
    locked_memory_bytes=-1,
    shm_free_bytes=8 * GIB,
    busy_ports=(),
    ray_token=True,
)
NODE = {
    "id": "n",
    "host": "h",
    "roles": ["prefill"],
    "transports": ["shm", "tcp"],
    "block_size": 64,
    "requests": 0,
}
SEVERAL_HOSTS = ClusterConfig(server=ServerConfig(host="0.0.0.0", insecure=True))
LARGE_CACHES = ClusterConfig(prefill=PoolConfig(nodes=3, engine=EngineConfig(kv_cache_gib=4.0)))
RDMA = ClusterConfig(transfer=TransferConfig(transports=("rdma", "tcp")))


def troubles(findings):
    return [(finding.level, finding.what, finding.mend) for finding in findings if finding.level != "ok"]


def test_a_healthy_host_has_no_troubles():
    assert troubles(check_host(HEALTHY, ClusterConfig())) == []


@pytest.mark.parametrize(
    ("change", "config", "level", "told"),
    [
        ({"versions": {}}, ClusterConfig(), "wrong", "torch is not installed"),
        ({"open_files": 1024}, ClusterConfig(), "warning", "1024 files"),
        ({"locked_memory_bytes": 65536}, RDMA, "wrong", "65536 bytes of memory"),
        (
            {"shm_free_bytes": GIB},
            ClusterConfig(),
            "wrong",
            "/dev/shm has 1.0 GiB free; the KV caches take 2.0",
        ),
        ({}, LARGE_CACHES, "wrong", "take 13.0"),
        ({"busy_ports": (8000,)}, ClusterConfig(), "wrong", "port 8000"),
        ({"silent": (("store.redis_url", "h:1"),)}, ClusterConfig(), "wrong", "nobody answers at h:1"),
        ({"ray_token": False}, SEVERAL_HOSTS, "warning", "no Ray token"),
    ],
)
def test_a_trouble_of_the_host_is_told_with_its_mend(change, config, level, told):
    [first, *_] = troubles(check_host(dataclasses.replace(HEALTHY, **change), config))
    assert first[0] == level
    assert told in first[1]
    assert first[2]


def test_gpu_nodes_take_no_shared_memory():
    config = ClusterConfig(prefill=PoolConfig(gpus_per_node=1), decode=PoolConfig(gpus_per_node=1))
    assert troubles(check_host(dataclasses.replace(HEALTHY, shm_free_bytes=0), config)) == []


def test_a_healthy_cluster_has_no_troubles():
    nodes = [NODE, {**NODE, "id": "m", "roles": ["decode"]}]
    assert troubles(check_cluster({"ready": True, "nodes": nodes})) == []


@pytest.mark.parametrize(
    ("ready", "nodes", "level", "told"),
    [
        (False, [NODE], "wrong", "no node serves"),
        (True, [NODE, {**NODE, "id": "m", "block_size": 32}], "wrong", "block sizes differ"),
        (True, [NODE, {**NODE, "id": "m", "transports": ["rdma"]}], "wrong", "no transport"),
        (True, [{**NODE, "transports": ["tcp"]}] * 2, "warning", "tcp alone"),
        (True, [{**NODE, "held_blocks": 3, "running": 0}], "warning", "holds 3 blocks"),
    ],
)
def test_a_trouble_of_the_cluster_is_told_with_its_mend(ready, nodes, level, told):
    [(found, what, mend)] = troubles(check_cluster({"ready": ready, "nodes": nodes}))
    assert found == level
    assert told in what
    assert mend


def test_the_command_looks_at_this_host_and_fails_for_a_cluster_that_is_not_there(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", "--json", "--address", "127.0.0.1:1"])
    assert caught.value.code == 1
    findings = json.loads(capsys.readouterr().out)
    assert [item["what"] for item in findings if item["level"] == "wrong"][-1].startswith(
        "http://127.0.0.1:1/"
    )
    assert {"torch", "ray"} <= {item["what"].split()[0] for item in findings if item["level"] == "ok"}


def test_a_configuration_that_cannot_be_read_is_a_finding(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("modle: x\n")
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", "-c", str(file)])
    assert caught.value.code == 1
    assert "did you mean model?" in capsys.readouterr().out


def test_services_that_are_named_are_called(tmp_path, capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as redis:
        port = redis.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        file = tmp_path / "c.yaml"
        file.write_text(f"store: {{redis_url: redis://127.0.0.1:{port}, peers: ['127.0.0.1:2']}}\n")
        with pytest.raises(SystemExit):
            cli.main(["doctor", "-c", str(file), "--json"])
    wrong = [item["what"] for item in json.loads(capsys.readouterr().out) if item["level"] == "wrong"]
    assert [what for what in wrong if "nobody answers" in what] == [
        "store.peers: nobody answers at 127.0.0.1:2",
        "RAY_ADDRESS: nobody answers at 127.0.0.1:1",
    ]
