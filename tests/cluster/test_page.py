"""The data of the page at /ui, of a cluster that serves: parts of a request, steps, flows, its traffic."""

import itertools

import httpx
import pytest

from tests.cluster.asking import until

NUM_TOKENS = 200
ASKED = {"model": "smollm2", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
PROMPTS = itertools.count(20_000, NUM_TOKENS)


@pytest.fixture
def page(cluster):
    with httpx.Client(base_url=cluster.url, timeout=120) as client:

        def read(name):
            answer = client.get(f"/v1/page/{name}")
            assert answer.status_code == 200, answer.text
            return answer.json()

        read.client = client
        yield read


def ask(page):
    first = next(PROMPTS)  # none that anybody has the KV of
    prompt = list(range(first, first + NUM_TOKENS))
    answer = page.client.post("/v1/completions", json=ASKED | {"prompt": prompt})
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def test_every_part_of_a_request_that_was_served_is_known(page):
    name = ask(page)
    [attempt] = page(f"request.{name}")["attempts"]
    parts = {part["name"]: part["actual_s"] for part in attempt["parts"]}
    assert all(seconds is not None and seconds >= 0 for seconds in parts.values()), parts
    own = [part["actual_s"] for part in attempt["parts"] if not part["beneath"]]
    ttft_s = attempt["actual"]["ttft_s"]
    assert sum(own) - parts["received"] - parts["decoded"] == pytest.approx(ttft_s)
    assert parts["written"] > 0, "KV left for the decode node"
    assert 0 < attempt["actual"]["reserved_s"] < ttft_s, "blocks were set aside while it was computed"
    assert attempt["actual"]["num_chunks"] >= 1
    assert attempt["actual"]["num_output_tokens"] == 8
    listed = page("requests.latest")["requests"]
    assert attempt["asked"]["num_tokens"] == listed[0]["num_tokens"] == NUM_TOKENS


def test_what_the_cluster_does_is_seen(page):
    ask(page)
    now = page("now")
    nodes = [dict(zip(now["columns"], row, strict=True)) for row in now["nodes"]]
    assert {node["roles"] for node in nodes} >= {"prefill", "decode"}
    assert all(node["step_budget"] == 50 for node in nodes if node["step_budget"] is not None)
    prefill, decode = (
        next(node["id"] for node in nodes if node["roles"] == role) for role in ("prefill", "decode")
    )
    assert (prefill, decode) in {(source, target) for source, target, _ in now["links"]}
    ask(page)
    assert page("now")["nodes"]
    until(lambda: page("hour")["next"] - page("hour")["first"] > 2)


@pytest.mark.full
def test_the_traffic_of_this_cluster_is_replayed_on_another(page):
    for _ in range(3):
        ask(page)
    asked = {"nodes": ["1P1D", "2P1D"], "ttft_s": 5.0, "tbt_s": 1.0}
    answer = page.client.post("/v1/replay", json=asked)
    assert answer.status_code == 200, answer.text
    runs = answer.json()["runs"]
    assert [run["nodes"] for run in runs] == ["1P1D", "2P1D"]
    assert all(run["report"]["requests"] >= 3 and "<svg" in run["html"] for run in runs)
    refused = page.client.post("/v1/replay", json=asked | {"nodes": ["1P"]})
    assert refused.status_code == 400
    assert "nodes" in refused.text
