"""The RayService's application on a real Ray with Serve, deployed as KubeRay does it; stubs for processes."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.cluster.asking import until
from tests.deploy.processes import ROOT, free_ports, marked_environment, marked_pids

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

TOKEN = "t" * 40
STUBS = (sys.executable, str(Path(__file__).parent / "run_stub_cluster.py"))


def answer(url, **more):
    """The body of an answer, None: nobody answers or it is a refusal."""
    request = urllib.request.Request(url, **more)
    try:
        with urllib.request.urlopen(request, timeout=60) as got:
            return got.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return None


@pytest.fixture
def environment():
    environment = marked_environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN)
    yield environment
    for pid in marked_pids(environment):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def head(environment, tmp_path):
    """A head as in the manifest, but that nodes run on it too: its dashboard's address and its agent's."""
    gcs, dashboard, agent, agent_grpc, metrics = free_ports(5)
    arguments = {
        "port": gcs,
        "node-ip-address": "127.0.0.1",
        "dashboard-port": dashboard,
        "dashboard-agent-listen-port": agent,
        "dashboard-agent-grpc-port": agent_grpc,
        "metrics-export-port": metrics,
        "num-cpus": 2,
        "object-store-memory": 80 * 1024 * 1024,
    }
    command = [Path(sys.executable).parent / "ray", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--{name}={value}" for name, value in arguments.items()]
    with (tmp_path / "ray.log").open("w") as log:
        # KubeRay sets RAY_ADDRESS in each container
        here = {**environment, "RAY_ADDRESS": f"127.0.0.1:{gcs}"}
        started = subprocess.Popen(command, env=here, stdout=log, stderr=log)
    yield f"http://127.0.0.1:{dashboard}", f"http://127.0.0.1:{agent}"
    started.terminate()
    started.wait(60)


def wanted(file, proxy_port):
    """The manifest's own configuration, but for the command, which starts stubs, and the proxy's port."""
    for document in yaml.safe_load_all((ROOT / "deploy" / "kuberay" / "service.yaml").read_text()):
        if document["kind"] == "RayService":
            config = yaml.safe_load(document["spec"]["serveConfigV2"])
            config["http_options"] = {"host": "127.0.0.1", "port": proxy_port}
            command = config["applications"][0]["args"]["command"]
            program, verb, flag, *rest = command.split()
            assert (program, verb, flag, rest[0]) == ("conductor", "up", "--json", "-c")
            config["applications"][0]["args"] = {"command": " ".join([*STUBS, str(file), flag])}
            return config
    raise AssertionError("no RayService")


def test_the_application_runs_a_cluster_says_where_it_is_and_drains_it(head, environment, tmp_path):
    dashboard, agent = head
    # what the manifest's probes ask, who have no token
    until(lambda: "success" in (answer(f"{agent}/api/healthz") or ""), 120.0)
    applications = f"{dashboard}/api/serve/applications/"
    authorized = {"X-Ray-Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    until(lambda: answer(applications, headers=authorized), 120.0)
    assert answer(applications) is None, "Ray's token is asked for"

    file = tmp_path / "cluster.yaml"
    file.write_text(f"cache_dir: {tmp_path}/cache\nserver: {{http_port: 0, grpc_port: 0}}\n")
    [proxy] = free_ports(1)
    body = json.dumps(wanted(file, proxy)).encode()
    assert answer(applications, headers=authorized, data=body, method="PUT") is not None

    def state():
        told = json.loads(answer(applications, headers=authorized) or "{}").get("applications", {})
        return told.get("conductor", {}).get("status")

    until(lambda: state() in ("RUNNING", "DEPLOY_FAILED", "UNHEALTHY"), 180.0)
    assert state() == "RUNNING", answer(applications, headers=authorized)
    endpoints = json.loads(answer(f"http://127.0.0.1:{proxy}/"))
    assert endpoints["model"] == "smollm2"
    assert json.loads(answer(f"http://{endpoints['http_address']}/health")) == {"status": "ok"}
    assert answer(f"http://127.0.0.1:{proxy}/-/healthz") == "success"
    names = {name for line in stubs(environment) for name in re.findall(r"[\w-]+\.json", line)}
    assert names == {"conductor.json", "prefill-0.json", "decode-0.json"}

    empty = json.dumps({"applications": []}).encode()
    assert answer(applications, headers=authorized, data=empty, method="PUT") is not None
    until(lambda: not stubs(environment), 120.0)
    assert answer(f"{agent}/api/healthz"), "the Ray that was joined was ended"


def stubs(environment):
    return [line for line in marked_pids(environment).values() if "stub_process" in line]
