"""The call of OpenAI's embeddings API, from a body to its answer.

The answer is written vector by vector once all are there, so that no error comes in the middle of it and its
text is never held as a whole.
"""

from __future__ import annotations

from array import array
from base64 import b64encode

from conductor.api.backend import Backend
from conductor.api.embeddings.batch import EmbeddingBatch, Wanted, num_dimensions
from conductor.api.embeddings.schema import EmbeddingsBody
from conductor.api.headers import Caller
from conductor.api.http_reply import JSON_PART_HEADERS, Reply, to_json
from conductor.api.options import Options, require_model, unique_id


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
