"""The clients that people use get real answers from the whole cluster."""

import grpc
import pytest
from openai import NotFoundError, OpenAI

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub

QUESTION = [{"role": "user", "content": "In one sentence: what is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture
def client(cluster):
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_the_openai_client_chats(client):
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=30)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 8


def test_the_openai_client_streams(client):
    chunks = list(
        client.chat.completions.create(
            model="smollm2",
            messages=QUESTION,
            temperature=0,
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *content, usage = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in content) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in content][-1] == "stop"
    assert usage.usage.prompt_tokens > 8
    assert len(content) > 5, "the answer came at once, not token by token"


def test_choices_with_a_seed_are_drawn_again_the_same(client):
    def ask():
        answer = client.chat.completions.create(
            model="smollm2", messages=QUESTION, n=2, seed=7, temperature=1.5, max_tokens=12
        )
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert first == ask()
    assert first[0] != first[1]


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=QUESTION)


def test_a_grpc_client_chats(cluster):
    request = pb.GenerateRequest(
        chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=QUESTION[0]["content"])]),
        sampling=pb.Sampling(temperature=0.0),
        stop=pb.Stop(max_tokens=30),
    )
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        responses = list(InferenceStub(channel).Generate(request, timeout=60))
    assert "".join(response.text for response in responses) == ANSWER
    assert responses[-1].finish_reason == "stop"
