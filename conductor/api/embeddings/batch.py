"""The inputs of one call on their way to vectors: a few at a time, each a request of its own.

Every input is placed, queued, tried again and given up like any other request. Of a call only `WINDOW` are
under way at once, so that a thousand texts of one client do not stand in the line of all; the others are not
even token ids yet. What is held of a done one is its vector, cut and of length 1, as float32.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from base.errors import InvalidRequestError, ProtocolError, invalid
from base.request import RequestId
from base.together import together
from conductor.api.completion import Completions
from conductor.api.headers import Caller
from conductor.api.options import Options, check_options, make_request, params_spelled
from conductor.api.prompt import INLINE_CHARS, text_token_ids
from conductor.api.served_model import ServedModel

WINDOW = 32
"""Inputs of one call that are under way at once, at most."""
MAX_NUMBERS = 1 << 22
"""Numbers of all vectors of a call: a thousand of 4,096."""
CHARS_OF_A_UNIT = 8
"""Characters whose tokens take one unit to find: where each is two tokens."""
NUMBERS_OF_A_UNIT = 16
"""Numbers of a vector that take one unit of the event loop to bring to length 1, or to write."""

Input = str | Sequence[int]


class Wanted(NamedTuple):
    """The wishes of a call for all of its inputs."""

    inputs: Sequence[Input]
    dimensions: int
    options: Options
    add_special_tokens: bool
    name_of: Callable[[int], str]
    """Names the field of an input, for errors."""


def num_dimensions(model: ServedModel, asked: int | None, num_inputs: int) -> int:
    """Return how many numbers each vector will have; raises InvalidRequestError."""
    rule = model.embedding
    if rule.pooling is None:
        raise InvalidRequestError(f"{model.name} makes no embeddings: {rule.refusal}", "model")
    if asked is not None and not 1 <= asked <= rule.hidden_size:
        raise invalid("dimensions", f"between 1 and {rule.hidden_size} is wanted, {model.name}'s own")
    dimensions = asked or rule.hidden_size
    if num_inputs * dimensions > MAX_NUMBERS:
        raise invalid(
            "input",
            f"at most {MAX_NUMBERS // dimensions} inputs of {dimensions} dimensions in a call, "
            f"not {num_inputs}",
        )
    return dimensions


class EmbeddingBatch:
    """The vectors of one call. Owned by the event loop."""

    def __init__(
        self,
        completions: Completions,
        wanted: Wanted,
        caller: Caller,
        name: RequestId,
        rng: random.Random,
    ) -> None:
        """Begin; `name` is the call's, unique in the cluster. Raises ServeError."""
        self._completions = completions
        self._model = completions.model
        self._rng = rng
        self._wanted = wanted
        self._caller = caller
        self._name = name
        self.vectors: list[bytes] = [b""] * len(wanted.inputs)
        """The finished ones, float32; empty: not yet."""
        self.num_tokens = self.num_cached_tokens = 0
        check_options(wanted.options, caller, self._model)
        caller.charge(min(WINDOW, len(wanted.inputs)) - 1)

    async def run(self) -> None:
        """Return when all vectors are there; raises ServeError, and what is under way is given up."""
        places = iter(range(len(self._wanted.inputs)))
        await together(self._work(places) for _ in range(min(WINDOW, len(self._wanted.inputs))))

    async def turn(self) -> None:
        """Return when the event loop has time to write a vector."""
        await self._completions.turn(1 + self._wanted.dimensions // NUMBERS_OF_A_UNIT)

    async def _work(self, places: Iterator[int]) -> None:
        for place in places:
            with params_spelled({"prompt": self._wanted.name_of(place)}):
                await self._embed(place)

    async def _embed(self, place: int) -> None:
        model, wanted = self._model, self._wanted
        given, caller = wanted.inputs[place], self._caller
        # Bounds are of each input: a thousand take their time.
        caller = caller._replace(arrived_at_s=self._completions.clock.now_s())
        if isinstance(given, str):
            await self._completions.turn(1 + min(len(given), INLINE_CHARS) // CHARS_OF_A_UNIT)
            token_ids = await text_token_ids(model, given, wanted.add_special_tokens)
        else:
            token_ids = tuple(given)
        name = RequestId(f"{self._name}-e{place}")
        asked = make_request(name, token_ids, wanted.options, caller, model, self._rng)
        pooling = model.embedding.pooling
        asked = asked._replace(request=asked.request._replace(pooling=pooling))
        vector, num_cached_tokens = await self._completions.embed(asked)
        await self.turn()
        self.vectors[place] = unit_vector(vector, wanted.dimensions)
        self.num_tokens += len(token_ids)
        self.num_cached_tokens += num_cached_tokens


def unit_vector(vector: bytes, dimensions: int) -> bytes:
    """Return the first numbers of a float32 vector, brought to length 1.

    Raises ProtocolError for one without a direction: what a node sent is no vector.
    """
    numbers = array("f", vector)
    if len(numbers) < dimensions:
        raise ProtocolError(f"a node sent a vector of {len(numbers)} numbers, not {dimensions}")
    numbers = numbers[:dimensions]
    length = math.hypot(*numbers)
    if not 0.0 < length < math.inf:
        raise ProtocolError("a node sent a vector of zeros, or of what is no number")
    return array("f", [number / length for number in numbers]).tobytes()
