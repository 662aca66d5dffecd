"""Rules and dashboards: every query parses, every metric exists, and a real Prometheus takes them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

from base.lifetime import Lifetime
from base.metrics import ConductorMetrics, NodeMetrics, StoreMetrics, export_supervised, process_registry
from tests.deploy.generators import loaded

dashboards = loaded("generate_dashboards")
DASHBOARDS = dashboards.DASHBOARDS

ROOT = Path(__file__).parent.parent.parent
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
PANEL_QUERIES = [
    (f"{board.uid}: {panel.title}", query)
    for board in DASHBOARDS
    for panel in board.panels
    for query, _ in panel.queries
]
RULE_QUERIES = [
    (rule.get("record") or rule["alert"], rule["expr"]) for group in RULES for rule in group["rules"]
]
FROM_PROMETHEUS = {"up"}


def exposed_names():
    """Every sample name a process of ours can expose."""
    registry = process_registry()
    ConductorMetrics(registry, "m")
    NodeMetrics(registry)
    StoreMetrics(registry)
    export_supervised(registry, Lifetime())
    suffixes = {
        "counter": ("_total",),
        "histogram": ("_bucket", "_sum", "_count"),
        "gauge": ("",),
    }
    return {
        metric.name + suffix for metric in registry.collect() for suffix in suffixes.get(metric.type, ("",))
    }


def selectors(query):
    found = []
    promql_parser.walk(promql_parser.parse(query.replace("$__rate_interval", "5m")), found.append)
    return [node.name for node in found if isinstance(node, promql_parser.VectorSelector)]


@pytest.mark.parametrize(("where", "query"), PANEL_QUERIES + RULE_QUERIES, ids=lambda value: value[:40])
def test_a_query_parses_and_names_metrics_that_there_are(where, query):
    recorded = {rule["record"] for group in RULES for rule in group["rules"] if "record" in rule}
    names = set(selectors(query))
    assert names, where
    assert names <= exposed_names() | recorded | FROM_PROMETHEUS, where


def test_who_missed_the_slo_is_counted_once():
    """A rejected sequence has ended too, and one that is late may be late twice."""
    metrics = ConductorMetrics(process_registry(), "m")
    metrics.rejections.labels("slo").inc()
    metrics.sequences.labels("SloUnreachableError").inc()
    assert metrics.totals().failed == 0
    [query] = [query for where, query in RULE_QUERIES if where == "conductor:missed:ratio5m"]
    assert set(selectors(query)) == {"conductor_sequences_total", "conductor_good_sequences_total"}


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)
def test_the_dashboards_committed_are_those_of_the_table(board):
    assert (dashboards.FOLDER / f"{board.uid}.json").read_text() == dashboards.as_text(board)


def test_no_other_dashboards_are_committed():
    assert {path.stem for path in dashboards.FOLDER.iterdir()} == {board.uid for board in DASHBOARDS}


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)
def test_panels_do_not_overlap(board):
    cells = set()
    for panel in json.loads(dashboards.as_text(board))["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= dashboards.COLUMNS
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not mine & cells
        cells |= mine


def test_every_alert_has_a_test_and_a_page_that_says_what_to_do():
    alerts = {rule["alert"] for group in RULES for rule in group["rules"] if "alert" in rule}
    fired = set()
    for case in yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]:
        fired |= {item["alertname"] for item in case["alert_rule_test"] if item["exp_alerts"]}
    assert fired == alerts
    runbook = (ROOT / "docs" / "how-to" / "alerts.md").read_text()
    headings = set(re.findall(r"^### (\w+)$", runbook, re.MULTILINE))
    assert headings == alerts


needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed here")


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "rules.yml"),
        ("check", "config", "prometheus.yml"),
        pytest.param(("test", "rules", "rules_test.yml"), marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_promtool_takes(arguments):
    done = subprocess.run(
        ["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
