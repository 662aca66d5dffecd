"""The pages of bench/results are what their claims and results make, and say what a result says."""

import json
import re

import pytest

from bench import evidence
from bench.evidence_faults import COLUMNS, fault_cells
from bench.evidence_verdict import verdict

PAGES = evidence.pages()


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_a_page_is_what_its_claims_and_results_make(file):
    assert file.read_text() == PAGES[file], f"{file.name} is stale: python -m bench.evidence"


CLAIMS = [
    (file.name, claim)
    for file in sorted(evidence.RESULTS.glob("*.claims.json"))
    for claim in json.loads(file.read_text())["claims"]
]


@pytest.mark.parametrize(("file", "claim"), CLAIMS, ids=lambda value: str(value)[:40])
def test_every_figure_says_where_when_and_how_it_was_measured(file, claim):
    for row in evidence.rows(claim):
        facts = dict(zip(evidence.FACTS, row.facts, strict=True))
        missing = [name for name in ("hardware", "date", "command") if not facts[name]]
        assert not missing, f"{file}: {claim['claim']}: {row.what} says no {missing}"


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


@pytest.mark.parametrize(
    ("must", "cell", "said"),
    [
        (">= 1,500", "1,892, **1,630**, 1,763 (rounds 900 to 2,000)", "met"),
        (">= 1,500", "1,892, 1,311, 1,763", "missed in 1 of 3"),
        (">= 99 %", "94.7, 95.0 and 98.7 %", "missed"),
        ("<= 5 us", "1.3 to 1.6 us", "met"),
        ("< 50 ms", "50 ms", "missed"),
        ("within 15 %", "-0.6 %", "met"),
        ("within 15 %", "-20.0 %", "missed"),
        (">= 360", "224 / 369 / 371", "missed in 1 of 3"),
        (">= 2.5", "2.612e+00, 5.00+", "met"),
        ("= 0", "0 of 17,384", "met"),
        (">= 85 %", "74 of 84", "met"),
        (">= 85 %", "70 of 84", "missed"),
        ("all", "31 of 31", "met"),
        ("all", "30 of 31", "missed"),
        ("= 0", "", "not measured"),
    ],
)
def test_a_verdict_is_worked_out_from_both(must, cell, said):
    assert verdict(must, ["measured"], [cell]) == said


def test_bounds_that_name_their_columns_judge_those_alone():
    bounds = {"a": "<= 1", "c": ">= 2"}
    assert verdict(bounds, ["a", "b", "c"], ["1", "no figure", "1"]) == "missed in 1 of 2"
    with pytest.raises(ValueError, match="no column is called d"):
        verdict({"d": "<= 1"}, ["a"], ["1"])


@pytest.mark.parametrize(
    ("must", "cell", "problem"),
    [
        ("fast", "1 s", "is no bound"),
        ("<= 1 s", "at once", "write the verdict"),
        ("<= 1 s", "3 ms, 0.1 s", "write the verdict"),
        ("<= 1 s", "3 ms", "different units"),
        (">= 4 ms", "3-5 ms", "write the verdict"),
    ],
)
def test_what_is_no_figure_is_not_guessed_at(must, cell, problem):
    with pytest.raises(ValueError, match=problem):
        verdict(must, ["measured"], [cell])


def test_a_page_says_the_verdict_and_the_overview_counts_it():
    rows = [
        {"what": "a", "must": "<= 5 ms", "measured": "4 ms"},
        {"what": "b", "must": "soon", "measured": "late"},
    ]
    rows[1]["verdict"] = "missed"
    claims = {"title": "T", "says": "S", "claims": [{"claim": "It is fast", "rows": rows}]}
    assert "| a | <= 5 ms | 4 ms | met |" in evidence.page("t", claims)
    overview = evidence.overview({"t": claims})
    assert "| [T](t.md) | 1 | 1 | 0 |" in overview
    assert "| [t](t.md) | It is fast | b | soon | late | missed |" in overview


def test_what_was_measured_of_earlier_commits_comes_last_and_is_not_counted():
    row = {"what": "a", "must": "<= 5 ms", "measured": "9 ms"}
    earlier = {"claim": "It was slow", "rows": [row], "earlier": True}
    claims = {"title": "T", "says": "S", "claims": [earlier, {"claim": "It is fast", "rows": []}]}
    text = evidence.page("t", claims)
    assert text.index("## It is fast") < text.index("## Earlier commits") < text.index("### It was slow")
    assert "| [T](t.md) | 0 | 0 | 0 |" in evidence.overview({"t": claims})


def test_a_verdict_that_is_written_is_one_of_three():
    row = {"what": "a", "must": "soon", "measured": "x", "verdict": "nearly"}
    with pytest.raises(ValueError, match="nearly"):
        evidence.page("t", {"title": "T", "says": "S", "claims": [{"claim": "C", "rows": [row]}]})
