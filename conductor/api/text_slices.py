"""A long text in slices that are encoded apart, into the tokens that the whole would have.

A tokenizer takes two hundred bytes and a microsecond for each character, and all of it before it says that a
text is too long. So a text is cut where the tokenizer would cut it anyway: between two of the pieces (words)
that its pre-tokenizer makes, which no token spans. The last two pieces of a slice are left to the next one,
because what follows could make them longer. No slice ends with a space: whether spaces are one piece depends
on what follows. A special token's name ends the pieces before it, so pieces are counted from the last name in
a slice.

Not every tokenizer cuts so (SentencePiece has one piece for the whole text): `Tokenizer` tries it when it is
loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from base.errors import InvalidRequestError

SLICE_CHARS = 16_384
MAX_PIECE_CHARS = 32_768
"""The most of a text without a place to cut it: no words, nor anything else that has a meaning."""
MAX_PIECE_BYTES = 65_536
"""Most bytes of a text without a place to cut it: a tokenizer takes 150 bytes for each byte of a piece."""
MIN_CHARS = 256
"""The least that is cut into pieces."""

Pieces = Callable[[str], Sequence[tuple[str, tuple[int, int]]]]
"""Returns a text's pieces, each with where it begins and ends."""


def slices(
    text: str, names: re.Pattern[str], max_name_chars: int, pieces: Pieces, slice_chars: int = SLICE_CHARS
) -> Iterator[str]:
    """Yield `text` in parts of about `slice_chars`.

    Args:
        names: Finds the tokens that are found before the text is cut into pieces.
        max_name_chars: The length of the longest of these.
        pieces: The pre-tokenizer.
        slice_chars: A shorter text is one slice.

    Raises InvalidRequestError for a part of more than `MAX_PIECE_CHARS`, or bytes, without a place to cut it.
    """
    at, size = 0, slice_chars
    while len(text) - at > size:
        end = _cut(text, at, at + size, names, max_name_chars, pieces)
        if end > at:
            yield text[at:end]
            at, size = end, slice_chars
        elif size < MAX_PIECE_CHARS and _is_narrow(text[at : at + 2 * size]):
            size *= 2
        else:
            raise InvalidRequestError(
                f"the prompt has more than {size} characters without a break between words",
                "prompt",
            )
    yield text[at:]


def _is_narrow(text: str) -> bool:
    return len(text.encode(errors="replace")) <= MAX_PIECE_BYTES


def _cut(text: str, at: int, end: int, names: re.Pattern[str], max_name_chars: int, pieces: Pieces) -> int:
    """Return the last place before `end` where `text` may be cut; `at`: there is none."""
    begin = at
    for name in names.finditer(text, at, end + max_name_chars):
        if name.start() >= end:
            break
        if name.end() > end - MIN_CHARS:
            return name.start() if name.start() > at else name.end()
        begin = name.end()
    starts = (begin + start for _, (start, _) in reversed(pieces(text[begin:end])[1:-1]))
    return next((start for start in starts if not text[start - 1].isspace()), begin)
