"""`conductor up` as it is deployed, under a Ray of its own, with two nodes of the small model.

There is one of each role: a process that ends is missed at once, and no other stands in for it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from base.metrics import samples_of
from bench.faults.cluster import BLOCK_SIZE, CHUNK_TOKENS, KV_CACHE_GIB, PAUSE_S, wait_until
from bench.faults.descendants import Family, Process, marked
from deploy.api_client import ApiError, read_json, read_text, split_address
from deploy.plan import LocalModel
from deploy.supervisor import SPARE_FLAG

NAMES = ("conductor", "prefill-0", "decode-0")
ACTOR = "ray::ActorProcess"
"""The name that Ray gives the worker in which a supervisor lives."""
END_S = 150.0
"""The seconds that `conductor up` has to drain: it takes 80 s itself at most."""
GONE_S = 15.0
"""The seconds that the last processes have to end after `conductor up` has."""
LOG_TAIL = 2_000


class UpCluster:
    """A running one, seen from outside: its ports, its processes, its end."""

    def __init__(self, model: LocalModel, folder: Path) -> None:
        """Return when it serves; raises RuntimeError, with what it said, if it does not."""
        folder.mkdir(parents=True)
        engine = {
            "block_size": BLOCK_SIZE,
            "kv_cache_gib": KV_CACHE_GIB,
            "chunk_tokens": CHUNK_TOKENS,
            "threads": 1,
        }
        config = {
            "model": model.path,
            "served_model_name": model.name,
            "cache_dir": str(folder / "cache"),
            "server": {"http_port": 0, "grpc_port": 0},
            "prefill": {"nodes": 1, "engine": engine},
            "decode": {"nodes": 1, "engine": engine},
        }
        # JSON is YAML.
        (folder / "cluster.yaml").write_text(json.dumps(config))
        mark = secrets.token_hex(8)
        command = ("-c", "from deploy.cli import main; main()", "up", "--json", "-c", "cluster.yaml")
        self.log = folder / "up.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,
                env={**marked(mark), "PYTHONPATH": str(Path(__file__).parents[2])},
                start_new_session=True,
            )
        self.family = Family(self.process.pid, mark)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.kill_all()
            raise RuntimeError(f"`conductor up` did not start: {self.log.read_text()[-LOG_TAIL:]}")
        endpoints = json.loads(line)
        self.http_address: str = endpoints["http_address"]
        self.http_port = int(split_address(self.http_address)[1].rpartition(":")[2])
        self.grpc_address: str = endpoints["grpc_address"]
        self._supervisors = {name: self._first_supervisor(name) for name in NAMES}

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill_part_of_ray(self, program: str) -> None:
        """SIGKILL to the process below `conductor up` that runs so: raylet, gcs_server."""
        (pid,) = [each.pid for each in self.family.look() if each.program == program]
        os.kill(pid, signal.SIGKILL)

    def kill_supervisor(self, name: str) -> set[int]:
        """SIGKILL to the actor's worker that supervises a process; return which there were."""
        before = self._actors()
        os.kill(self._supervisors[name], signal.SIGKILL)
        return before

    def take_successor(self, name: str, before: set[int]) -> bool:
        """Return whether Ray has started another supervisor since there were those `before`."""
        found = self._actors() - before
        if found:
            (self._supervisors[name],) = found
        return bool(found)

    def life(self, name: str) -> str:
        """Return the moment of a process's start, which no successor shares; empty if it is away.

        A process that lets go of its ports lives on for a while. What is returned is of the one that serves.
        """
        try:
            if name == "conductor":
                samples = samples_of(read_text(self.http_address, "/metrics"))
                return next(str(value) for key, _, value in samples if key == "process_start_time_seconds")
        except ApiError:
            return ""
        nodes = self.status().get("nodes", ())
        return next((str(node["epoch"]) for node in nodes if node["id"] == name), "")

    def status(self) -> dict[str, Any]:
        """Return what GET /status answers; nothing if nobody does."""
        try:
            status: dict[str, Any] = read_json(self.http_address, "/status")
        except ApiError:
            return {}
        return status

    def end(self) -> dict[str, Any]:
        """SIGTERM; return how it ended, and how many processes were left then, which are killed."""
        asked_at_s = time.monotonic()
        by_itself = not self.is_running
        self.family.look()
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        took_s = time.monotonic() - asked_at_s
        status = self.process.returncode
        with suppress(TimeoutError):
            wait_until(lambda: not self.family.look(), GONE_S)
        left = sorted(each.program for each in self.kill_all())
        return {"status": status, "by_itself": by_itself, "took_s": round(took_s, 2), "left": left}

    def kill_all(self) -> list[Process]:
        """SIGKILL to whatever of it lives; return what that was."""
        left = self.family.look()
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.wait()
        return left

    def _first_supervisor(self, name: str) -> int:
        (parent,) = [each.parent for each in self.family.look() if is_process(each.command, name)]
        if parent not in self._actors():
            raise RuntimeError(f"{name} is not the child of an actor's worker")
        return parent

    def _actors(self) -> set[int]:
        return {each.pid for each in self.family.look() if each.program.startswith(ACTOR)}


def is_process(command: tuple[str, ...], name: str) -> bool:
    """Return whether a command line is that of a supervised process, and not of its spare."""
    return SPARE_FLAG not in command and any(word.endswith(f"/{name}.json") for word in command)


@contextmanager
def up_cluster(model: LocalModel, folder: Path) -> Iterator[UpCluster]:
    """Run one in the body, which ends it; nothing of it is left afterwards."""
    cluster = UpCluster(model, folder)
    try:
        yield cluster
    finally:
        cluster.kill_all()


def wait_while_running(cluster: UpCluster, condition: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether `condition` held within the time and before the cluster ended by itself."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s or not cluster.is_running:
            return False
        time.sleep(PAUSE_S)
    return True
