"""The one value that the APIs for clients get of a dispatcher, and how they ask for it.

The APIs for clients (`api/openai_generation.py`, `api/service.py`) and the life of a request on the nodes
(`dispatch.py`) meet here and nowhere else.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from base.prompt_logprobs import PromptLogprobs
from base.request import FinishReason, Request, SampledToken


class Generated(NamedTuple):
    """Tokens of one sequence that became known together."""

    tokens: tuple[SampledToken, ...]
    """May be empty in the last one."""
    finish_reason: FinishReason | None
    """Set in the last one, and only there."""
    num_cached_tokens: int
    """Prompt tokens whose KV was matched, not computed. The same in all."""
    prompt_logprobs: PromptLogprobs | None = None
    """None but in the first one, and where they were not asked for."""
    embedding: bytes | None = None
    """The prompt's vector, float32, which comes alone; None: tokens were asked for."""


class EnoughError(Exception):
    """Ends a stream whose answer is whole: closing it would count as a client that left."""


async def enough(stream: AsyncGenerator[Any, None]) -> None:
    """End a stream of tokens, or of what is made of them, before its end: what came is the whole answer."""
    with suppress(EnoughError):
        await stream.athrow(EnoughError())


class Consuming:
    """A stream for the length of an `async with`, as `contextlib.aclosing`; in a stream that is made of it.

    Where that one is ended by `enough`, this one is too."""

    __slots__ = ("_stream",)

    def __init__(self, stream: AsyncGenerator[Generated, None]) -> None:
        self._stream = stream

    async def __aenter__(self) -> AsyncGenerator[Generated, None]:
        return self._stream

    async def __aexit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        if isinstance(error, EnoughError):
            await enough(self._stream)
        await self._stream.aclose()


class TokenGenerator(Protocol):
    """Runs requests on the cluster."""

    def generate(self, request: Request) -> AsyncGenerator[Generated, None]:
        """Yield the request's tokens, or its vector. Consume under `contextlib.aclosing`: closing cancels.

        `enough` ends it as well, and counts as its end.

        Raises:
            ServeError: any of its kinds, before the first token or between two.
        """
        ...

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now could be served."""
        ...
