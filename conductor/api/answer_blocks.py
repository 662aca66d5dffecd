"""An answer that is taken apart, as blocks in their order: reasoning, text, calls; one is open at a time.

A block begins, grows and ends. Each API has words of its own for these three, and for a block that is whole.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

from base.request import FinishReason
from conductor.api.completion import Piece
from conductor.api.http_reply import Reply
from conductor.api.parsing.events import Argued, Called, Calling, Event, Said, Thought

DELTA_CHARS = 1 << 14
"""The most of a block in one event of a stream."""


@dataclass
class AnswerBlock:
    """One block."""

    kind: type[Thought] | type[Said] | type[Called]
    index: int
    name: str = ""
    """The tool of a call."""
    call_id: str = ""
    number: int = 0
    """The number of a call among the calls."""
    texts: list[str] = field(default_factory=list)
    is_whole: bool = False
    """Whether it came to its end: a limit of tokens may cut off the last one."""

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Words(NamedTuple):
    """The words of an API's stream for a block; empty: none."""

    begun: Callable[[AnswerBlock], str]
    grown: Callable[[AnswerBlock, str], str]
    ended: Callable[[AnswerBlock], str]


class AnswerBlocks:
    """The blocks of one answer on its way, and its counts. Owned by the event loop."""

    def __init__(self, call_id: Callable[[str, int], str], words: Words) -> None:
        """Begin. `call_id` names a call by its tool and its number."""
        self.all: list[AnswerBlock] = []
        self.num_tokens = self.num_cached_tokens = self.num_reasoning_tokens = 0
        self.is_begun = False
        self.finish_reason: FinishReason | None = None
        self.stopped_by = ""
        self._call_id = call_id
        self._words = words
        self._open: AnswerBlock | None = None
        self._num_calls = 0
        self._said: list[str] = []

    def of(self, kind: type[Thought] | type[Said] | type[Called]) -> list[AnswerBlock]:
        return [block for block in self.all if block.kind is kind]

    def add(self, piece: Piece) -> list[str]:
        """Take a piece in; returns what a stream says of it, in parts."""
        self.is_begun = True
        self.num_tokens += len(piece.tokens)
        self.num_cached_tokens = piece.num_cached_tokens
        self.num_reasoning_tokens = piece.num_reasoning_tokens
        for event in piece.events:
            self._add(event)
        if piece.finish_reason is not None:
            self.finish_reason, self.stopped_by = piece.finish_reason, piece.stopped_by
            self._end()
        said, self._said = self._said, []
        return said

    def _add(self, event: Event) -> None:
        open_kind = self._open.kind if self._open is not None else None
        if isinstance(event, Calling):
            self._begin_call(event.name)
        elif isinstance(event, Called):
            if open_kind is not Called:
                self._begin_call(event.name)
                self._grow(event.arguments)
            self.all[-1].is_whole = True
            self._end()
        else:
            if not isinstance(event, Argued) and open_kind is not type(event):
                self._begin(AnswerBlock(type(event), len(self.all)))
            self._grow(event.text)

    def _begin_call(self, name: str) -> None:
        call_id = self._call_id(name, self._num_calls)
        self._begin(AnswerBlock(Called, len(self.all), name, call_id, self._num_calls))
        self._num_calls += 1

    def _begin(self, block: AnswerBlock) -> None:
        self._end()
        self.all.append(block)
        self._open = block
        self._say(self._words.begun(block))

    def _grow(self, text: str) -> None:
        block = self.all[-1]
        block.texts.append(text)
        for at in range(0, len(text), DELTA_CHARS):
            self._said.append(self._words.grown(block, text[at : at + DELTA_CHARS]))

    def _end(self) -> None:
        """End the block that is open, if one is."""
        block, self._open = self._open, None
        if block is not None:
            block.is_whole |= block.kind is not Called and self.finish_reason is not FinishReason.LENGTH
            self._say(self._words.ended(block))

    def _say(self, said: str) -> None:
        if said:
            self._said.append(said)


async def all_but_last(
    pieces: AsyncGenerator[Piece, None], said: Callable[[Piece], str], stream: Reply | None
) -> str:
    """Send what is said of each piece but the last; return what is of that, with which more may go.

    `stream`: None where nothing is sent before the whole.
    """
    events = ""
    async with aclosing(pieces):
        async for piece in pieces:
            events = said(piece)
            if stream is not None and events and piece.finish_reason is None:
                await stream.event(events)
    return events
