"""The call of OpenAI's embeddings API, from a body to its answer.

The body has OpenAI's fields, and of vLLM's extras those that other bodies have.

The answer is written vector by vector once all are there, so that no error comes in the middle of it and its
text is never held as a whole.
"""

from __future__ import annotations

from array import array
from base64 import b64encode
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from conductor.api.backend import Backend
from conductor.api.embeddings.batch import EmbeddingBatch, Wanted, num_dimensions
from conductor.api.headers import Caller
from conductor.api.http_reply import JSON_PART_HEADERS, Reply, to_json
from conductor.api.openai_schema import is_token_ids, read_by
from conductor.api.options import Options, require_model, unique_id
from conductor.api.strict_body import StrictBody

MAX_INPUTS = 2_048
"""OpenAI's limit."""


def _inputs(value: Any) -> list[str | list[int]]:
    """Return the inputs of a call: texts and lists of token ids, of which there may be one without a list."""
    inputs = [value] if isinstance(value, str) or is_token_ids(value) else value
    if isinstance(inputs, list):
        if len(inputs) > MAX_INPUTS:
            raise PydanticCustomError("too_long", f"at most {MAX_INPUTS} inputs, not {len(inputs)}")
        # No line for each: there are thousands.
        kinds = set(map(type, inputs))
        are_token_ids = kinds == {list} and all(inputs) and is_token_ids(chain.from_iterable(inputs))
        if kinds == {str} or are_token_ids:
            return inputs
    raise PydanticCustomError("input", "Input should be a string, a list of token ids, or a list of either")


class EmbeddingsBody(StrictBody):
    """The body of a call for vectors."""

    model: str
    input: Annotated[list[str | list[int]], read_by(_inputs, MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


async def embeddings(backend: Backend, body: EmbeddingsBody, caller: Caller, reply: Reply) -> None:
    """Answer a /v1/embeddings call; raises ServeError."""
    model, count = backend.model, len(body.input)
    require_model(model, body.model)
    # vLLM's priority: lower goes first
    options = Options(max_tokens=1, priority=-(body.priority or 0), cache_salt=body.cache_salt or "")
    wanted = Wanted(
        body.input,
        num_dimensions(model, body.dimensions, count),
        options,
        body.add_special_tokens is not False,
        lambda place: "input" if count == 1 else f"input[{place}]",
    )
    batch = EmbeddingBatch(
        backend.completions, wanted, caller, unique_id(reply.request_id, backend.rng), backend.rng
    )
    await batch.run()
    await _write(batch, body, model.name, reply)


async def _write(batch: EmbeddingBatch, body: EmbeddingsBody, model_name: str, reply: Reply) -> None:
    before = '{"object":"list","data":['
    for place, vector in enumerate(batch.vectors):
        await batch.turn()
        shown = vector_json(vector, body.encoding_format == "base64")
        row = f'{before}{{"object":"embedding","index":{place},"embedding":{shown}}}'
        await reply.event(row, JSON_PART_HEADERS)
        before = ","
    usage = {
        "prompt_tokens": batch.num_tokens,
        "total_tokens": batch.num_tokens,
        "prompt_tokens_details": {"cached_tokens": batch.num_cached_tokens},
    }
    await reply.end(f'],"model":{to_json(model_name)},"usage":{to_json(usage)}}}')


def vector_json(vector: bytes, is_base64: bool) -> str:
    """Return a float32 vector as JSON: a text, or numbers of so many digits that the same ones are read."""
    if is_base64:
        return f'"{b64encode(vector).decode("ascii")}"'
    return f"[{','.join(map('%.9g'.__mod__, array('f', vector)))}]"
