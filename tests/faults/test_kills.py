"""A node is killed under a request: the client waits longer and sees nothing else."""

import json
import os
import signal

import grpc
import pytest

from protos.inference_pb2_grpc import InferenceStub
from tests.cluster.asking import EOS, PATIENCE_S, generate_request, generated, held_blocks, until
from tests.cluster.conftest import running

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

PROMPT = [17 + (7 * index) % 20_000 for index in range(700)]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def pools(smollm2, tmp_path_factory):
    with running(smollm2, tmp_path_factory.mktemp("faults"), prefill=2, decode=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(pools):
    tokens, _ = generated(pools.grpc_address, PROMPT, MAX_TOKENS)
    return tokens


def at_work(cluster, role):
    """Return the node of `role` that works on a request, None if there is none."""
    for node in cluster.status()["nodes"]:
        if role in node["roles"] and node["requests"]:
            return node["id"]
    return None


def kill(cluster, name):
    os.kill(cluster.processes[name].pid(), signal.SIGKILL)


def all_back(cluster):
    until(lambda: len(cluster.status()["nodes"]) == 4)


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "places": {"type": "array", "items": {"enum": ["north", "south", "west"]}, "minItems": 6},
        },
        "required": ["name", "places"],
        "additionalProperties": False,
    }
)


def generated_in_form(address, on_tokens=lambda tokens: None):
    """Return the tokens of an answer of the schema; `on_tokens` is called with those so far."""
    request = generate_request(PROMPT, 60)
    request.sampling.grammar.json_schema = SCHEMA
    tokens = []
    with grpc.insecure_channel(address) as channel:
        for response in InferenceStub(channel).Generate(request, timeout=PATIENCE_S):
            tokens += response.token_ids
            on_tokens(tokens)
    return tokens


@pytest.mark.parametrize("num_tokens", [3, 9, 25])
def test_a_decode_node_killed_in_the_middle_of_an_object_costs_it_nothing(pools, num_tokens):
    all_back(pools)
    whole = generated_in_form(pools.grpc_address)
    killed = []

    def on_tokens(tokens):
        if len(tokens) >= num_tokens and not killed:
            killed.append(at_work(pools, "decode"))
            kill(pools, killed[0])

    assert generated_in_form(pools.grpc_address, on_tokens) == whole
    assert len(whole) > num_tokens
    assert killed


@pytest.mark.parametrize("num_tokens", [1, 2, 10])
def test_a_decode_node_killed_mid_stream_loses_and_repeats_no_token(pools, undisturbed, num_tokens):
    all_back(pools)
    tokens = []
    with grpc.insecure_channel(pools.grpc_address) as channel:
        for response in InferenceStub(channel).Generate(
            generate_request(PROMPT, MAX_TOKENS), timeout=PATIENCE_S
        ):
            before = len(tokens)
            tokens += response.token_ids
            if before < num_tokens <= len(tokens):
                kill(pools, at_work(pools, "decode"))
    assert [token for token in tokens if token != EOS] == undisturbed
    until(lambda: held_blocks(pools) == 0)


def test_a_prefill_node_killed_mid_prompt_delays_the_first_token_alone(pools, undisturbed):
    all_back(pools)
    fresh = [token + 1 for token in PROMPT]
    expected, _ = generated(pools.grpc_address, fresh, MAX_TOKENS)
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        kill(pools, name)  # so that the prompt has to be computed again
    until(lambda: pools.status()["ready"] is False)
    all_back(pools)
    with grpc.insecure_channel(pools.grpc_address) as channel:
        call = InferenceStub(channel).Generate(generate_request(fresh, MAX_TOKENS), timeout=PATIENCE_S)
        until(lambda: at_work(pools, "prefill"))
        kill(pools, at_work(pools, "prefill"))
        tokens = [token for response in call for token in response.token_ids]
    assert [token for token in tokens if token != EOS] == expected
    until(lambda: held_blocks(pools) == 0)
