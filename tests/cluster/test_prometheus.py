"""A real Prometheus scrapes a cluster at work, evaluates our rules, and answers every panel's query."""

import base64
import json
import math
import shutil
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from array import array
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from base.config import SchedulerConfig, StoreConfig
from conductor.serving.prometheus_history import QUERIES
from tests.cluster.conftest import running
from tests.deploy.generators import loaded
from tests.deploy.processes import free_ports

DASHBOARDS = loaded("generate_dashboards").DASHBOARDS
RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yml"

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed here"),
    pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed here"),
]

# An alert in the form of a panel: that there is no data is the good case.
EMPTY_WHEN_ALL_IS_WELL = {"Held blocks while nothing runs: leaked"}

TOO_LONG = list(range(1000, 2000))
"""For 18 blocks of 32 tokens."""

SERVED = {"model": "smollm2", "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def address():
    """Where Prometheus is going to be."""
    return f"127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture(scope="module")
def busy(smollm2, address, tmp_path_factory):
    """A cluster that serves for as long as the module runs: hits, misses, late ones, refused ones."""
    folder = tmp_path_factory.mktemp("busy")
    # Without a test of the decode load, what is too slow for its bound is served, and late.
    never_reject = SchedulerConfig(reject="none", roles="fixed")
    cache = {"store": StoreConfig(dram_gib=0.1), "kv_cache_gib": 0.025}
    shown = {"prometheus": f"http://{address}"}
    with running(smollm2, folder, scheduler=never_reject, **cache, **shown) as cluster, asking(cluster.url):
        yield cluster


@contextmanager
def asking(url):
    over = threading.Event()

    def ask_on():
        number = 0
        with httpx.Client(base_url=url, timeout=60) as client:
            while not over.is_set():
                number += 1
                first = 2000 + 200 * (number // 2 % 80)  # each prompt twice, and then another
                prompt = list(range(first, first + 120))
                late = client.post(
                    "/v1/completions", json={**SERVED, "prompt": prompt}, headers={"x-slo-tpot-ms": "0.001"}
                )
                assert late.status_code == 200, late.text
                refused = client.post("/v1/completions", json={**SERVED, "prompt": TOO_LONG})
                assert refused.status_code == 429, refused.text

    thread = threading.Thread(target=ask_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def metrics_ports(cluster):
    nodes = [process for name, process in cluster.processes.items() if name != "conductor"]
    return [cluster.http_port, *(process.wait_ready()["metrics_port"] for process in nodes)]


@pytest.fixture(scope="module")
def prometheus(busy, address, tmp_path_factory):
    """The address of a Prometheus that scrapes the cluster's processes."""
    folder = tmp_path_factory.mktemp("prometheus")
    targets = [{"targets": [f"127.0.0.1:{port}" for port in metrics_ports(busy)]}]
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "conductor-cluster", "static_configs": targets}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
        "--log.level=error",
    ]
    with subprocess.Popen(command) as running_server:
        yield address
        running_server.terminate()


def query(address, text):
    encoded = urllib.parse.urlencode({"query": text.replace("$__rate_interval", "30s")})
    with urllib.request.urlopen(f"http://{address}/api/v1/query?{encoded}", timeout=60) as answer:
        return json.load(answer)["data"]["result"]


def values(address, text):
    """Return the numbers that a query has for an answer; a series of a way that was not used has none."""
    found = (float(item["value"][1]) for item in query(address, text))
    return [value for value in found if not math.isnan(value)]


def wait_for(address, text):
    """Ask until there is data: Prometheus tells nobody that it has scraped."""
    pause = threading.Event()
    for _ in range(600):
        try:
            if found := values(address, text):
                return found
        except (urllib.error.URLError, ConnectionError):
            pass  # it is starting
        pause.wait(0.1)
    raise AssertionError(f"no data of {text}")


def test_every_process_is_scraped(prometheus):
    assert wait_for(prometheus, "count(up == 1) == 3") == [3]


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)
def test_every_panel_shows_data(prometheus, board):
    for panel in board.panels:
        for text, _ in panel.queries:
            if panel.title in EMPTY_WHEN_ALL_IS_WELL:
                values(prometheus, text)  # it is answered
            else:
                assert min(wait_for(prometheus, text)) >= 0, panel.title


def test_our_own_page_draws_from_it(prometheus, busy):
    shown = {name for name in QUERIES if name not in ("cancelled", "failed")}
    for name in shown:
        wait_for(prometheus, QUERIES[name].replace("$rate", "60s"))
    told = httpx.get(f"{busy.url}/v1/page/day", timeout=60).json()
    assert told["source"] == "prometheus", told
    assert (told["step_s"], told["next"] - told["first"]) == (300, 288)
    told = httpx.get(f"{busy.url}/v1/page/hour", timeout=60).json()
    numbers = array("f", base64.b64decode(told["rows"]))
    known = {
        name
        for at, name in enumerate(told["names"])
        if not all(map(math.isnan, numbers[at :: len(told["names"])]))
    }
    assert known >= {"running", "kv_held"}, "a rate is known a row later"


@pytest.mark.parametrize(
    "text",
    [
        'sum(transfer_bytes_total{transport="shm"}) > 0',
        'sum(rate(transfer_seconds_count{transport="shm"}[30s])) > 0',
        'conductor_slo_misses_total{cause="tbt"} > 0',
        'conductor_rejections_total{reason="capacity"} > 0',
        "conductor:hit:ratio10m > 0",
        "conductor:missed:ratio6h > 0",
        'sum(conductor_sequences_total{outcome="length"}) > 0',
        "sum(rate(decode_tokens_total[30s])) > 0",
        'sum(prefill_tokens_total{source="matched"}) > 0',
        'sum(kvstore_tier_blocks{place="cached"}) > 0',
    ],
)
def test_what_happened_was_counted(prometheus, text):
    assert min(wait_for(prometheus, text)) > 0


def test_all_rules_are_evaluated_without_an_error(prometheus):
    wait_for(prometheus, "conductor:missed:ratio6h")
    with urllib.request.urlopen(f"http://{prometheus}/api/v1/rules", timeout=60) as answer:
        groups = json.load(answer)["data"]["groups"]
    found = {(rule["name"], rule["health"]) for group in groups for rule in group["rules"]}
    assert found >= {("ConductorSloBurnFast", "ok"), ("conductor:missed:ratio5m", "ok")}
    assert {health for _, health in found} == {"ok"}


def test_promtool_takes_the_metrics_of_every_process(busy):
    for port in metrics_ports(busy):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = b"".join(line for line in answer if b"vllm:" not in line)  # vLLM's names are vLLM's own
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
