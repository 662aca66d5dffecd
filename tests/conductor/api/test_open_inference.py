"""The Open Inference Protocol, by the generated stub against a real server."""

import importlib.metadata
from contextlib import asynccontextmanager

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from base.request import FinishReason
from conductor.api.access import SERVICES
from conductor.api.open_inference import NAME
from protos import open_inference_pb2 as pb
from protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from tests.conductor.api.conversing import prompt_of
from tests.conductor.fakes import MODEL, serving, spoken


@asynccontextmanager
async def calling(model, text="yes, sir"):
    async with (
        serving(model, lambda request: spoken(model, text)) as api,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        yield GRPCInferenceServiceStub(channel), api


def text_input(text=b"hello", **fields):
    contents = pb.InferTensorContents(bytes_contents=[text])
    fields = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": contents, **fields}
    return pb.ModelInferRequest.InferInputTensor(**fields)


def parameter(value):
    kind = {bool: "bool", int: "int64", str: "string", float: "double"}[type(value)]
    return pb.InferParameter(**{f"{kind}_param": value})


def infer(parameters=None, **fields):
    given = {name: parameter(value) for name, value in (parameters or {}).items()}
    return pb.ModelInferRequest(
        **{"model_name": MODEL, "inputs": [text_input()], "parameters": given, **fields}
    )


def outputs(response):
    return {tensor.name: tensor.contents.bytes_contents[0].decode() for tensor in response.outputs}


async def test_a_text_is_answered_whole_with_its_counts(model):
    async with calling(model) as (stub, api):
        response = await stub.ModelInfer(infer({"max_tokens": 7, "temperature": 0.5}, id="mine"))
    assert outputs(response) == {"text_output": "yes, sir", "finish_reason": FinishReason.STOP.value}
    assert (response.model_name, response.id) == (MODEL, "mine")
    (request,) = api.dispatcher.requests
    assert prompt_of(model, api) == "hello"
    assert (request.stop.max_tokens, request.sampling.temperature) == (7, 0.5)
    assert response.parameters["prompt_tokens"].int64_param == len(request.token_ids)
    assert response.parameters["completion_tokens"].int64_param > 0


async def test_raw_contents_numbers_as_texts_and_one_output_are_taken(model):
    raw = len(b"hello").to_bytes(4, "little") + b"hello"
    bare = pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])
    wanted = [pb.ModelInferRequest.InferRequestedOutputTensor(name="text_output")]
    async with calling(model) as (stub, api):
        response = await stub.ModelInfer(
            infer(
                {"top_p": "0.25", "seed": "12", "stop": ",", "ignore_eos": True},
                inputs=[bare],
                raw_input_contents=[raw],
                outputs=wanted,
            )
        )
    assert [(tensor.name, tensor.HasField("contents")) for tensor in response.outputs] == [
        ("text_output", False)
    ]
    assert response.raw_output_contents == [b"\x03\0\0\0yes"]
    (request,) = api.dispatcher.requests
    assert (request.sampling.top_p, request.sampling.seed, request.stop.stop_token_ids) == (0.25, 12, ())
    assert prompt_of(model, api) == "hello"


async def test_the_server_and_its_model_are_described(model):
    async with calling(model) as (stub, _api):
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert (await stub.ModelReady(pb.ModelReadyRequest(name=MODEL))).ready
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="other"))).ready
        assert (await stub.ServerMetadata(pb.ServerMetadataRequest())).name == "conductor"
        described = await stub.ModelMetadata(pb.ModelMetadataRequest(name=MODEL))
    assert [(tensor.name, tensor.datatype) for tensor in described.inputs] == [("text_input", "BYTES")]
    assert [tensor.name for tensor in described.outputs] == ["text_output", "finish_reason"]


async def test_a_server_that_is_not_installed_says_so_as_its_version(model, monkeypatch):
    def distribution(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", distribution)
    async with calling(model) as (stub, _api):
        assert (await stub.ServerMetadata(pb.ServerMetadataRequest())).version == "0+unknown"


BAD = {
    "inputs": infer(inputs=[]),
    "inputs again": infer(inputs=[text_input(), text_input()]),
    "inputs by another name": infer(inputs=[text_input(name="prompt")]),
    "text_input": infer(inputs=[text_input(b"\xff")]),
    "text_input.shape": infer(inputs=[text_input(shape=[2])]),
    "text_input of nothing": infer(inputs=[text_input(contents=pb.InferTensorContents())]),
    "text_input.datatype": infer(inputs=[text_input(datatype="FP32")]),
    "text_input.parameters.x": infer(inputs=[text_input(parameters={"x": parameter(1)})]),
    "raw_input_contents": infer(raw_input_contents=[b"\xff\xff\xff\x7fa"]),
    "raw_input_contents, cut": infer(raw_input_contents=[b"\x01"]),
    "raw_input_contents, twice": infer(raw_input_contents=[b"\1\0\0\0a", b"\1\0\0\0a"]),
    # Each would bring the whole answer again.
    "outputs[1].name": infer(
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="text_output")] * 2
    ),
    "outputs[0].name": infer(outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="logits")]),
    "parameters.best_of": infer({"best_of": 2}),
    "parameters.max_tokens": infer({"max_tokens": "many"}),
    "parameters.top_k": infer({"top_k": 1.5}),
    "parameters.seed": infer({"seed": float("inf")}),
    "parameters.temperature": infer({"temperature": True}),
    "parameters.temperature, of nothing": pb.ModelInferRequest(
        model_name=MODEL, inputs=[text_input()], parameters={"temperature": pb.InferParameter()}
    ),
    "parameters.temperature above": infer({"temperature": 3.0}),
    "parameters.top_p no number": infer({"top_p": "nan"}),
    "parameters.stop": infer({"stop": 1}),
    "version": infer(model_version="2"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_message_is_refused_by_the_name_of_its_field(model, name):
    async with calling(model) as (stub, api):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(BAD[name])
        assert api.dispatcher.requests == []
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    trailers = dict(caught.value.trailing_metadata())
    (bad,) = [
        found
        for detail in status_pb2.Status.FromString(trailers["grpc-status-details-bin"]).details
        if detail.Unpack(found := error_details_pb2.BadRequest())
    ]
    assert bad.field_violations[0].field == name.replace(",", "").split(" ")[0]


async def test_another_model_is_not_found(model):
    async with calling(model) as (stub, _api):
        for call in (
            stub.ModelInfer(infer(model_name="other")),
            stub.ModelInfer(infer(model_name="")),
            stub.ModelMetadata(pb.ModelMetadataRequest(name="other")),
        ):
            assert await call.code() is grpc.StatusCode.NOT_FOUND


async def test_many_inputs_and_parameters_are_refused_before_they_are_read(model):
    many = infer(inputs=[text_input()] * 5_000)
    wide = infer(dict.fromkeys((f"p{at}" for at in range(5_000)), 1))
    async with calling(model) as (stub, api):
        for message in (many, wide):
            assert await stub.ModelInfer(message).code() is grpc.StatusCode.INVALID_ARGUMENT
        assert api.dispatcher.requests == []


def test_the_service_is_for_clients_with_keys():
    assert SERVICES[NAME] is SERVICES["conductor.v1.Inference"]
