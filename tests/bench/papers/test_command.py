"""`conductor replay`: the contract of its arguments and its report."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from base.config import ClusterConfig, EngineConfig, PoolConfig, SchedulerConfig
from bench.papers.chart import chart
from bench.papers.command import main, read_arguments
from bench.trace_file import write_trace
from conductor.profiles.reader import load_profile
from conductor.replay.arguments import parse_nodes, service_arguments
from conductor.replay.command import read_profile
from conductor.replay.policies import POLICIES
from tests.conductor.replay.builders import small_trace

ROOT = Path(__file__).parents[3]


@pytest.fixture
def trace_file(tmp_path):
    file = tmp_path / "trace.jsonl"
    write_trace(small_trace(150), file)
    return file


def test_report_has_what_the_contract_names(trace_file, tmp_path) -> None:
    out = tmp_path / "out.json"
    assert main([str(trace_file), "--nodes", "2P2D", "--policy", "all", "--report", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["trace"]["requests"] == 150
    assert [run["policy"] for run in report["runs"]] == ["random", "load", "local", "global"]
    for run in report["runs"]:
        assert run["completed"] + run["rejected"] == run["requests"] == 150
        assert set(run["ttft_s"]) == {"mean", "p50", "p90", "p99"}
        for key in (
            "reject", "prefill_nodes", "decode_nodes", "tbt_s", "effective_capacity", "hit_rate_blocks",
            "hit_rate_tokens", "prefill_gpu_s_per_request", "wasted_prefill_s", "bytes_moved",
            "replicas_created", "simulated_s", "wall_s", "requests_per_s", "effective_tokens",
            "goodput_requests_per_s", "goodput_tokens_per_s", "rejected_prompt_tokens",
        ):  # fmt: skip
            assert key in run


def test_report_and_page_are_the_same_bytes_whatever_the_hash_seed(trace_file, tmp_path) -> None:
    reports = []
    for seed in ("0", "1"):
        out, page = tmp_path / f"{seed}.json", tmp_path / f"{seed}.html"
        command = [sys.executable, "-m", "bench.papers.command", str(trace_file), "--nodes", "3P2D"]
        command += ["--policy", "all", "--speed", "3", "--reject", "predict"]
        command += ["--report", str(out), "--html", str(page), "--requests", str(tmp_path / f"{seed}.csv")]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True, timeout=60)
        rows = [tmp_path / f"{policy}-{seed}.csv" for policy in POLICIES]
        report = json.loads(out.read_text())
        for run in report["runs"]:
            del run["wall_s"], run["requests_per_s"]
        reports.append([json.dumps(report), *[path.read_bytes() for path in (page, *rows)]])
    assert reports[0] == reports[1]


def test_table_is_for_people_and_json_for_machines(trace_file, capsys) -> None:
    assert main([str(trace_file), "--nodes", "2P2D"]) == 0
    assert "TTFT mean" in capsys.readouterr().out
    assert main([str(trace_file), "--nodes", "2P2D", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["policy"] == "global"


def test_wrong_file_is_one_line_and_exit_code_2(tmp_path, capsys) -> None:
    assert main([str(tmp_path / "gone.jsonl")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_bad_rows_are_named_and_passed_over_when_asked(trace_file, capsys) -> None:
    with trace_file.open("a") as file:
        file.write('{"timestamp": 1}\n')
    assert main([str(trace_file), "--nodes", "2P2D"]) == 2
    assert "trace.jsonl:152" in capsys.readouterr().err
    assert main([str(trace_file), "--nodes", "2P2D", "--skip-bad"]) == 0
    assert "passed over" in capsys.readouterr().err


def test_nodes_are_parsed_or_refused() -> None:
    assert parse_nodes("10p2D") == (10, 2, 0)
    assert [parse_nodes(text) for text in ("16C", "4P4D2C")] == [(0, 0, 16), (4, 4, 2)]
    for wrong in ("8P", "0P1D", "8D8P", "", "4P2C", "1" * 10_000 + "C"):
        with pytest.raises(Exception, match="8P8D"):
            parse_nodes(wrong)


def test_published_experiment_prints_the_row_of_its_trace_or_none(trace_file, capsys) -> None:
    assert main(["conversation", "--until", "150", "--paper", "fig8"]) == 0
    out = capsys.readouterr().out
    assert "paper ~" in out
    assert "1.66" in out
    assert main([str(trace_file), "--paper", "fig8"]) == 0
    out = capsys.readouterr().out
    assert "paper" not in out
    assert "ours" in out


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--stages", "0"], "--stages: a whole number from 1"),
        (["--chunk-tokens", "-5"], "--chunk-tokens: a whole number from 0"),
        (["--nodes", "1000000P1D"], "--nodes: '1000000P1D'"),
        (["--nodes", "20000P1D"], "at most 10000 nodes of a kind"),
        (["--speed", "nan"], "--speed: a number of more than 0"),
        (["--jitter", "inf"], "--jitter: a number of at least 0"),
        (["--max-waiting", "0"], "--max-waiting: a whole number from 1"),
        (["--disk", "-1"], "--disk: a number of at least 0"),
        (["--slow-node", "x0=2"], "--slow-node: 'x0=2'"),
        (["--slow-node", "p0=0"], "--slow-node: a number of at least 0.01"),
        (["--node-profile", "p3-1=h100-llama8b"], "--node-profile: 'p3-1"),
    ],
)
def test_a_number_past_its_bounds_is_refused_with_its_option(trace_file, capsys, arguments, wanted) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(trace_file), *arguments])
    assert caught.value.code == 2
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--nodes", "4C", "--stages", "2"], "--stages"),
        (["--nodes", "4C", "--decode-caches"], "--decode-caches"),
        (["--nodes", "4C", "--sweep"], "--sweep"),
        (["--nodes", "2P2D", "--slow-node", "p2=3"], "p2"),
        (["--nodes", "2P2D", "--node-profile", "d5=h100-llama8b"], "d5"),
        (["--nodes", "2P2D", "--node-profile", "d1=h100-llama8b"], "bytes of KV a token"),
        (["--nodes", "2P2D", "--sessions", "2", "--session-rate", "1"], "--session-rate"),
        (["--nodes", "2P2D", "--roles", "follow", "--whole-chunks"], "--whole-chunks"),
        (["--nodes", "2P2D", "--roles", "follow", "--stages", "2"], "--stages"),
        (["--nodes", "2P2D", "--html", "out.html", "--sweep"], "--roles fixed"),
        (["--nodes", "2P2D", "--requests", "out.parquett"], "--requests out.parquett: a name with .csv"),
    ],
)
def test_an_option_that_the_nodes_cannot_honour_is_refused(trace_file, capsys, arguments, wanted) -> None:
    assert main([str(trace_file), *arguments]) == 2
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b'{"at_s": NaN, "node": "p0"}', ":1: at_s: a moment"),
        (b'{"at_s": -1, "node": "p0"}', ":1: at_s: a moment"),
        (b'{"at_s": 1, "node": "p0", "for_s": 0}', "and for_s above 0"),
        (b"\xff\xfe", "can't decode"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(trace_file, tmp_path, capsys, text: bytes, wanted: str) -> None:
    (tmp_path / "faults").write_bytes(text)
    assert main([str(trace_file), "--nodes", "2P1D", "--fault", str(tmp_path / "faults")]) == 2
    error = capsys.readouterr().err
    assert f"conductor replay: {tmp_path / 'faults'}:" in error
    assert wanted in error


def test_nodes_of_several_kinds_serve_one_trace(trace_file, capsys) -> None:
    kinds = ["--nodes", "2P2D1C", "--slow-node", "p0=3", "--node-profile", "d1=h100-llama8b"]
    assert main([str(trace_file), *kinds, "--profile", "h200-llama8b", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["completed"] == 150


def test_replay_does_as_the_cluster_that_is_deployed(trace_file, tmp_path, capsys) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "profile: a800-llama70b\nslo: {ttft_s: 5.0}\nserver: {conductors: 2}\n"
        "scheduler: {reject: early, ttft_headroom: 0.5, ahead_s: 2.0, policy: load}\n"
    )
    assert main([str(trace_file), "-c", str(file), "--nodes", "2P2D", "--ahead", "3", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["policy"], run["reject"], run["headroom"], run["ahead_s"]) == ("load", "early", 0.5, 3.0)
    assert run["rejected_by_reason"].keys() == {"ttft"}
    assert run["conductors"] == 2


def test_replay_has_the_steps_of_the_cluster_that_is_deployed() -> None:
    pool = PoolConfig(engine=EngineConfig(chunk_tokens=512))
    said = service_arguments(ClusterConfig(prefill=pool))
    assert said[said.index("--chunk-tokens") + 1] == "512"
    assert "--chunk-tokens" not in service_arguments(ClusterConfig())


@pytest.mark.parametrize(
    ("store", "given", "is_without"),
    [("", [], True), ("store: {dram_gib: 8}", [], False), ("store: {dram_gib: 8}", ["--no-store"], True)],
)
def test_prefixes_of_a_cluster_without_a_store_lie_on_the_device(tmp_path, store, given, is_without) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"profile: h200-llama8b\n{store}\n")
    profile, found = (
        load_profile("h200-llama8b"),
        read_profile(read_arguments(["t", "-c", str(file), *given])),
    )
    assert found == (profile.without_store() if is_without else profile)
    assert (found.prefix_token_s == 0) == is_without
    assert found.host_kv_tokens == (profile.device_kv_tokens if is_without else profile.host_kv_tokens)


def test_a_disk_without_a_store_is_refused(trace_file, capsys) -> None:
    assert main([str(trace_file), "--disk", "1e6", "--no-store"]) == 2
    assert "--disk: a part of a store" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "roles"),
    [
        ([], SchedulerConfig().roles),
        (["--roles", "fixed"], "fixed"),
        (["--plain"], "fixed"),
        (["--plain", "--roles", "follow"], "follow"),
        (["--whole-chunks"], "fixed"),
        (["--stages", "2"], "fixed"),
    ],
)
def test_roles_are_the_services_but_where_they_cannot_follow(trace_file, capsys, arguments, roles) -> None:
    assert main([str(trace_file), "--nodes", "2P2D", *arguments, "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["roles"] == roles


def test_roles_are_those_of_the_cluster_that_is_deployed(trace_file, tmp_path, capsys) -> None:
    file = tmp_path / "cluster.yaml"
    for roles in ("follow", "fixed"):
        file.write_text(f"scheduler: {{roles: {roles}}}\n")
        assert main([str(trace_file), "-c", str(file), "--nodes", "2P2D", "--json"]) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        assert run["roles"] == roles


def test_faults_and_role_changes_are_asked_for_on_the_command_line(trace_file, tmp_path, capsys) -> None:
    faults = tmp_path / "faults.jsonl"
    faults.write_text('{"at_s": 5, "node": "p0", "for_s": 10}\n')
    command = [str(trace_file), "--nodes", "2P3D", "--fault", str(faults), "--json"]
    assert main(command) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["retries"] > 0
    faults.write_text('{"at": 5}\n')
    assert main(command) == 2
    assert "faults.jsonl:1" in capsys.readouterr().err


def test_page_is_well_formed_and_needs_nothing_from_elsewhere(trace_file, tmp_path) -> None:
    out = tmp_path / "report.html"
    assert main([str(trace_file), "--nodes", "2P2D", "--policy", "all", "--html", str(out)]) == 0
    text = out.read_text()
    root = ElementTree.fromstring(text.partition("\n")[2])
    assert len(root.findall(".//svg")) == 7
    assert len(root.findall(".//tbody/tr")) == 4
    assert all(line.get("points") for line in root.findall(".//polyline"))
    assert "http" not in text
    assert "<script" not in text


def test_a_chart_without_a_line_says_so() -> None:
    assert ">none<" in chart("Refused", "seconds", [])
    assert ">none<" not in chart("Refused", "seconds", [("late", [(0.0, 0.0)])])


def test_workload_can_be_named_instead_of_a_file(capsys) -> None:
    assert main(["toolagent", "--until", "100", "--nodes", "2P1D", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["trace"]["name"] == "toolagent (generated)"
    assert report["runs"][0]["completed"] == 100


@pytest.mark.parametrize("option", [("--format", "mooncake"), ("--block-size", "4")])
def test_what_a_file_may_be_asked_for_is_refused_of_a_workload(capsys, option) -> None:
    assert main(["conversation", "--until", "3", *option]) == 2
    assert "--format, --block-size: of a file" in capsys.readouterr().err


def test_shipped_trace_replays() -> None:
    assert main([str(ROOT / "bench" / "traces" / "sample.jsonl"), "--nodes", "2P2D"]) == 0


def test_requests_table_has_one_row_each_completed_and_rejected(trace_file, tmp_path) -> None:
    out = tmp_path / "requests.csv"
    args = ["--nodes", "2P1D", "--speed", "4", "--reject", "predict", "--slo-ttft", "5", "--slo-tbt", "0.05"]
    assert main([str(trace_file), *args, "--requests", str(out)]) == 0
    rows = list(csv.DictReader(out.open()))
    assert [int(row["request"]) for row in rows] == list(range(150))
    ends = {row["end"] for row in rows}
    assert "completed" in ends
    assert len(ends) > 1
    assert all((row["ttft_s"] != "") == (row["end"] == "completed") for row in rows)


def test_parquet_has_the_rows_of_the_csv(trace_file, tmp_path) -> None:
    arrow = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    out = tmp_path / "requests.csv"
    for file in (out, out.with_suffix(".parquet")):
        assert main([str(trace_file), "--nodes", "2P1D", "--requests", str(file)]) == 0
    rows = list(csv.DictReader(out.open()))
    table = arrow.read_table(out.with_suffix(".parquet")).to_pydict()
    assert list(table) == list(rows[0])
    assert table["request"] == [int(row["request"]) for row in rows]
    found = ["" if value is None else f"{value:.6f}" for value in table["ttft_s"]]
    assert found == [row["ttft_s"] for row in rows]
    assert [node or "" for node in table["prefill_node"]] == [row["prefill_node"] for row in rows]


@pytest.mark.parametrize("option", ["--report", "--requests", "--html"])
@pytest.mark.parametrize("name", ["missing/x.csv", "."])
def test_results_that_could_not_be_written_are_refused_before_a_run(
    trace_file, tmp_path, monkeypatch, capsys, option, name
) -> None:
    monkeypatch.setattr("conductor.replay.command.simulate", pytest.fail)
    assert main([str(trace_file), "--nodes", "2P1D", option, str(tmp_path / name)]) == 2
    assert f"{option} {tmp_path / name}: no file can be written there" in capsys.readouterr().err


def test_parquet_without_pyarrow_names_the_extra(trace_file, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    out = tmp_path / "requests.parquet"
    assert main([str(trace_file), "--nodes", "2P1D", "--requests", str(out)]) == 2
    assert "pip install 'conductor-cluster[parquet]', or name a .csv file" in capsys.readouterr().err
    assert not out.exists()


def test_page_shows_the_sweep_the_hot_blocks_and_the_rejections(trace_file, tmp_path) -> None:
    out = tmp_path / "page.html"
    args = ["--nodes", "2P2D", "--speed", "6", "--reject", "early", "--slo-ttft", "5", "--slo-tbt", "0.04"]
    assert main([str(trace_file), *args, "--roles", "fixed", "--html", str(out), "--sweep"]) == 0
    root = ElementTree.fromstring(out.read_text().partition("\n")[2])
    headings = [node.text for node in root.iter("figcaption")]
    assert sum(str(heading).startswith("P:D sweep") for heading in headings) == 3
    assert any("hottest blocks" in str(heading) for heading in headings)
    assert "early early ttft" in out.read_text() or "global early" in out.read_text()


def test_progress_says_how_far_a_run_is(trace_file, capsys) -> None:
    assert main([str(trace_file), "--nodes", "2P2D", "--progress"]) == 0
    assert "of 150 requests" in capsys.readouterr().err


def test_disk_without_a_rate_is_refused_and_groups_are_reported(trace_file, capsys) -> None:
    assert main([str(trace_file), "--disk", "1e6"]) == 2
    assert "--disk-rate" in capsys.readouterr().err
    args = ["--nodes", "4P2D", "--stages", "2", "--disk", "1e6", "--disk-rate", "3e9", "--decode-caches"]
    assert main([str(trace_file), *args]) == 0
    assert "stages" in capsys.readouterr().out
