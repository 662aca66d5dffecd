"""The body of /v1/embeddings: OpenAI's fields, and of vLLM's extras those that other bodies have."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from conductor.api.openai_schema import is_token_ids, read_by
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
