"""The pages of bench/results are what their claims and results make, and say what a result says."""

import json
import re

import pytest

from bench import evidence
from bench.evidence_faults import COLUMNS, fault_cells

PAGES = evidence.pages()


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_a_page_is_what_its_claims_and_results_make(file):
    assert file.read_text() == PAGES[file], f"{file.name} is stale: python -m bench.evidence"


def test_no_page_is_written_by_hand():
    assert {*evidence.RESULTS.glob("*.md")} == {file for file in PAGES if file.suffix == ".md"}


def test_a_template_reads_the_figure_that_it_names():
    result = {"rows": [{"x": 0.25}], "a b": {"c": 3}}
    assert evidence.filled("{rows/0/x*1000:.0f} ms, {rows/0/x:.0%}, {a b/c}", result) == "250 ms, 25%, 3"


def test_a_figure_that_is_not_in_the_result_is_an_error():
    with pytest.raises(KeyError):
        evidence.filled("{rows}", {})


def test_hardware_versions_commit_and_date_come_from_the_result():
    about = {"processor": "CPU", "cores": 2, "commit": "abc", "date": "2026-01-02", "python": "3.11"}
    known = evidence.about({"about": about, "gpus": ["GPU", "GPU"], "torch": "2.11"})
    assert known == {
        "hardware": "2 GPU; 2 cores of CPU",
        "versions": "python 3.11, torch 2.11",
        "commit": "abc",
        "date": "2026-01-02",
        "command": "",
    }


def test_the_facts_of_several_runs_name_each_commit():
    runs = [{"about": {"commit": "a", "date": "1"}}, {"about": {"commit": "b", "date": "1"}}]
    assert evidence.about({"runs": runs})["commit"] == "a, b"


def test_a_claim_has_a_row_for_each_entry(tmp_path, monkeypatch):
    (tmp_path / "r.json").write_text(json.dumps({"rows": [{"n": 1}, {"n": 2}], "commit": "abc"}))
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    claim = {
        "claim": "It counts",
        "from": "r.json",
        "rows": [{"each": "rows", "what": "{n}", "measured": "{n} s"}],
    }
    text = evidence.page("r", {"title": "T", "says": "S", "claims": [claim]})
    assert "| 1 | 1 s | abc |\n| 2 | 2 s | ″ |" in text


def cells_of(result):
    return {name: cell for name, cell in zip(COLUMNS, fault_cells(result), strict=True) if cell}


def test_runs_of_a_fault_are_added_up():
    runs = [{"injected": 1, "requests": 10, "failed": n, "longest_gap_s": n} for n in (1, 2)]
    cells = cells_of({"runs": runs})
    assert cells == {"faults": "2", "requests": "20", "failed": "3", "longest gap": "2.0 s"}


def test_parts_of_a_fault_are_added_up_and_older_runs_are_not():
    part = {"injected": 1, "requests": 5, "failed_in_progress": 1, "failed_afterwards": 2}
    cells = cells_of({"of_a": part, "of_b": part, "before": [part], "injected": 2})
    assert cells == {"faults": "2", "requests": "10", "failed": "6"}


def test_a_figure_of_a_new_kind_of_fault_is_shown_in_words():
    cells = cells_of({"injected": 3, "all_back_s_max": 1.25, "about": {}})
    assert cells == {"faults": "3", "more": "all back 1.25 s at most"}


def test_a_chart_has_a_bar_for_each_figure_and_the_tallest_is_the_largest():
    chart = evidence.bars("T", ["a", "b"], [("one", ["1.5", "3 or more"]), ("two", ["2", "1"])])
    heights = [float(each) for each in re.findall(r'height="([\d.]+)" fill', chart) if each != "10"]
    assert [height / max(heights) for height in heights] == pytest.approx([0.5, 1, 2 / 3, 1 / 3], abs=0.01)
    assert "3 or more" in chart
