"""The commands of the documents that need a cluster are run as they stand there, on one with the real model.

Only what a reader would fill in is filled in (ID, TEXT, NAME, FOLDER), and what would go on for ever is given
an end. Commands of a trace are run in test_docs_commands.py; that a line is one the command line takes is in
test_docs.py.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.deploy.processes import marked_environment, marked_pids, wait_all_gone
from tests.deploy.test_docs import COMMANDS, DOCUMENTS
from tests.deploy.test_docs_commands import typed_lines

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

CLUSTER = """
prefill: {engine: {kv_cache_gib: 0.1, threads: 1}}
decode: {engine: {kv_cache_gib: 0.1, threads: 1}}
scheduler: {decision_log: decisions.jsonl}
trace_out: FOLDER
slo: {ttft_s: 600.0, tbt_s: 60.0}
"""
BEFORE = ("keys", "doctor")
WHILE_IT_RUNS = (
    "status",
    "top",
    "chat",
    "explain",
    "doctor",
    "bench",
    "scale",
    "autoscale",
    "restart",
    "logs",
)
AFTERWARDS = ("profile", "replay")
"""Commands of the decision log that the cluster wrote."""
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_AN_END = {"top": "top --times 1"}
FILLED_IN = {" --every 300": "", " -f": "", "ID": "asked-1", "TEXT": "hello", "NAME": "ops"}
STEPS_OF_A_FIT = 30
"""Prompts of different lengths, a step each: more than the 20 that `conductor profile --from-log` takes."""
MODELS = Path("~/.cache/conductor-cluster").expanduser()


def lines(verb, told=""):
    """The documents' lines with that verb, each once, that have `told`; or have not, if it begins with !."""
    found = dict.fromkeys(line for _, line in COMMANDS if line.split()[0] == verb)
    if told.startswith("!"):
        return [line for line in found if told[1:] not in line]
    return [line for line in found if told in line]


def calls():
    """Return the calls of curl that stand in the documents, each once."""
    found = (line for path in DOCUMENTS for line in typed_lines(path) if line.startswith("curl "))
    return list(dict.fromkeys(re.sub(r"\s+#.*$", "", line) for line in found))


def clients():
    """Return the clients in Python that stand in the documents."""
    blocks = [each for path in DOCUMENTS for each in re.findall(PYTHON, path.read_text())]
    return [block for block in blocks if "base_url=" in block]


class Reader:
    """Somebody who types what is written, in a home of their own with the model already there."""

    def __init__(self, home):
        self.home = home
        self.environment = marked_environment(HOME=str(home))
        self.ran = []
        cache = home / ".cache" / "conductor-cluster"
        cache.mkdir(parents=True)
        for name in ("models", "digests"):
            (cache / name).symlink_to(MODELS / name)
        (home / "cluster.yaml").write_text(CLUSTER)

    def start(self, line, **more):
        self.ran.append(line)
        line = WITH_AN_END.get(line, line)
        for written, typed in FILLED_IN.items():
            line = line.replace(written, typed)
        command = [sys.executable, "-c", f"from deploy.cli import main; main({shlex.split(line)!r})"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.home, env=self.environment, **streams, **more)

    def type(self, line):
        process = self.start(line, stdin=subprocess.DEVNULL)
        told, _ = process.communicate(timeout=400)
        assert process.returncode == 0, f"conductor {line}: {told[-3000:]}\n{self.seen_of_the_cluster()}"
        return told

    def call(self, line):
        """Call with curl as it is written; an answer that is an error ends the test."""
        program, *arguments = shlex.split(line.replace("/ID", "/asked-1"))
        told = self.run([program, "--fail-with-body", "--silent", "--show-error", *arguments])
        assert told.strip(), f"{line} shows nothing"

    def run(self, command):
        done = subprocess.run(
            command,
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def seen_of_the_cluster(self):
        """Return which processes there are, and the ends of their logs: what a failure is understood by."""
        logs = sorted(self.home.glob(".cache/conductor-cluster/runs/*/*.log"))
        ends = [f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs]
        return "\n".join([f"{pid}: {line}" for pid, line in marked_pids(self.environment).items()] + ends)


def ports_are_free():
    try:
        for port in (8000, 50051):
            socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not ports_are_free(), reason="ports 8000 and 50051, which the documents name, are in use")
def test_the_documents_commands_work_as_written(tmp_path):
    reader = Reader(tmp_path)
    try:
        for verb in BEFORE:
            for line in lines(verb, "!--address"):
                reader.type(line)
        [serve] = lines("up", "!--exit")
        up = reader.start(serve, stdin=subprocess.DEVNULL)
        told = list(until(up.stdout, "Ctrl-C drains"))
        assert "Ctrl-C drains" in told[-1], "".join(told) + reader.seen_of_the_cluster()
        ask("asked-1", "A lease is")
        for verb in WHILE_IT_RUNS:
            for line in lines(verb, "--address" if verb == "doctor" else ""):
                reader.type(line)
        for line in calls():
            reader.call(line)
        for block in clients():
            reader.run([sys.executable, "-c", block])
        ask_for_a_fit()
        for line in lines("stop"):
            reader.type(line)
        told, _ = up.communicate(timeout=120)
        assert up.returncode == 0, told[-3000:]
        (tmp_path / "other-day.jsonl").write_bytes((tmp_path / "decisions.jsonl").read_bytes())
        for verb in AFTERWARDS:
            for line in [each for each in lines(verb) if re.search("decisions|other-day", each)]:
                reader.type(line)
        for line in lines("up", "--exit"):
            reader.type(line)
        assert set(reader.ran) >= {
            line for _, line in COMMANDS if line.split()[0] in {"up", *BEFORE, *WHILE_IT_RUNS}
        }
        assert wait_all_gone(reader.environment, 60.0) == {}
    finally:
        for pid in marked_pids(reader.environment):
            os.kill(pid, signal.SIGKILL)


def until(lines_of_text, wanted):
    """Yield what is read, to the line with what is wanted, or to the end."""
    for line in lines_of_text:
        yield line
        if wanted in line:
            return


def ask_for_a_fit():
    """Send what a profile is fitted to, after the restarts: a node's timeline begins with its process."""
    for number in range(STEPS_OF_A_FIT):
        ask(f"fitted-{number}", f"{number} " + "a lease " * (number + 1))


def ask(request_id, prompt):
    """Send a request, and check that it is answered."""
    body = json.dumps({"model": "smollm2", "prompt": prompt, "max_tokens": 4}).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
