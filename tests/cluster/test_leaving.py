"""A client that leaves, at any stage, leaves no block held on any node."""

import http.client
import json

import grpc
import httpx
import pytest

from protos.inference_pb2_grpc import InferenceStub
from tests.cluster.asking import generate_request, held_blocks, until

# Long enough that it is still being prefilled, or generated from, when the client leaves.
PROMPT = [17 + (7 * index) % 20_000 for index in range(600)]
WITHIN_S = 1.0


@pytest.fixture(autouse=True)
def _idle_before(cluster):
    until(lambda: held_blocks(cluster) == 0 and cluster.status()["running_requests"] == 0)


def check_nothing_is_held(cluster):
    until(lambda: held_blocks(cluster) == 0 and cluster.status()["running_requests"] == 0, WITHIN_S)


def test_over_grpc_before_the_first_token(cluster):
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        call = InferenceStub(channel).Generate(generate_request(PROMPT, 200))
        until(lambda: held_blocks(cluster) > 0)
        call.cancel()
        check_nothing_is_held(cluster)


@pytest.mark.parametrize("num_responses", [1, 3])
def test_over_grpc_between_two_tokens(cluster, num_responses):
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        call = InferenceStub(channel).Generate(generate_request(PROMPT, 200))
        for _ in range(num_responses):
            next(call)
        call.cancel()
        check_nothing_is_held(cluster)


def test_over_http_between_two_tokens(cluster):
    body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
    check_nothing_is_held(cluster)


def test_over_http_without_streaming_while_it_waits(cluster):
    body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 500, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", cluster.http_port)
    connection.request("POST", "/v1/completions", json.dumps(body))
    until(lambda: held_blocks(cluster) > 0)
    connection.close()
    check_nothing_is_held(cluster)


def test_a_deadline_that_passes_ends_the_request_and_frees_its_blocks(cluster):
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        call = InferenceStub(channel).Generate(generate_request(PROMPT, 500), timeout=2.0)
        with pytest.raises(grpc.RpcError) as caught:
            for _ in call:
                pass
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    check_nothing_is_held(cluster)
