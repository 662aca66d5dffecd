"""`pip wheel .` makes a wheel that works from an empty folder: the commands, a replay, the page at /ui."""

import json
import os
import subprocess
import sys
import tomllib
import urllib.request
import zipfile
from pathlib import Path

import pytest

from tests.deploy.processes import ROOT, marked_environment, marked_pids, wait_all_gone

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
MODELS = Path("~/.cache/conductor-cluster").expanduser()


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Return the folder that the wheel installs."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(built),
        ".",
    ]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(built / "installed")
    return built / "installed"


def conductor(arguments, unpacked, folder, **environment):
    """Start the command of the wheel in a folder of its own."""
    code = "import sys; from deploy.cli import main; main(sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={**os.environ, **environment, "PYTHONPATH": str(unpacked)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def answer(arguments, unpacked, folder):
    process = conductor(arguments, unpacked, folder)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def test_the_code_that_runs_is_the_wheels(unpacked, tmp_path):
    code = "import conductor.api.web_page as page; print(page.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith(str(unpacked))


def test_the_command_says_what_it_is_and_can_do(unpacked, tmp_path):
    assert answer(["--version"], unpacked, tmp_path) == f"conductor {VERSION}\n"
    assert "replay" in answer(["--help"], unpacked, tmp_path)


def test_a_trace_is_replayed(unpacked, tmp_path):
    rows = [
        {"timestamp": 1000 * number, "input_length": 600, "output_length": 20, "hash_ids": [1, number + 2]}
        for number in range(20)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = answer(["replay", "trace.jsonl", "--nodes", "2P2D"], unpacked, tmp_path)
    assert "TTFT" in said


@pytest.mark.long
def test_a_cluster_starts_and_serves_its_page(unpacked, tmp_path):
    (tmp_path / ".cache" / "conductor-cluster").mkdir(parents=True)
    for name in ("models", "digests"):
        (tmp_path / ".cache" / "conductor-cluster" / name).symlink_to(MODELS / name)
    (tmp_path / "cluster.yaml").write_text(
        "server: {http_port: 0, grpc_port: 0}\n"
        "prefill: {engine: {kv_cache_gib: 0.1, threads: 1}}\n"
        "decode: {engine: {kv_cache_gib: 0.1, threads: 1}}\n"
    )
    environment = marked_environment(HOME=str(tmp_path))
    up = conductor(["up", "-c", "cluster.yaml"], unpacked, tmp_path, **environment)
    try:
        said = []
        url = next(line.split("/v1")[0].split()[-1] for line in _kept(up.stdout, said) if "/v1" in line)
        with urllib.request.urlopen(f"{url}/ui", timeout=60) as page:
            assert b"<title>Conductor</title>" in page.read()
        up.terminate()
        assert up.wait(timeout=120) == 0
        assert wait_all_gone(environment, 60.0) == {}
    finally:
        for pid in marked_pids(environment):
            os.kill(pid, 9)


def _kept(lines, said):
    """Yield the lines of a process, and keep them for whoever asks why it failed."""
    for line in lines:
        said.append(line)
        yield line
    raise AssertionError("".join(said))
