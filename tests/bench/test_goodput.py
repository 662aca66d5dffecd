"""Shapes become clusters, and goodput is the rate at which enough requests are within bounds."""

import json
from pathlib import Path

import pytest
import torch

from base.config import EngineConfig
from base.request import Slo
from bench.goodput import goodput, headers_of, parse_bounds, share_within
from bench.load_report import Goodput
from bench.shapes import Limits, cluster_config, parse_shape, write_model
from bench.sse_client import Outcome
from conductor.api.headers import header_slo
from conductor.api.served_model import load_served_model
from deploy.plan import LocalModel, planned_nodes
from engine.build import build_engine
from engine.weights import random_model
from tests.manual_clock import ManualClock


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([1.0, 0.95, 0.5], 2 + 1 * 0.05 / 0.45),
        ([1.0, 1.0, 1.0], 3.0),
        ([0.8, 1.0, 1.0], 0.0),
        ([0.9, 0.1, 0.95], 1.0),
    ],
)
def test_goodput_is_where_the_share_falls_below_nine_in_ten(shares, expected):
    assert goodput([1.0, 2.0, 3.0], shares) == pytest.approx(expected)


def test_failed_requests_are_not_within_bounds():
    served = Outcome(0.0, [1.0, 1.1], 1.1, output_tokens=2)
    failed = Outcome(0.0, error="no")
    assert share_within([served, failed], Goodput(ttft_s=2)) == 0.5
    assert share_within([served], parse_bounds("2:0.09")[0]) == 0.0


def test_a_shape_becomes_nodes_with_their_roles_and_chunks():
    disaggregated = cluster_config("tiny", parse_shape("2p1d@1024"), Limits())
    model = LocalModel("path", "id", "name")
    planned = planned_nodes(disaggregated, model, "127.0.0.1:1", 8)
    assert [node.process.roles for node in planned] == [("prefill",), ("prefill",), ("decode",)]
    assert [node.process.engine.chunk_tokens for node in planned] == [1024, 1024, 512]
    assert [node.resources.gpus for node in planned] == [1, 1, 1]
    colocated = planned_nodes(
        cluster_config("tiny", parse_shape("2c"), Limits(shared_gpu=True)), model, "", 8
    )
    assert [node.process.roles for node in colocated] == [("prefill", "decode")] * 2
    assert [node.resources.gpus for node in colocated] == [0, 0]
    assert cluster_config("tiny", parse_shape("2c"), Limits()).scheduler.step_budgets
    assert not cluster_config("tiny", parse_shape("2c@512"), Limits()).scheduler.step_budgets
    with pytest.raises(ValueError, match="no shape"):
        parse_shape("1p")


def test_a_model_without_weights_is_served_and_two_nodes_draw_the_same(tmp_path: Path):
    model = write_model("tiny", tmp_path)
    served = load_served_model(tmp_path, "tiny")
    assert served.tokenizer.decode([5, 70], skip_special_tokens=True) == " w5 w70"
    first, second = (random_model(Path(model.path), torch.float32, torch.device("cpu")) for _ in range(2))
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    config = EngineConfig(kv_cache_gib=0.01, random_weights=True, threads=1)
    assert build_engine(config, model.path, ManualClock()).max_model_len == 4096


def test_a_model_takes_as_many_tokens_as_a_bench_asks_for(tmp_path: Path):
    for asked, taken in ((9000, 9000), (100, 4096)):
        write_model("tiny", tmp_path, asked)
        assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == taken


def test_requests_name_their_bounds_as_a_client_does():
    headers = dict(headers_of(parse_bounds("2:0.0085")[0]))
    assert header_slo(headers, Slo()) == Slo(2.0, pytest.approx(0.0085))
    assert headers_of(None) == ()
