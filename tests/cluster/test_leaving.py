"""A client that leaves, at any stage, leaves no block held on any node."""

import http.client
import json
import urllib.request

import grpc
import httpx
import pytest

from protos.inference_pb2_grpc import InferenceStub
from tests.cluster.asking import generate_request, held_blocks, until

# Long enough that it is still being prefilled, or generated from, when the client leaves.
PROMPT = [17 + (7 * index) % 20_000 for index in range(600)]


CUT_SHORT = ("cancelled", "DeadlineError")
"""Outcomes of a sequence whose client left, or ran out of time: then its call and the request end together,
and either may be first."""


def ended_early(cluster):
    """Return how many sequences were cut short."""
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    names = [f'conductor_sequences_total{{outcome="{outcome}"}} ' for outcome in CUT_SHORT]
    return sum(float(line.removeprefix(name)) for line in lines for name in names if line.startswith(name))


@pytest.fixture
def early_before(cluster):
    until(lambda: is_idle(cluster))
    return ended_early(cluster)


def is_idle(cluster):
    return held_blocks(cluster) == 0 and cluster.status()["running_requests"] == 0


def check_nothing_is_held(cluster, early_before):
    """Wait for it; one that had run to its end instead would not count as cut short."""
    until(lambda: is_idle(cluster))
    assert ended_early(cluster) == early_before + 1


def test_over_grpc_before_the_first_token(cluster, early_before):
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        call = InferenceStub(channel).Generate(generate_request(PROMPT, 200))
        until(lambda: held_blocks(cluster) > 0)
        call.cancel()
        check_nothing_is_held(cluster, early_before)


@pytest.mark.parametrize("num_responses", [1, 3])
def test_over_grpc_between_two_tokens(cluster, early_before, num_responses):
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        call = InferenceStub(channel).Generate(generate_request(PROMPT, 200))
        for _ in range(num_responses):
            next(call)
        call.cancel()
        check_nothing_is_held(cluster, early_before)


def test_over_http_between_two_tokens(cluster, early_before):
    body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
    check_nothing_is_held(cluster, early_before)


def test_over_http_without_streaming_while_it_waits(cluster, early_before):
    body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 500, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", cluster.http_port)
    connection.request("POST", "/v1/completions", json.dumps(body))
    until(lambda: held_blocks(cluster) > 0)
    connection.close()
    check_nothing_is_held(cluster, early_before)


def test_a_deadline_that_passes_ends_the_request_and_frees_its_blocks(cluster, early_before):
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        call = InferenceStub(channel).Generate(generate_request(PROMPT, 500), timeout=2.0)
        with pytest.raises(grpc.RpcError) as caught:
            for _ in call:
                pass
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    check_nothing_is_held(cluster, early_before)
