"""The form of gpt-oss: an answer is messages, each with a header that names its channel and who it is for.

<|channel|>analysis<|message|>...<|end|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}
"""

from __future__ import annotations

import re

from conductor.api.parsing.answer import Trimmed
from conductor.api.parsing.events import Emit, Said, Schemas, Thought
from conductor.api.parsing.feed import Feed, Marks, Steps

MESSAGE, START, END, CALL, RETURN = "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"
CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
MARKS = (MESSAGE, START, END, CALL, RETURN, CHANNEL, CONSTRAIN)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_IN_HEADER = Marks(MESSAGE)
_AFTER = (END, CALL, RETURN)
_IN_BODY = Marks(f"{END}{START}", f"{RETURN}{START}")


def harmony(feed: Feed, schemas: Schemas, emit: Emit, is_thinking: bool) -> Steps[None]:
    """Read an answer."""
    is_first = True
    while feed.text or not feed.is_ended:
        if is_first and not (yield from _has_header(feed)):
            yield from feed.until(Marks(END, RETURN), lambda text: emit(Said(text)))
            return
        is_first = False
        header, mark = yield from feed.text_until(_IN_HEADER)
        if not mark:
            return  # the answer ended in a header
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient:
            yield from _call(feed, emit, recipient[1])
        elif channel and channel[1] == "analysis":
            feed.is_thinking = True
            yield from _text(feed, Trimmed(lambda text: emit(Thought(text))))
            feed.is_thinking = False
        else:
            yield from _text(feed, Trimmed(lambda text: emit(Said(text))))


def _has_header(feed: Feed) -> Steps[bool]:
    space = yield from feed.space()
    found = yield from feed.begins(CHANNEL, MESSAGE, START, "to=", "assistant")
    feed.text = space + found + feed.text
    return bool(found)


def _text(feed: Feed, to: Trimmed) -> Steps[None]:
    """Read a message of text and the opening of the next."""
    held = ""

    def add(text: str) -> None:
        nonlocal held
        # The marks that may end the last message are text anywhere else.
        text = held + text
        cut = max((len(mark) for mark in _AFTER if text.endswith(mark)), default=0)
        held = text[len(text) - cut :]
        if text[: len(text) - cut]:
            to.add(text[: len(text) - cut])

    yield from feed.until(_IN_BODY, add)
    if held and not feed.is_ended:
        to.add(held)
    to.end(keeps_space=True)


def _call(feed: Feed, emit: Emit, recipient: str) -> Steps[None]:
    """Read a call and the opening of the next message."""
    yield from feed.space()
    if feed.text.startswith("{"):
        call, text = yield from feed.call(recipient.removeprefix("functions."))
        if call is not None:
            emit(call)
        elif not feed.is_cut:
            emit(Said(text))
    yield from feed.until(Marks(START), lambda text: None)
