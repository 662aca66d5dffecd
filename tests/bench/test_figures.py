"""Figures that README and the pages of docs name are those of bench/results, rounded.

A new result makes these tests fail until the sentence says the new figure.
"""

import re

import pytest

from bench.evidence import read_result
from tests.deploy.processes import ROOT

APART, TOGETHER, VLLM = range(3)
"""Rows of the claim that README's chart is drawn from, in disaggregation.claims.json."""


def times_vllm(row, bound):
    rows = read_result("disaggregation.claims.json")["claims"][0]["rows"]
    ours, vllm = (float(rows[number]["measured"][bound].split()[0]) for number in (row, VLLM))
    return f"{ours / vllm:.1f}"


def handoff_ms(prompt_tokens):
    [row] = [row for row in read_result("handoff.json")["rows"] if row["prompt_tokens"] == prompt_tokens]
    return row["handoff_ms"], row["compute_ms"]


def killed(count):
    faults = read_result("faults.json")
    return sum(
        part[count]
        for kind in ("prefill-killed", "decode-killed")
        for part in faults[kind].get("runs", [faults[kind]])
    )


def overload():
    result = read_result("overload.json")
    return (
        f"{result['overload_goodput_over_peak'] * 100:.0f} % of the peak's goodput, "
        f"rejections in {result['rejection_p99_s'] * 1000:.1f} ms"
    )


def conformance(name, start):
    medians = read_result(name)["median_error"]
    errors = medians.get("own") or medians["round_before"]
    cells = [f"{errors[measure]:+.1%}".replace("%", " %") for measure in MEASURES]
    return f"{start} | {' | '.join(cells)} |"


MEASURES = ("TTFT mean", "TTFT p99", "TBT p50", "TBT p99")
REPLAY = "docs/explanation/replay.md"
FIGURES = [
    (REPLAY, lambda: conformance("conformance.json", "take their time | 3")),
    (REPLAY, lambda: conformance("conformance_20.json", "it can do | 20")),
    (REPLAY, lambda: conformance("conformance_engine.json", "on a CPU | 0.25")),
    ("README.md", lambda: f"{times_vllm(APART, 0)} times the goodput of twice vLLM"),
    ("README.md", lambda: f"30 ms are allowed: {times_vllm(APART, 2)} times"),
    ("README.md", lambda: f"that does both: {times_vllm(TOGETHER, 0)} and {times_vllm(TOGETHER, 2)} times"),
    ("README.md", lambda: f"takes {handoff_ms(16_384)[0]:.1f} ms"),
    (
        "README.md",
        lambda: f"{killed('injected')} kills of nodes under {killed('requests'):,} requests: none failed",
    ),
    ("README.md", overload),
]


@pytest.mark.parametrize(
    ("document", "figure"), FIGURES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_figure_is_that_of_the_results(document, figure):
    text = re.sub(r"\s+", " ", (ROOT / document).read_text())
    assert figure() in text, f"{document} does not say '{figure()}'"


def test_no_kill_failed_a_request_or_changed_a_token():
    assert killed("failed") == killed("wrong_tokens") == killed("repeated_tokens") == 0


def test_a_handoff_of_512_tokens_is_half_of_its_prefill():
    handoff, prefill = handoff_ms(512)
    assert "half of its prefill" in (ROOT / "docs/explanation/costs.md").read_text()
    assert handoff / prefill == pytest.approx(0.5, abs=0.1)
