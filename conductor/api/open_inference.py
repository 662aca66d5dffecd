"""gRPC for clients of the Open Inference Protocol, version 2, as KServe and Triton speak it: its text case.

    text_input   BYTES, one element     the prompt, raw as a completion's
    parameters                          max_tokens, stop and what else a completion may say, by the same rules
    text_output, finish_reason          BYTES, one element each

One answer is sent whole: the protocol streams by an extension that few servers share, and `Inference` of
service.py streams. Who sends raw contents is sent raw contents. Clients older than parameters of type double
send numbers as texts, which are read too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from base.errors import InvalidRequestError, invalid
from base.message_bounds import parsed
from base.off_loop import on_body
from base.request import SAMPLING_FIELDS, FinishReason, Slo
from base.rpc import Service
from conductor.api.about import server_version
from conductor.api.access import Authorizer, metadata
from conductor.api.completion import Completions
from conductor.api.headers import Caller
from conductor.api.options import (
    MAX_SHOWN_CHARS,
    Options,
    TextRequest,
    check_options,
    check_request_id,
    make_request,
    params_spelled,
    require_model,
    unique_id,
)
from conductor.api.prompt import text_token_ids
from protos import open_inference_pb2 as pb
from protos import open_inference_pb2_grpc as pb_grpc

NAME = "inference.GRPCInferenceService"
MODEL_VERSION = "1"
INPUT = "text_input"
OUTPUTS = ("text_output", "finish_reason")
_NUMBERS = (*SAMPLING_FIELDS, "max_tokens", "min_tokens", "priority")
_WHOLE = ("top_k", "seed", "max_tokens", "min_tokens", "priority")

_KINDS = {"ignore_eos": (bool, "a bool"), "stop": (str, "a string"), "cache_salt": (str, "a string")}
_SPELLED = {"prompt": INPUT} | {name: f"parameters.{name}" for name in (*_NUMBERS, *_KINDS)}

_Context = grpc.aio.ServicerContext[Any, Any]


class OpenInferenceService(pb_grpc.GRPCInferenceServiceServicer):
    """Answers clients of the Open Inference Protocol. Owned by the event loop."""

    def __init__(
        self, completions: Completions, default_slo: Slo, rng: random.Random, authorizer: Authorizer
    ) -> None:
        self._completions = completions
        self._model = completions.model
        self._default_slo = default_slo
        self._rng = rng
        self._authorizer = authorizer

    def service(self) -> Service:
        add = partial(pb_grpc.add_GRPCInferenceServiceServicer_to_server, self)
        return Service(NAME, add, takes_bytes=True)

    async def ServerLive(self, data: bytes, context: _Context) -> pb.ServerLiveResponse:  # type: ignore[override]  # noqa: N802
        await _read(data, pb.ServerLiveRequest)
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, data: bytes, context: _Context) -> pb.ServerReadyResponse:  # type: ignore[override]  # noqa: N802
        await _read(data, pb.ServerReadyRequest)
        return pb.ServerReadyResponse(ready=self._completions.is_ready)

    async def ModelReady(self, data: bytes, context: _Context) -> pb.ModelReadyResponse:  # type: ignore[override]  # noqa: N802
        asked = await _read(data, pb.ModelReadyRequest)
        is_served = asked.name == self._model.name and asked.version in ("", MODEL_VERSION)
        return pb.ModelReadyResponse(ready=is_served and self._completions.is_ready)

    async def ServerMetadata(self, data: bytes, context: _Context) -> pb.ServerMetadataResponse:  # type: ignore[override]  # noqa: N802
        await _read(data, pb.ServerMetadataRequest)
        return pb.ServerMetadataResponse(name="conductor", version=server_version())

    async def ModelMetadata(self, data: bytes, context: _Context) -> pb.ModelMetadataResponse:  # type: ignore[override]  # noqa: N802
        asked = await _read(data, pb.ModelMetadataRequest)
        self._require_model(asked.name, asked.version)
        tensor = partial(pb.ModelMetadataResponse.TensorMetadata, datatype="BYTES", shape=[1])
        return pb.ModelMetadataResponse(
            name=self._model.name,
            versions=[MODEL_VERSION],
            platform="conductor",
            inputs=[tensor(name=INPUT)],
            outputs=[tensor(name=name) for name in OUTPUTS],
        )

    async def ModelInfer(self, data: bytes, context: _Context) -> pb.ModelInferResponse:  # type: ignore[override]  # noqa: N802
        said = metadata(context)
        with self._authorizer.client(said) as client, self._completions.call(client) as call:
            call.take_bytes(len(data))
            caller = call.caller(said, self._default_slo, context.time_remaining())
            message, text, options = await on_body(data, _asked)
            self._require_model(message.model_name, message.model_version)
            request = await self._request(message.id, text, options, caller)
            texts, num_tokens, num_cached, reason = [], 0, 0, FinishReason.STOP
            async with aclosing(self._completions.generate(request)) as pieces:
                async for piece in pieces:
                    texts.append(piece.text)
                    num_tokens += len(piece.tokens)
                    num_cached = piece.num_cached_tokens
                    reason = piece.finish_reason or reason
        values = dict(zip(OUTPUTS, ("".join(texts), reason.value), strict=True))
        names = [output.name for output in message.outputs] or OUTPUTS
        elements = [values[name].encode() for name in names]
        is_raw = bool(message.raw_input_contents)
        counts = {
            "prompt_tokens": len(request.request.token_ids),
            "completion_tokens": num_tokens,
            "cached_tokens": num_cached,
        }
        return pb.ModelInferResponse(
            model_name=self._model.name,
            model_version=MODEL_VERSION,
            id=message.id,
            parameters={name: pb.InferParameter(int64_param=count) for name, count in counts.items()},
            outputs=[
                _tensor(name, () if is_raw else [element])
                for name, element in zip(names, elements, strict=True)
            ],
            raw_output_contents=[len(each).to_bytes(4, "little") + each for each in elements]
            if is_raw
            else (),
        )

    async def _request(self, request_id: str, text: str, options: Options, caller: Caller) -> TextRequest:
        with params_spelled(_SPELLED):
            check_request_id(request_id)
            check_options(options, caller, self._model)
            token_ids = await text_token_ids(self._model, text)
            unique = unique_id(request_id or f"{self._rng.getrandbits(64):016x}", self._rng)
            return make_request(unique, token_ids, options, caller, self._model, self._rng)

    def _require_model(self, name: str, version: str) -> None:
        require_model(self._model, name)
        if version not in ("", MODEL_VERSION):
            raise invalid("version", f"{MODEL_VERSION} is served, not {version[:MAX_SHOWN_CHARS]!r}")


async def _read(data: bytes, kind: Any) -> Any:
    return await on_body(data, lambda raw: parsed(raw, kind))


def _asked(data: bytes) -> tuple[pb.ModelInferRequest, str, Options]:
    """Read a message, its text and choices; raises InvalidRequestError, naming the field, and DecodeError."""
    message = parsed(data, pb.ModelInferRequest)
    outputs: list[str] = []
    for at, output in enumerate(message.outputs):
        if output.name not in OUTPUTS or output.name in outputs:
            raise invalid(f"outputs[{at}].name", f"one of {', '.join(OUTPUTS)} is wanted, each once")
        outputs.append(output.name)
        _require_no_parameters(output.parameters, f"outputs[{at}]")
    return message, _text(message), _options(message.parameters)


def _text(message: pb.ModelInferRequest) -> str:
    """Return the one text of a message's one input."""
    if [tensor.name for tensor in message.inputs[:2]] != [INPUT]:
        raise invalid("inputs", f"one input is wanted, of the name {INPUT}")
    (tensor,) = message.inputs
    if tensor.datatype != "BYTES":
        raise invalid(f"{INPUT}.datatype", "BYTES is wanted")
    if any(size != 1 for size in tensor.shape):
        raise invalid(f"{INPUT}.shape", "one element is wanted; send a call for each text")
    _require_no_parameters(tensor.parameters, INPUT)
    if message.raw_input_contents:
        elements = [_raw_element(message.raw_input_contents)]
    else:
        elements = tensor.contents.bytes_contents[:2]
    if len(elements) != 1:
        raise invalid(INPUT, "one element is wanted, in its contents or as raw")
    try:
        return elements[0].decode()
    except UnicodeDecodeError:
        raise invalid(INPUT, "its bytes are no UTF-8") from None


def _raw_element(contents: Sequence[bytes]) -> bytes:
    raw = contents[0]
    if len(contents) != 1 or len(raw) < 4 or int.from_bytes(raw[:4], "little") != len(raw) - 4:
        raise invalid("raw_input_contents", "one element is wanted, after its length in four bytes")
    return raw[4:]


def _require_no_parameters(parameters: Mapping[str, pb.InferParameter], param: str) -> None:
    for name in parameters:
        param = f"{param}.parameters.{name[:MAX_SHOWN_CHARS]}"
        raise InvalidRequestError(f"{param} is not supported: leave it out", param)


def _options(parameters: Mapping[str, pb.InferParameter]) -> Options:
    sampling: dict[str, float] = {}
    others: dict[str, Any] = {}
    for name in parameters:
        if name in _NUMBERS:
            (sampling if name in SAMPLING_FIELDS else others)[name] = _number(name, _given(parameters[name]))
        elif name in _KINDS:
            others[name] = _of_kind(name, _given(parameters[name]))
        else:
            known = ", ".join((*_NUMBERS, *_KINDS))
            param = f"parameters.{name[:MAX_SHOWN_CHARS]}"
            raise InvalidRequestError(f"{param} is not supported; these are: {known}", param)
    if "stop" in others:
        others["stop"] = (others["stop"],)
    return Options(sampling=sampling, **others)


def _given(value: pb.InferParameter) -> object:
    kind = value.WhichOneof("parameter_choice")
    return getattr(value, kind) if kind else None


def _of_kind(name: str, given: object) -> object:
    kind, words = _KINDS[name]
    if not isinstance(given, kind):
        raise invalid(f"parameters.{name}", f"{words} is wanted")
    return given


def _number(name: str, given: object) -> float:
    """Return a parameter's number, which some clients send as a text."""
    try:
        if isinstance(given, bool) or not isinstance(given, str | int | float):
            raise ValueError
        number = int(given) if name in _WHOLE else float(given)
        if name in _WHOLE and isinstance(given, float) and given != number:
            raise ValueError
    except (ValueError, OverflowError):
        wanted = "a whole number" if name in _WHOLE else "a number"
        raise invalid(f"parameters.{name}", f"{wanted} is wanted") from None
    return number


def _tensor(name: str, elements: Sequence[bytes]) -> pb.ModelInferResponse.InferOutputTensor:
    contents = pb.InferTensorContents(bytes_contents=elements) if elements else None
    return pb.ModelInferResponse.InferOutputTensor(name=name, datatype="BYTES", shape=[1], contents=contents)
