"""Triton's client, by the Open Inference Protocol: what is served, one text in, one text out."""

import os

import numpy as np
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

PROMPT = "The capital of France is"

with grpc.InferenceServerClient(os.environ["CONDUCTOR_GRPC"]) as client:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("smollm2")
    assert not client.is_model_ready("another")
    described = client.get_model_metadata("smollm2")
    assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in described.inputs] == [
        ("text_input", "BYTES", [1])
    ]
    text = grpc.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([PROMPT.encode()], dtype=object))
    parameters = {"max_tokens": 8, "temperature": 0.0, "stop": "."}
    answer = client.infer("smollm2", [text], request_id="a-triton-call", parameters=parameters)
    assert answer.as_numpy("text_output")[0].decode() == " Paris"
    assert answer.as_numpy("finish_reason")[0] == b"stop"
    assert answer.get_response().id == "a-triton-call"
    refused = None
    try:
        client.infer("smollm2", [text], parameters={"max_tokens": -1})
    except InferenceServerException as error:
        refused = error
    assert refused is not None, "a negative max_tokens was served"
    assert refused.status() == "StatusCode.INVALID_ARGUMENT", refused
    assert "max_tokens" in refused.message(), refused
