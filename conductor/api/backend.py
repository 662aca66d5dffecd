"""The value that every HTTP handler of `routes.py` is given: what its answers are made of."""

from __future__ import annotations

import random
from typing import NamedTuple

from conductor.api.completion import Completions
from conductor.api.responses.held import HeldResponses
from conductor.api.served_model import ServedModel


class Backend(NamedTuple):
    """The conductor as handlers see it."""

    completions: Completions
    rng: random.Random
    """The source of request ids and seeds."""
    started_s: int
    """Seconds since the epoch."""
    held: HeldResponses
    """The responses that clients may go on from."""

    @property
    def model(self) -> ServedModel:
        return self.completions.model
