"""`conductor up` on several Ray nodes of one machine: pools on their own, a node killed, another added."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.processes import ROOT, marked_environment, marked_pids, wait_all_gone, wait_gone

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

HOLDER = """
import json, sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
nodes = {}
print(json.dumps({"address": cluster.address}), flush=True)
for line in sys.stdin:
    verb, name, resource = line.split()
    if verb == "add":
        nodes[name] = cluster.add_node(num_cpus=2, resources={} if resource == "-" else {resource: 1})
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
    # Ray's own detection of a lost node takes 16 s by default. A killed one refuses connections
    # at once; one that is slow on a busy machine does not, and has longer.
    environment = marked_environment(
        RAY_health_check_initial_delay_ms="1000",
        RAY_health_check_period_ms="500",
        RAY_health_check_timeout_ms="5000",
        RAY_health_check_failure_threshold="4",
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
    """The raylet that a process of ours, and its spare, hang on: their actor's worker's parent."""
    pids = [pid for pid, line in marked_pids(environment).items() if f"{process}.json" in line]
    [host] = {parent(parent(pid)) for pid in pids}
    return host


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_pools_keep_to_their_hosts_and_a_lost_host_is_replaced(ray_nodes, environment, tmp_path):
    ray_nodes.ask("add", "p", "prefill")
    ray_nodes.ask("add", "d", "decode")
    config = "hosts: apart\nprefill: {resource: prefill}\ndecode: {nodes: 2, resource: decode}\n"
    up, _ = started(tmp_path, config, environment, ray_nodes)
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

    end(up, environment, ray_nodes)


def started(tmp_path, config, environment, ray_nodes):
    """Run `conductor up` with stubs in that Ray cluster; return the process and its cluster.yaml."""
    file = tmp_path / "cluster.yaml"
    file.write_text(f"cache_dir: {tmp_path}/cache\nserver: {{http_port: 0, grpc_port: 0}}\n{config}")
    up = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "run_stub_cluster.py"), str(file), "--json"],
        cwd=ROOT,
        env={**environment, "RAY_ADDRESS": ray_nodes.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return up, file


def end(up, environment, ray_nodes):
    """Nothing of ours is left, and the Ray that was joined is."""
    up.send_signal(signal.SIGTERM)
    _, err = up.communicate(timeout=100)
    assert up.returncode == 0, err
    ours = [pid for pid, line in marked_pids(environment).items() if "stub_process" in line]
    assert all(wait_gone(pid, 20.0) for pid in ours)
    assert ray_nodes.process.poll() is None, "the Ray that was joined was ended"
    ray_nodes.process.stdin.close()
    ray_nodes.process.wait(60)
    assert wait_all_gone(environment, 30.0) == {}


def scaled(file, environment, *sizes):
    command = f"from deploy.cli import main; main({['scale', *sizes, '-c', str(file)]!r})"
    return subprocess.run(
        [sys.executable, "-c", command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_pairs_share_a_host_and_move_to_another_together(ray_nodes, environment, tmp_path):
    for name in ("a", "b"):
        ray_nodes.ask("add", name, "-")
    config = "hosts: together\nprefill: {nodes: 2}\ndecode: {nodes: 2}\n"
    up, file = started(tmp_path, config, environment, ray_nodes)
    assert json.loads(up.stdout.readline())["model"] == "smollm2"
    next(line for line in up.stderr if "Ctrl-C drains" in line)

    def hosts_of_pairs():
        pairs = [{host_of(environment, f"{role}-{n}") for role in ("prefill", "decode")} for n in (0, 1)]
        assert [len(pair) for pair in pairs] == [1, 1], "a pair is split"
        return pairs

    before = hosts_of_pairs()
    assert before[0] != before[1], "a host of two CPUs took four nodes"

    # a host dies with a pair on it: both are started again on the host that is added
    ray_nodes.ask("remove", "b", "-")
    ray_nodes.ask("add", "c", "-")
    for _ in range(2):
        read_until(up.stderr, ": ready")
    after = hosts_of_pairs()
    assert sorted(pair in before for pair in after) == [False, True]

    lone = scaled(file, environment, "prefill=1")
    assert lone.returncode == 1
    assert "they are pairs" in lone.stderr
    fewer = scaled(file, environment, "prefill=1", "decode=1")
    assert fewer.stdout.splitlines()[-1] == "prefill-1: gone", fewer.stderr
    more = scaled(file, environment, "prefill=2", "decode=2")
    assert more.returncode == 0, more.stderr
    assert hosts_of_pairs()[0] == after[0]
    end(up, environment, ray_nodes)
