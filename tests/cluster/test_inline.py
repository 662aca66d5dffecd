"""Prompts that the decode node computes itself give the tokens that a hand-off gives."""

import grpc
import pytest

from base.config import SchedulerConfig
from deploy.api_client import read_json
from protos.inference_pb2_grpc import InferenceStub
from tests.cluster.asking import generate_request, generated, held_blocks, until
from tests.cluster.conftest import running

PROMPTS = [list(range(100, 100 + count)) for count in (1, 5, 31, 32, 33, 90)]
NEW_TOKENS = 12


def placed(cluster, tokens, name):
    """Return the answer's tokens, and whether the decode node computed the prompt."""
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        request = generate_request(tokens, NEW_TOKENS, request_id=name)
        responses = list(InferenceStub(channel).Generate(request, timeout=120))
    (attempt,) = read_json(f"127.0.0.1:{cluster.http_port}", f"/v1/explain/{name}")["attempts"]
    found = [token for response in responses for token in response.token_ids]
    return found, attempt["placed"]["is_inline"]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_tokens_are_those_of_a_hand_off(cluster, smollm2, tmp_path):
    expected = [generated(cluster.grpc_address, prompt, NEW_TOKENS)[0] for prompt in PROMPTS]
    with running(smollm2, tmp_path, scheduler=SchedulerConfig()) as other:
        where = []
        for number, (prompt, tokens) in enumerate(zip(PROMPTS, expected, strict=True)):
            for turn in ("cold", "warm"):
                found, is_inline = placed(other, prompt, f"{turn}{number}")
                assert found[: len(tokens)] == tokens
                where.append(is_inline)
        assert any(where), "every prompt went to the prefill node"
        until(lambda: held_blocks(other) == 0)
