"""The real model under Ray: a cluster is restarted and resized while clients ask it, and none fails."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx
import pytest

from tests.deploy.processes import ROOT, marked_environment, marked_pids, wait_all_gone

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

CONFIG = """
name: resized
cache_dir: {folder}
server: {{http_port: 0, grpc_port: 0}}
prefill: {{engine: {{kv_cache_gib: 0.3, threads: 1}}}}
decode: {{engine: {{kv_cache_gib: 0.3, threads: 1}}}}
scheduler: {{decision_log: {folder}/asked.jsonl}}
"""
BOUNDS = "slo: {ttft_s: 600.0, tbt_s: 60.0}\n"
"""What `conductor autoscale` judges by; so far off that advice is the same on a busy machine."""

PROMPTS = [list(range(1000 + 300 * number, 1100 + 300 * number)) for number in range(3)]


class Clients:
    """Ask on and on: whole answers, and streams that last longer than a node takes to drain."""

    def __init__(self, url):
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on, args=(n,)) for n in (8, 200)]
        self.failures = []
        self.answers = {}

    @contextmanager
    def asking(self):
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()

    def _ask_on(self, max_tokens):
        with httpx.Client(base_url=self._url, timeout=300) as client:
            number = 0
            while not self._over.is_set():
                number += 1
                try:
                    self._ask(client, number % len(PROMPTS), max_tokens)
                except (httpx.HTTPError, AssertionError, KeyError, IndexError) as error:
                    self.failures.append(f"{max_tokens} tokens: {error!r}")

    def _ask(self, client, which, max_tokens):
        body = {"model": "smollm2", "prompt": PROMPTS[which], "max_tokens": max_tokens, "ignore_eos": True}
        body |= {"temperature": 0, "stream": True}
        text = ""
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        assert line or text
        self.answers.setdefault((which, max_tokens), []).append(text)


def conductor(environment, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", f"from deploy.cli import main; main({list(arguments)!r})"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_no_request_fails_while_the_cluster_is_restarted_and_resized(tmp_path):
    file, judged = tmp_path / "c.yaml", tmp_path / "judged.yaml"
    file.write_text(CONFIG.format(folder=tmp_path))
    judged.write_text(CONFIG.format(folder=tmp_path) + BOUNDS)
    environment = marked_environment()
    up = subprocess.Popen(
        [sys.executable, "-c", f"from deploy.cli import main; main(['up', '--json', '-c', {str(file)!r}])"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        address = json.loads(up.stdout.readline())["http_address"]
        with Clients(f"http://{address}").asking() as clients:
            said = conductor(environment, "restart", "-c", str(file))
            assert [line for line in said if line.endswith("gone")], said
            assert conductor(environment, "scale", "prefill=2", "-c", str(file))[-1] == "prefill-1: ready"
            advice = ["autoscale", "-c", str(judged), "--address", address, "--share", "0.9", "--max", "3"]
            assert conductor(environment, *advice)[-1] == "prefill-1: gone"
            assert conductor(environment, *advice)[-1] == "nothing to change"
        assert clients.failures == []
        for (which, max_tokens), answers in clients.answers.items():
            assert len(set(answers)) == 1, f"prompt {which} was answered in two ways in {max_tokens} tokens"
            short, long = clients.answers[which, 8][0], clients.answers[which, 200][0]
            assert long.startswith(short)
        assert sum(map(len, clients.answers.values())) >= 6
        up.send_signal(signal.SIGTERM)
        up.communicate(timeout=100)
        assert up.returncode == 0
        assert wait_all_gone(environment, 30.0) == {}
    finally:
        for pid in marked_pids(environment):
            os.kill(pid, signal.SIGKILL)
        up.communicate()
