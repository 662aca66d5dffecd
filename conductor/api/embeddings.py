"""The call that is not there: /v1/embeddings is refused in words, for its clients."""

from __future__ import annotations

from base.errors import InvalidRequestError
from conductor.api.backend import Backend
from conductor.api.headers import Caller
from conductor.api.http_reply import Reply
from conductor.api.strict_body import StrictBody


class EmbeddingsBody(StrictBody):
    model: str | None = None


async def embeddings(backend: Backend, body: EmbeddingsBody, caller: Caller, reply: Reply) -> None:
    """Raise InvalidRequestError: nodes send tokens, and nothing of a model's inner states."""
    raise InvalidRequestError(
        f"/v1/embeddings: {backend.model.name} generates text; this server computes no embeddings", "model"
    )
