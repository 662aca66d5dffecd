"""The log probabilities of a prompt's tokens, as they travel from the node that computes them to the client.

A prompt has 100,000 tokens, and each may come with twenty others: so they are packed as numbers of 4 bytes,
in one run of bytes for each kind, and become values a part at a time, where they are shown.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from base.errors import ProtocolError
from base.request import MAX_TOP_LOGPROBS, SampledToken, TokenLogprobs

NUMBER_BYTES = 4


class PromptLogprobs(NamedTuple):
    """The log probabilities of a prompt's tokens from the second on: nothing comes before the first."""

    logprobs: bytes = b""
    """float32 of each token."""
    top_ids: bytes = b""
    """uint32 of the likeliest tokens in each one's place, the likeliest first; as many for each."""
    top_logprobs: bytes = b""
    """float32 of each of these."""

    @property
    def num_tokens(self) -> int:
        return len(self.logprobs) // NUMBER_BYTES

    def extended(self, more: PromptLogprobs, num_known: int) -> PromptLogprobs:
        """Return these and those of `more` that follow, whose first `num_known` are known already."""
        num_top = len(more.top_ids) // max(len(more.logprobs), 1)
        tops = num_known * num_top * NUMBER_BYTES
        return PromptLogprobs(
            self.logprobs + more.logprobs[num_known * NUMBER_BYTES :],
            self.top_ids + more.top_ids[tops:],
            self.top_logprobs + more.top_logprobs[tops:],
        )

    def tokens(self, token_ids: Sequence[int], begin: int, end: int) -> tuple[SampledToken, ...]:
        """Return tokens [begin, end) of a prompt, which has `token_ids`, with what is known of each."""
        if end <= begin:
            return ()
        first, num_top = max(begin, 1), len(self.top_ids) // max(len(self.logprobs), 1)
        known, tops = slice(first - 1, end - 1), slice((first - 1) * num_top, (end - 1) * num_top)
        ids: array[int] = array("I", _numbers(self.top_ids, tops))
        values: array[float] = array("f", _numbers(self.top_logprobs, tops))
        own_values: array[float] = array("f", _numbers(self.logprobs, known))
        found = [SampledToken(token_ids[0])] if begin == 0 else []
        for at, logprob in enumerate(own_values):
            own = slice(at * num_top, (at + 1) * num_top)
            top = tuple(zip(ids[own], values[own], strict=True))
            found.append(SampledToken(token_ids[first + at], TokenLogprobs(logprob, top)))
        return tuple(found)

    def check(self) -> None:
        """Raise ProtocolError if the runs of bytes cannot be of one prompt."""
        num_tops = len(self.top_ids)
        is_whole = len(self.logprobs) % NUMBER_BYTES == 0 and num_tops == len(self.top_logprobs)
        if not is_whole or (num_tops and (not self.logprobs or num_tops % len(self.logprobs))):
            raise ProtocolError("prompt_logprobs: the numbers are not of one prompt")
        if num_tops > MAX_TOP_LOGPROBS * len(self.logprobs):
            raise ProtocolError(f"prompt_logprobs: more than {MAX_TOP_LOGPROBS} beside a token")


def _numbers(packed: bytes, wanted: slice) -> bytes:
    return packed[wanted.start * NUMBER_BYTES : wanted.stop * NUMBER_BYTES]
