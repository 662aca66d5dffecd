"""Bounds on the structure of a JSON body, checked on its bytes before anything parses it.

A parser makes an object of each value, and a validator looks at each: two bytes of body become hundreds of
bytes of memory and microseconds on the event loop. Text is cheap at any length. So what is bounded here is
the number of values, of texts, of members and of nested lists and objects, whatever fields they are in, and
the bytes of all that is no text: a number may have thousands of digits.

The marks that separate values are counted in the whole body first, those in its texts among them. A body that
is short and within the bounds so, as nearly all are, is within them. Of any other the texts are left out, and
what remains is counted.
"""

from __future__ import annotations

from typing import NamedTuple

from base.errors import InvalidRequestError
from base.off_loop import on_body

MAX_VALUES = 196_608
"""Token ids of a prompt are values: above the context windows that are served."""
MAX_MEMBERS = 32_768
MAX_CONTAINERS = 16_384
"""Lists and objects. A parser takes some 350 bytes for the emptiest."""
MAX_TEXTS = 2 * MAX_MEMBERS + MAX_CONTAINERS
MAX_BARE_BYTES = 2 << 20
"""Bytes of all but the texts: room for as many token ids as there may be values."""


class Structure(NamedTuple):
    """How much a body is made of, at least."""

    num_values: int
    num_members: int
    num_containers: int


async def check_structure(raw: bytes) -> None:
    """Raise InvalidRequestError, naming the bound, for a body of too many parts."""
    if refusal := await on_body(raw, excess):
        raise InvalidRequestError(f"the body has {refusal}; send less, or several calls")


def excess(json: bytes) -> str:
    """Return what a body has too much of, in words; empty: of nothing."""
    is_short = len(json) <= MAX_BARE_BYTES and json.count(b'"') <= 2 * MAX_TEXTS
    return "" if is_short and not _excess(structure(json)) else _excess_outside_texts(json)


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
    bare = b"".join(plain.split(b'"')[::2])
    if len(bare) > MAX_BARE_BYTES:
        return f"more than {MAX_BARE_BYTES} bytes beside its texts"
    return _excess(structure(bare))
