"""Bounds on the structure of a JSON body, checked on its bytes before anything parses it.

A parser makes an object of each value, and a validator looks at each: two bytes of body become hundreds of
bytes of memory and microseconds on the event loop. Text is cheap at any length. So what is bounded here is
the number of values, of members and of nested lists and objects, whatever fields they are in.

The marks that separate values are counted in the whole body first, those in its texts among them. A body that
is within the bounds so, as nearly all are, is within them. Of any other the texts are left out, on another
thread, and what remains is counted.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from base.errors import InvalidRequestError

MAX_VALUES = 262_144
"""Token ids of a prompt are values: above the context windows that are served."""
MAX_MEMBERS = 32_768
MAX_CONTAINERS = 16_384
"""Lists and objects. A parser takes some 350 bytes for the emptiest."""
MAX_TEXTS = 2 * MAX_MEMBERS + MAX_VALUES


class Structure(NamedTuple):
    """How much a body is made of, at least."""

    num_values: int
    num_members: int
    num_containers: int


async def check_structure(raw: bytes) -> None:
    """Raise InvalidRequestError, naming the bound, for a body of too many parts."""
    if _excess(structure(raw)):
        refusal = await asyncio.to_thread(_excess_outside_texts, raw)
        if refusal:
            raise InvalidRequestError(f"the body has {refusal}; send less, or several calls")


def structure(json: bytes) -> Structure:
    """Count what separates the parts of `json`, in texts too."""
    return Structure(json.count(b","), json.count(b":"), json.count(b"[") + json.count(b"{"))


def _excess(found: Structure) -> str:
    """Return what there is too much of, in words; empty: of nothing."""
    if found.num_containers > MAX_CONTAINERS:
        return f"more than {MAX_CONTAINERS} lists and objects"
    if found.num_members > MAX_MEMBERS:
        return f"more than {MAX_MEMBERS} fields"
    return f"more than {MAX_VALUES} values" if found.num_values > MAX_VALUES else ""


def _excess_outside_texts(json: bytes) -> str:
    # Without escapes, every second part between two quotes is a text.
    plain = json.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 2 * MAX_TEXTS:
        return f"more than {MAX_TEXTS} texts"
    return _excess(structure(b"".join(plain.split(b'"')[::2])))
