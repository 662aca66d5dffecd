"""`conductor up` on several Ray nodes of one machine: pools on their own, a node killed, another added."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.processes import ROOT, marked_environment, marked_pids, wait_all_gone, wait_gone

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

HOLDER = """
import json, sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
nodes = {}
print(json.dumps({"address": cluster.address}), flush=True)
for line in sys.stdin:
    verb, name, resource = line.split()
    if verb == "add":
        nodes[name] = cluster.add_node(num_cpus=2, resources={resource: 1})
    else:
        cluster.remove_node(nodes.pop(name), allow_graceful=False)
    print(json.dumps({"done": line.strip()}), flush=True)
cluster.shutdown()
"""
"""Holds the Ray cluster in a process of its own: pytest's stays free of Ray."""


class RayNodes:
    def __init__(self, environment):
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self.answer()["address"]

    def answer(self):
        for line in self.process.stdout:  # Ray prints there too
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError("the holder of the Ray cluster ended")

    def ask(self, verb, name, resource):
        self.process.stdin.write(f"{verb} {name} {resource}\n")
        self.process.stdin.flush()
        self.answer()


@pytest.fixture
def environment():
    # Ray's own detection of a lost node takes 16 s by default
    environment = marked_environment(
        RAY_health_check_initial_delay_ms="1000",
        RAY_health_check_period_ms="500",
        RAY_health_check_timeout_ms="500",
        RAY_health_check_failure_threshold="2",
    )
    yield environment
    for pid in marked_pids(environment):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def ray_nodes(environment):
    nodes = RayNodes(environment)
    yield nodes
    nodes.process.stdin.close()
    nodes.process.wait(60)


def read_until(stream, *words):
    for line in stream:
        if all(word in line for word in words):
            return line
    raise AssertionError(f"the end, and no {words}")


def host_of(environment, process):
    """The raylet that a process of ours hangs on: its actor's worker's parent."""
    [pid] = [pid for pid, line in marked_pids(environment).items() if f"{process}.json" in line]
    return parent(parent(pid))


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_pools_keep_to_their_hosts_and_a_lost_host_is_replaced(ray_nodes, environment, tmp_path):
    ray_nodes.ask("add", "p", "prefill")
    ray_nodes.ask("add", "d", "decode")
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"cache_dir: {tmp_path}/cache\n"
        "server: {http_port: 0, grpc_port: 0}\n"
        "prefill: {resource: prefill}\n"
        "decode: {nodes: 2, resource: decode}\n"
    )
    up = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "run_stub_cluster.py"), str(file), "--json"],
        cwd=ROOT,
        env={**environment, "RAY_ADDRESS": ray_nodes.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # two decode nodes and room for one: the start waits for a host, as with an autoscaler
    read_until(up.stderr, "✓", "conductor")
    ray_nodes.ask("add", "d2", "decode")
    assert json.loads(up.stdout.readline())["model"] == "smollm2"
    hosts = {name: host_of(environment, name) for name in ("conductor", "prefill-0", "decode-0", "decode-1")}
    assert len(set(hosts.values())) == 4

    # a decode host dies with all on it; its node is started on the host that is added for it
    ray_nodes.ask("remove", "d", "decode")
    ray_nodes.ask("add", "d3", "decode")
    read_until(up.stderr, "decode-", ": ready")
    moved = {name: host_of(environment, name) for name in hosts}
    assert len(set(moved.values())) == 4
    assert {name for name in hosts if moved[name] != hosts[name]} < {"decode-0", "decode-1"}

    up.send_signal(signal.SIGTERM)
    _, err = up.communicate(timeout=100)
    assert up.returncode == 0, err
    ours = [pid for pid, line in marked_pids(environment).items() if "stub_process" in line]
    assert all(wait_gone(pid, 20.0) for pid in ours)
    assert ray_nodes.process.poll() is None, "the Ray that was joined was ended"
    ray_nodes.process.stdin.close()
    ray_nodes.process.wait(60)
    assert wait_all_gone(environment, 30.0) == {}
