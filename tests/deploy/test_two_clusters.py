"""Two clusters on one host, with stubs for our processes: each command reaches the one it means."""

import json
import os
import signal

import pytest

from tests.deploy.processes import free_ports, marked_environment, marked_pids, wait_all_gone
from tests.deploy.test_scale import conductor, nodes, started

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]


class Stubs:
    """Clusters of stubs in one cache folder."""

    def __init__(self, folder):
        self.folder = folder
        self.started = []

    def configured(self, name, text=""):
        http, grpc = free_ports(2)
        file = self.folder / f"{name}.yaml"
        file.write_text(f"cache_dir: {self.folder}\nserver: {{http_port: {http}, grpc_port: {grpc}}}\n{text}")
        return file, http

    def start(self, file):
        environment = marked_environment()
        up = started(file, environment)
        self.started.append((up, environment))
        return up, environment

    def serving(self, file):
        up, environment = self.start(file)
        assert json.loads(up.stdout.readline())["model"] == "smollm2"
        next(line for line in up.stderr if "Ctrl-C drains" in line)
        return up, environment


@pytest.fixture
def stubs(tmp_path):
    stubs = Stubs(tmp_path)
    yield stubs
    for up, environment in stubs.started:
        up.kill()
        up.communicate()
        for pid in marked_pids(environment):
            os.kill(pid, signal.SIGKILL)


def test_each_command_reaches_the_cluster_it_means(stubs):
    (a_file, a_port), (b_file, b_port) = stubs.configured("a", "name: first\n"), stubs.configured("b")
    (a, in_a), (b, in_b) = stubs.serving(a_file), stubs.serving(b_file)
    here = marked_environment()

    def run(*arguments, status=0):
        done = conductor(here, *arguments)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    run("scale", "prefill=2", "-c", str(a_file))
    assert nodes(in_a).keys() == {"prefill-0", "prefill-1", "decode-0"}
    assert nodes(in_b).keys() == {"prefill-0", "decode-0"}
    told = run("restart", "-c", str(stubs.configured("c")[0]), status=1)
    assert "no cluster was started with" in told
    assert f"first (pid {a.pid}, {a_file}, 127.0.0.1:{a_port})" in told
    assert f"{b_port} (pid {b.pid}, {b_file}, 127.0.0.1:{b_port})" in told

    second, _ = stubs.start(a_file)
    _, refused = second.communicate(timeout=60)
    assert second.returncode == 1
    assert f"server.http_port: port {a_port} is that of the cluster first (pid {a.pid}" in refused
    assert "✓" not in refused, "something was started before the ports were looked at"

    assert "node is up" in run("logs", "prefill-1", "-c", str(a_file))
    told = run("logs", "prefill-1", "-c", str(b_file), status=1)
    assert "there are: conductor, decode-0, prefill-0" in told
    targets = {path.stem: json.loads(path.read_text()) for path in (stubs.folder / "targets").iterdir()}
    assert {name: len(each) for name, each in targets.items()} == {"first": 4, str(b_port): 3}

    assert "first: ended" in run("stop", "-c", str(a_file))
    assert a.wait(60) == 0
    assert wait_all_gone(in_a, 60.0) == {}
    run("scale", "decode=2", "-c", str(b_file))
    assert nodes(in_b).keys() == {"prefill-0", "decode-0", "decode-1"}, (
        "it could not be scaled after the other's end"
    )
    assert [path.stem for path in (stubs.folder / "targets").iterdir()] == [str(b_port)]
    assert "node is up" in run("logs", "prefill-1", "-c", str(a_file)), "the logs of its last run"
    run("stop", "--now", "-c", str(b_file))
    assert b.wait(60) == 0
    assert wait_all_gone(in_b, 60.0) == {}
    assert "no cluster was started with" in run("stop", "-c", str(b_file), status=1)
