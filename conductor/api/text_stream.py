"""The text of one sequence as a client may see it: whole characters, up to a stop string.

    token ids -> Detokenizer -> characters -> TextStream -> what may be sent

Two things hold text back. A character spread over tokens waits for its last byte; and
text that could be the beginning of a stop string waits until it is one or cannot be one
any more, because what was sent cannot be taken back.

The text ends at the first moment a stop string is complete, and begins to be left out
where that stop string begins (where two are complete at once, the longer). This says
nothing of tokens, so the same text is cut the same way however the model happened to
split it; "the stop string that begins first" would need text that is not there yet.
"""

from __future__ import annotations

from conductor.api.tokenizer import Detokenizer


class TextStream:
    """Turns one sequence's tokens into text. Owned by the event loop."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Begin an empty text. `stop`: strings that end it, of which none is empty.

        The text of the first `min_tokens` is not searched for them; `include_stop`: they are shown.
        """
        self._detokenizer = detokenizer
        self._stop = stop
        self._include_stop = include_stop
        self._unsearched_tokens = min_tokens
        self._held = ""
        self.stopped_by = ""
        """The stop string that is complete: nothing comes any more."""

    @property
    def is_stopped(self) -> bool:
        return bool(self.stopped_by)

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` sets free; may be empty."""
        text = self._detokenizer.push(token_id)
        if self._unsearched_tokens:
            self._unsearched_tokens -= 1
            return text
        return self._search(text) if self._stop else text

    def finish(self) -> str:
        """Return the text that was held back and turns out to be no stop string."""
        if self.is_stopped:
            return ""
        text = self._detokenizer.finish()
        text = self._search(text) if self._stop else text
        held, self._held = self._held, ""
        return text + held

    def _search(self, text: str) -> str:
        if self.is_stopped:
            return ""
        # Any stop string that is not complete yet begins in what is held, so this is all
        # that needs to be looked at.
        window = self._held + text
        ends = [(at + len(stop), at) for stop in self._stop if (at := window.find(stop)) >= 0]
        if ends:
            self._held = ""
            end, begin = min(ends)
            self.stopped_by = window[begin:end]
            return window[: end if self._include_stop else begin]
        free = len(window) - max(_length_begun(stop, window) for stop in self._stop)
        self._held = window[free:]
        return window[:free]


def _length_begun(stop: str, window: str) -> int:
    """Return the length of the longest end of `window` that begins `stop` and is not all of it."""
    at = window.find(stop[0], max(0, len(window) - len(stop) + 1))
    while at >= 0 and not stop.startswith(window[at:]):
        at = window.find(stop[0], at + 1)
    return len(window) - at if at >= 0 else 0
