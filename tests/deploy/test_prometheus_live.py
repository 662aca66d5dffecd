"""A real Prometheus scrapes our metrics, evaluates our rules, and answers every panel's query."""

import json
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from base.messages import PrefillTimes
from base.metrics import ConductorMetrics, NodeMetrics, StoreMetrics, exposition, process_registry
from deploy.dashboards import DASHBOARDS

RULES = Path(__file__).parent.parent.parent / "deploy" / "prometheus" / "rules.yml"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed here"),
]

# An alert in the form of a panel: no data is the good case.
EMPTY_WHEN_ALL_IS_WELL = {"Held blocks while nothing runs: leaked"}


@pytest.fixture(scope="module")
def process():
    """Metrics of a conductor and a node that serve a request between every two scrapes."""
    registry = process_registry()
    conductor, node, store = ConductorMetrics(registry, "m"), NodeMetrics(registry), StoreMetrics(registry)

    def serve_a_request():
        conductor.ttft.observe(0.2)
        conductor.first_token(0.2, PrefillTimes(queue_s=0.05, compute_s=0.1, exposed_transfer_s=0.01))
        conductor.next_tokens(0.03, 2)
        for histogram in (conductor.request_seconds, conductor.request_prompt_tokens):
            histogram.observe(2.0)
        conductor.request_generation_tokens.observe(9)
        for counter in (conductor.prompt_tokens, conductor.cached_tokens, conductor.generation_tokens):
            counter.inc(7)
        conductor.sequences.labels("stop").inc()
        conductor.rejections.labels("ttft").inc()
        conductor.slo_misses.labels("ttft").inc()
        conductor.running.set(1)
        node.prefill_tokens.labels("computed").inc(5)
        node.prefill_step.observe(0.1)
        node.decode_step.observe(0.03)
        node.decode_tokens.inc()
        node.decode_preemptions.inc()
        for transport in ("shm", "tcp"):
            node.transfer_bytes.labels(transport).inc(1000)
            node.transfer_seconds.labels(transport).observe(0.01)
            node.transfer_failures.labels(transport).inc()
        for place in ("free", "cached", "held"):
            node.kvstore_blocks.labels(place).set(3)
            store.blocks.labels("host", place).set(3)
        store.unaccounted.labels("host").set(0)
        store.damaged.labels("host").set(0)

    class Metrics(BaseHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

        def do_GET(self):
            serve_a_request()
            body = exposition(registry)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def prometheus(process, tmp_path_factory):
    """The address of a Prometheus that has scraped `process` some times."""
    folder = tmp_path_factory.mktemp("prometheus")
    targets = f'[{{targets: ["127.0.0.1:{process}"]}}]'
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}\n"
        f"rule_files: [{RULES}]\n"
        f"scrape_configs: [{{job_name: conductor, static_configs: {targets}}}]\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        address = f"127.0.0.1:{chosen.getsockname()[1]}"
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
        "--log.level=error",
    ]
    with subprocess.Popen(command) as running:
        wait_for(address, "conductor:hit:ratio10m > 0 and conductor:missed:ratio6h > 0")
        yield address
        running.terminate()


def query(address, text):
    encoded = urllib.parse.urlencode({"query": text.replace("$__rate_interval", "5s")})
    with urllib.request.urlopen(f"http://{address}/api/v1/query?{encoded}", timeout=10) as answer:
        return json.load(answer)["data"]["result"]


def wait_for(address, text):
    """Ask until there is data: Prometheus tells nobody that it has scraped."""
    pause = threading.Event()
    for _ in range(200):
        try:
            if query(address, text):
                return
        except (urllib.error.URLError, ConnectionError):
            pass  # it is starting
        pause.wait(0.1)
    raise AssertionError(f"no data of {text}")


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)
def test_every_panel_shows_data(prometheus, board):
    for panel in board.panels:
        for text, _ in panel.queries:
            data = query(prometheus, text)
            assert bool(data) != (panel.title in EMPTY_WHEN_ALL_IS_WELL), f"{panel.title}: {text}"
            assert all(item["value"][1] != "NaN" for item in data), f"{panel.title}: {text}"


def test_all_rules_are_evaluated_without_an_error(prometheus):
    with urllib.request.urlopen(f"http://{prometheus}/api/v1/rules", timeout=10) as answer:
        groups = json.load(answer)["data"]["groups"]
    assert {(rule["name"], rule["health"]) for group in groups for rule in group["rules"]} >= {
        ("ConductorSloBurnFast", "ok"),
        ("conductor:missed:ratio5m", "ok"),
    }
    assert all(rule["health"] == "ok" for group in groups for rule in group["rules"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed here")
def test_promtool_takes_the_metrics(process):
    with urllib.request.urlopen(f"http://127.0.0.1:{process}/metrics", timeout=10) as answer:
        text = b"".join(line for line in answer if b"vllm:" not in line)  # vLLM's names are vLLM's own
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
