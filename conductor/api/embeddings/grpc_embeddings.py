"""gRPC's `Embed` of protos/inference.proto: what a message wants, and the responses that bring it."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator

from base.errors import invalid
from base.message_bounds import parsed
from conductor.api.embeddings.batch import EmbeddingBatch, Input, Wanted, num_dimensions
from conductor.api.embeddings.schema import MAX_INPUTS
from conductor.api.options import Options
from conductor.api.served_model import ServedModel
from protos import inference_pb2 as pb


def embed_request(data: bytes) -> tuple[pb.EmbedRequest, list[Input]]:
    """Read a message and its inputs; raises InvalidRequestError and DecodeError."""
    message = parsed(data, pb.EmbedRequest)
    if not 1 <= len(message.inputs) <= MAX_INPUTS:
        raise invalid("inputs", f"between 1 and {MAX_INPUTS} are wanted, not {len(message.inputs)}")
    inputs: list[Input] = []
    for place, given in enumerate(message.inputs):
        match given.WhichOneof("input"):
            case "text":
                inputs.append(given.text)
            case "token_ids":
                inputs.append(array("I", given.token_ids.ids))
            case _:
                raise invalid(f"inputs[{place}]", "one of text and token_ids is wanted")
    return message, inputs


def wanted_of(message: pb.EmbedRequest, inputs: list[Input], model: ServedModel) -> Wanted:
    """Return what a message wants of its inputs; raises InvalidRequestError."""
    asked = message.dimensions if message.HasField("dimensions") else None
    return Wanted(
        inputs,
        num_dimensions(model, asked, len(inputs)),
        Options(max_tokens=1, priority=message.priority, cache_salt=message.cache_salt),
        True,
        lambda place: f"inputs[{place}]",
    )


async def responses(batch: EmbeddingBatch, request_id: str) -> AsyncGenerator[pb.EmbedResponse, None]:
    """Yield the vectors of a batch that has run."""
    last = len(batch.vectors) - 1
    for place, vector in enumerate(batch.vectors):
        await batch.turn()
        response = pb.EmbedResponse(request_id=request_id, index=place, embedding=array("f", vector))
        if place == last:
            response.usage.prompt_tokens = batch.num_tokens
            response.usage.cached_tokens = batch.num_cached_tokens
        yield response
