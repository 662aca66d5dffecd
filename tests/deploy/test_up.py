"""`conductor up` on a real local Ray, with stub programs for our own processes."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.api_client import is_healthy
from deploy.launch import reachable_address
from tests.deploy.processes import (
    ROOT,
    listening,
    marked_environment,
    marked_pids,
    wait_all_gone,
)

PROGRAM = (sys.executable, str(Path(__file__).parent / "run_stub_cluster.py"))
STOP_S = 90.0

# When the launcher is killed, Ray's raylet dies with it, and Ray's own agents find out by
# asking: the last was gone 60 to 80 s later (2 busy cores, 2026-11-21).
ORPHAN_S = 150.0
"""For everything to end, Ray included, on a busy machine."""


def write_yaml(folder):
    path = folder / "cluster.yaml"
    path.write_text(f"cache_dir: {folder}/cache\nserver: {{http_port: 0, grpc_port: 0}}\n")
    return path


@pytest.fixture
def cluster_yaml(tmp_path):
    return write_yaml(tmp_path)


@pytest.fixture
def start(cluster_yaml):
    with starting(cluster_yaml) as begin:
        yield begin


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A cluster that is ready, its environment, what it says of itself, and its folder, its home too.

    It is of the tests that look at it and of the one that ends it, the last of them.
    """
    folder = tmp_path_factory.mktemp("up")
    with starting(write_yaml(folder)) as begin:
        process, environment = begin("--json", HOME=str(folder))
        yield process, environment, json.loads(process.stdout.readline()), folder


@contextmanager
def starting(cluster_yaml):
    """Give what starts the program with a configuration, and kill what is left of it."""
    started = []

    def begin(*arguments, **environment):
        environment = marked_environment(**environment)
        process = subprocess.Popen(
            [*PROGRAM, str(cluster_yaml), *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append((process, environment))
        return process, environment

    try:
        yield begin
    finally:
        for process, environment in started:
            process.kill()
            process.communicate()
            for pid in marked_pids(environment):
                os.kill(pid, signal.SIGKILL)


def until(stream, words):
    """Read lines until one holds all of `words`; return it."""
    for line in stream:
        if all(word in line for word in words):
            return line
    raise AssertionError(f"the end, and no {words}")


def pid_of(environment, *words):
    """The first of them: a conductor's spare was begun after it, and has its command line."""
    return min(pid for pid, line in marked_pids(environment).items() if all(word in line for word in words))


def test_an_answer_goes_to_stdout_and_nothing_is_left(start):
    process, environment = start("--prompt", "hello there", "--exit")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert out == "HELLO THERE\n"
    stages = [line.split()[1] for line in err.splitlines() if line.startswith("✓")]
    assert sorted(stages[:2]) == ["model", "ray"]
    assert stages[2:] == ["conductor", "nodes", "the", "stop"]
    assert wait_all_gone(environment, STOP_S) == {}


@pytest.mark.full
def test_an_answer_that_nobody_reads_ends_the_cluster_without_a_word(start):
    process, environment = start("--prompt", "hello there")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(100) == 128 + signal.SIGPIPE
    assert "Traceback" not in err
    assert "nothing is left running" in err
    assert wait_all_gone(environment, STOP_S) == {}


LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 as the kernel lists them."""


def test_local_ray_listens_on_loopback_and_nobody_else_reads_its_token_or_the_run(started):
    _, environment, _, folder = started
    listeners = listening(marked_pids(environment))
    assert len(listeners) > 5
    assert {host for host, _ in listeners} <= set(LOOPBACK)
    [run] = (folder / "cache" / "runs").iterdir()
    token = folder / ".ray" / "auth_token"
    modes = {path.name: path.stat().st_mode & 0o777 for path in (run, token.parent, token, *run.iterdir())}
    assert modes.pop(run.name) == modes.pop(".ray") == 0o700
    assert {name for name, mode in modes.items() if mode != 0o600} == set()
    assert {"auth_token", "conductor.json", "conductor.log"} <= set(modes)


def test_what_dies_is_restarted_and_ctrl_c_leaves_nothing(started):
    process, environment, ready, _ = started
    assert ready["model"] == "smollm2"

    os.kill(pid_of(environment, "decode-0.json"), signal.SIGKILL)
    until(process.stderr, ["decode-0: exited", "status=-9"])
    until(process.stderr, ["decode-0: ready"])

    os.kill(pid_of(environment, "conductor.json"), signal.SIGKILL)
    line = until(process.stderr, ["conductor: ready"])
    assert f"http_port={ready['http_address'].partition(':')[2]}" in line

    # the actor's own process: Ray starts another, which adopts the conductor
    conductor = pid_of(environment, "conductor.json")
    os.kill(os_parent(conductor), signal.SIGKILL)
    until(process.stderr, ["conductor: adopted", f"pid={conductor}"])
    assert is_healthy(ready["http_address"])

    # as a terminal does it: to every process of the foreground group
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "nothing is left running" in err
    assert "Task was destroyed" not in err
    assert wait_all_gone(environment, STOP_S) == {}


@pytest.mark.full
@pytest.mark.parametrize("part", ["raylet/raylet", "gcs/gcs_server"])
@pytest.mark.timeout(300)
def test_what_serves_outlives_ray_and_ends_with_the_command(start, part):
    process, environment = start("--json")
    ready = json.loads(process.stdout.readline())
    serving = {pid_of(environment, f"{name}.json") for name in ("conductor", "prefill-0", "decode-0")}
    os.kill(pid_of(environment, part), signal.SIGKILL)
    until(process.stderr, ["Ray has ended. conductor, decode-0, prefill-0 serve on without it"])
    assert serving <= set(marked_pids(environment))
    assert is_healthy(ready["http_address"])
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert process.returncode == 0
    assert wait_all_gone(environment, STOP_S) == {}


@pytest.mark.full
def test_cluster_that_is_open_to_other_hosts_names_an_address_that_they_reach(start, cluster_yaml):
    cluster_yaml.write_text(cluster_yaml.read_text().replace("{http", "{host: 0.0.0.0, insecure: true, http"))
    process, environment = start("--json")
    line = until(process.stderr, ["conductor", "http "])
    assert f"http {reachable_address('127.0.0.1')}:" in line
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert wait_all_gone(environment, STOP_S) == {}


def os_parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.full
def test_a_second_ctrl_c_does_not_wait_for_the_drain(start):
    process, environment = start("--json", FAULT="deaf", NODE_DRAIN_S="3600")
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0
    assert "SIGTERM received" not in err, "Ray's handler of SIGTERM is in force: it aborts a longer drain"
    assert wait_all_gone(environment, STOP_S) == {}


@pytest.mark.parametrize("path", ["cluster.yaml", "cluster.yaml/below"])
def test_a_disk_that_nodes_cannot_write_to_is_refused_before_ray_starts(path, start, cluster_yaml):
    path = cluster_yaml.parent / path
    with cluster_yaml.open("a") as file:
        file.write(f"store: {{dram_gib: 0.1, disk_path: {path}}}\n")
    process, environment = start("--exit")
    _, err = process.communicate(timeout=STOP_S)
    assert process.returncode == 1
    assert f"store.disk_path: {path}: " in err
    assert "name a folder that nodes may write to" in err
    assert "✓ ray" not in err
    assert wait_all_gone(environment, STOP_S) == {}


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_killed_launcher_leaves_nothing(start):
    process, environment = start("--json")
    process.stdout.readline()
    assert len(marked_pids(environment)) > 5
    process.kill()
    assert wait_all_gone(environment, ORPHAN_S) == {}


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "told"),
    [("prepare", "there is no such model"), ("node", "ended with status 1 before it was ready")],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(start, fault, told):
    process, environment = start("--exit", FAULT=fault)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert out == ""
    assert told in err
    assert "Traceback" not in err
    assert wait_all_gone(environment, STOP_S) == {}
