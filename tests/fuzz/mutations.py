"""Fuzzing by chance alone: good inputs, changed here and there. Needs nothing but this file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.fuzz.targets import Target

CORPUS = Path(__file__).parent / "corpus"
MAX_CHANGES = 6
MAX_BYTES = 1 << 16


class FoundError(AssertionError):
    """An input that is neither taken nor refused as it should be; the message has it whole."""


def corpus(name: str, target: Target) -> list[bytes]:
    """Return the good inputs, and what was found before."""
    kept = sorted((CORPUS / name).glob("*")) if (CORPUS / name).is_dir() else []
    return [*target.seeds, *(path.read_bytes() for path in kept)]


def finding_or_none(name: str, target: Target, data: bytes) -> FoundError | None:
    """Let the target read `data`; return what is wrong with how it took that."""
    try:
        with suppress(*target.refusals):
            target.read(data)
    except Exception as error:
        found = FoundError(f"{name}: {type(error).__name__}: {error}; input {data!r}")
        found.__cause__ = error
        return found
    return None


def tried(name: str, target: Target, data: bytes) -> None:
    """Let the target read `data`; raises FoundError."""
    found = finding_or_none(name, target, data)
    if found is not None:
        raise found


def mutated(rng: random.Random, inputs: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """Return one of the inputs, changed in a few places."""
    data = bytearray(rng.choice(inputs))
    for _ in range(rng.randint(1, MAX_CHANGES)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.randint(1, 16))
        match rng.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(data):
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x5B, 0x7B))
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3:
                del data[at:end]
            case 4:
                data[at:at] = data[at:end] * rng.randint(1, 20)
            case 5 if words:
                data[at:end] = rng.choice(words)
            case _:
                other = rng.choice(inputs)
                data[at:] = other[rng.randrange(len(other) + 1) :]
    return bytes(data[:MAX_BYTES])
