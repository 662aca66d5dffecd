"""Vectors of texts are of transformers' own states, through the whole cluster and unmodified clients."""

import grpc
import pytest
import torch
from openai import BadRequestError, OpenAI

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from tests.cluster.asking import until
from tests.cluster.conftest import BLOCK_SIZE
from tests.engine.test_smollm2 import fast_prompts

FAR = 1e-5


@pytest.fixture
def client(cluster):
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def expected(model, token_ids, dimensions=None):
    with torch.inference_mode():
        state = model.model(input_ids=torch.tensor([token_ids])).last_hidden_state[0, -1, :dimensions]
    return state / state.norm()


def far(found, wanted):
    return (torch.tensor(found) - wanted).norm().item()


def num_held(cluster):
    return sum(node["held_blocks"] for node in cluster.status()["nodes"])


def test_each_is_the_normed_state_of_the_last_token(cluster, client, model, tokenizer):
    texts = fast_prompts()
    given = [tokenizer.encode(text).ids for text in texts]
    assert max(map(len, given)) > 2 * BLOCK_SIZE
    for attempt in range(2):
        answer = client.embeddings.create(model="smollm2", input=texts)
        for row, token_ids in zip(answer.data, given, strict=True):
            assert far(row.embedding, expected(model, token_ids)) < FAR
        assert answer.usage.prompt_tokens == sum(map(len, given))
        cached = answer.usage.model_dump()["prompt_tokens_details"]["cached_tokens"]
        least = sum((len(token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE for token_ids in given)
        assert cached >= least * attempt
    until(lambda: num_held(cluster) == 0)


def test_token_ids_dimensions_and_grpc_agree(cluster, client, model, tokenizer):
    token_ids = tokenizer.encode("The capital of France is").ids
    answer = client.embeddings.create(
        model="smollm2", input=token_ids, dimensions=64, encoding_format="float"
    )
    wanted = expected(model, token_ids, 64)
    assert far(answer.data[0].embedding, wanted) < FAR
    asked = pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=token_ids))], dimensions=64)
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        (response,) = InferenceStub(channel).Embed(asked)
    assert far(list(response.embedding), wanted) < FAR


def test_what_is_asked_wrongly_is_a_400(client):
    with pytest.raises(BadRequestError, match="dimensions: between 1 and 576"):
        client.embeddings.create(model="smollm2", input="a", dimensions=577)
