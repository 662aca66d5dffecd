"""Ray's own autoscaler starts hosts for nodes that wait for room, and ends them when they idle.

A real autoscaler and real raylets; the hosts are Ray's fake ones, on this machine, in the groups of
`deploy/ray-cluster-aws.yaml`. Stubs for our processes.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.processes import ROOT, free_ports, marked_environment, marked_pids, wait_gone
from tests.deploy.test_ray_cluster import host_of, scaled

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

IDLE_S = 6.0
"""After which a host without nodes is ended."""
CONFIG = "hosts: apart\nprefill: {resource: prefill}\ndecode: {resource: decode}\n"


def groups(address):
    """The cluster file, with fake hosts in place of a cloud's."""
    config = yaml.safe_load((ROOT / "deploy" / "ray-cluster-aws.yaml").read_text())
    types = config["available_node_types"]
    for group in types.values():
        group["node_config"] = {}
        group["resources"] = {**group["resources"], "CPU": 2, "object_store_memory": 80 * 1024 * 1024}
        group["resources"].pop("GPU", None)
    types["ray.head.default"] = {**types.pop("head"), "max_workers": 0}
    types["ray.head.default"]["resources"]["CPU"] = 0
    provider = {"type": "fake_multinode", "gcs_address": address}
    flags = ("use_node_id_as_ip", "disable_node_updaters", "disable_launch_config_check")
    config.pop("rsync_exclude")
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        **config,
        **{f"{name}_commands": [] for name in commands},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "auth": {},
        "file_mounts": {},
        "head_node_type": "ray.head.default",
        "provider": {**provider, **dict.fromkeys(flags, True)},
        "idle_timeout_minutes": IDLE_S / 60,
    }


@pytest.fixture
def environment():
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 40}
    environment = marked_environment(AUTOSCALER_UPDATE_INTERVAL_S="1", RAY_FAKE_CLUSTER="1", **token)
    yield environment
    for pid in marked_pids(environment):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def head(environment, tmp_path):
    """The address of a Ray whose autoscaler has those groups."""
    gcs, agent, metrics = free_ports(3)
    address = f"127.0.0.1:{gcs}"
    file = tmp_path / "groups.json"
    file.write_text(json.dumps(groups(address)))
    arguments = {
        "port": gcs,
        "node-ip-address": "127.0.0.1",
        "dashboard-agent-listen-port": agent,
        "metrics-export-port": metrics,
        "include-dashboard": "false",
        "num-cpus": 0,
        "object-store-memory": 80 * 1024 * 1024,
        "autoscaling-config": file,
    }
    command = [Path(sys.executable).parent / "ray", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--{name}={value}" for name, value in arguments.items()]
    with (tmp_path / "ray.log").open("w") as log:
        started = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    yield address
    started.kill()
    started.wait()


def test_a_group_grows_for_nodes_that_wait_and_shrinks_when_they_are_gone(head, environment, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(f"cache_dir: {tmp_path}/cache\nserver: {{http_port: 0, grpc_port: 0}}\n{CONFIG}")
    up = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "run_stub_cluster.py"), str(file), "--json"],
        cwd=ROOT,
        env={**environment, "RAY_ADDRESS": head},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # the head has no room for nodes: the autoscaler has started a host of each group
    assert "smollm2" in up.stdout.readline(), up.communicate(timeout=60)[1]
    next(line for line in up.stderr if "Ctrl-C drains" in line)
    before = {name: host_of(environment, name) for name in ("conductor", "prefill-0", "decode-0")}
    assert len(set(before.values())) == 3

    more = scaled(file, environment, "prefill=2")
    assert more.stdout.splitlines()[-1] == "prefill-1: ready", more.stderr
    grown = host_of(environment, "prefill-1")
    assert grown not in before.values(), "no host was started for it"

    fewer = scaled(file, environment, "prefill=1")
    assert fewer.stdout.splitlines()[-1] == "prefill-1: gone", fewer.stderr
    assert wait_gone(grown, 120.0), "its host idles and was not ended"
    assert {name: host_of(environment, name) for name in before} == before, "another host was ended"

    up.send_signal(signal.SIGTERM)
    _, err = up.communicate(timeout=100)
    assert up.returncode == 0, err
