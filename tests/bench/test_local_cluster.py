"""A cluster without Ray gives each node GPUs of its own, among those that it was shown itself."""

import pytest

from base.config import ClusterConfig, PoolConfig
from base.errors import ConfigError
from bench import local_cluster as local
from deploy.plan import LocalModel

SHOWN = "CUDA_VISIBLE_DEVICES"
TWO_NODES = ClusterConfig(prefill=PoolConfig(gpus_per_node=2), decode=PoolConfig(gpus_per_node=1))


class NeverStarted:
    """Takes a process's place, and says that it is ready."""

    def __init__(self, spec, clock):
        self.spec = spec

    def wait_ready(self):
        return {"attach_port": 1}

    def drain(self, grace_s):
        return None


def gpus_of_nodes(tmp_path):
    with local.local_cluster(TWO_NODES, LocalModel("model", "id", "name"), tmp_path) as cluster:
        shown = {name: process.spec.environment.get(SHOWN) for name, process in cluster.processes.items()}
    del shown["conductor"]
    return shown


@pytest.fixture(autouse=True)
def no_processes(monkeypatch):
    monkeypatch.setattr(local, "Supervisor", NeverStarted)
    monkeypatch.delenv(SHOWN, raising=False)


def test_nodes_take_gpus_in_turn(tmp_path):
    assert gpus_of_nodes(tmp_path) == {"prefill-0": "0,1", "decode-0": "2"}


def test_nodes_take_only_what_their_cluster_was_shown(tmp_path, monkeypatch):
    monkeypatch.setenv(SHOWN, "7,GPU-abc,3")
    assert gpus_of_nodes(tmp_path) == {"prefill-0": "7,GPU-abc", "decode-0": "3"}
    for too_few in ("2,3", ""):
        monkeypatch.setenv(SHOWN, too_few)
        with pytest.raises(ConfigError, match=SHOWN):
            gpus_of_nodes(tmp_path)


def test_a_node_is_run_by_another_module_where_a_bench_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv(SHOWN, "0,1,2")
    model, modules = LocalModel("model", "id", "name"), {"prefill-0": "bench.paced_node"}
    with local.local_cluster(TWO_NODES, model, tmp_path, modules) as cluster:
        run = {name: process.spec.command[-1] for name, process in cluster.processes.items()}
    assert run == {"conductor": "conductor", "prefill-0": "bench.paced_node", "decode-0": "node.process"}
