"""The bytes of OpenAI's answers: streamed events and whole bodies, for chats and completions.

A streamed piece is put between two strings made once per choice. Building an object for
each and serialising it costs ten times as much, and this is what the conductor's process
does for every token of the cluster (`bench/frontend.py`).

    data: {"id":..., "choices":[{"index":0,  delta or text  ,"logprobs":...}]}
          '-------------- before ----------'                '---- after ----'

A choice's first event carries its opening as well (the role of a chat, the prompt that a
completion echoes) and its last one its finish reason, each in a chunk of its own as
OpenAI sends them, but in one write.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pydantic_core

from base.request import FinishReason, SampledToken
from conductor.api.answer_blocks import AnswerBlocks
from conductor.api.completion import Piece
from conductor.api.http_reply import to_json
from conductor.api.openai_message import chat_message, finish_name
from conductor.api.tokenizer import Tokenizer

DONE = "data: [DONE]\n\n"
NO_DETAILS = '"logprobs":null'
"""JSON of the details of tokens, where none are sent."""
PART_BYTES = 1 << 16
"""Bytes after which the next part of an answer begins."""
MIN_LOGPROB = -9999.0
"""OpenAI's word for "next to impossible"; JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The differences between chats and completions."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    text: str
    """JSON around a piece of text, which goes where %s is."""
    no_text: str
    opening: str
    """JSON of the first chunk; %s is the echoed prompt. Empty: only with an echo."""
    logprobs: Callable[[Sequence[SampledToken], Tokenizer, int], dict[str, Any]]
    logprob_lists: tuple[str, ...]
    """The names of what `logprobs` returns a list of."""
    logprobs_end: bytes
    """JSON after the last of these lists."""
    whole: tuple[str, str]
    """JSON before and after the text of an answer that does not stream."""


class Envelope(NamedTuple):
    """The JSON around the choices of one call."""

    shape: Shape
    answer_id: str
    created_s: int
    model_name: str
    tokenizer: Tokenizer
    with_logprobs: bool = False
    with_token_ids: bool = False
    with_usage: bool = False
    """Streams only: whether an event with the usage ends it."""

    def usage_event(self, usage: Mapping[str, Any]) -> str:
        head = self._head(self.shape.chunk_object_name)
        return f'data: {head},"choices":[],"usage":{to_json(usage)}}}\n\n'

    def chunk_ends(self, index: int) -> tuple[str, str]:
        """Return what stands before and after the content of choice `index` in each chunk."""
        head = self._head(self.shape.chunk_object_name)
        usage = ',"usage":null' if self.with_usage else ""
        return f'data: {head},"choices":[{{"index":{index},', f"}}]{usage}}}\n\n"

    def ends(self, usage: Mapping[str, Any]) -> tuple[bytes, bytes]:
        """Return what stands before and after the choices of a call that does not stream."""
        head = self._head(self.shape.object_name)
        return f'{head},"choices":['.encode(), f'],"usage":{to_json(usage)}}}'.encode()

    def _head(self, object_name: str) -> str:
        # By hand: to_json makes an encoder for each object, which takes longer than all else here.
        answer_id, model = to_json(self.shape.id_prefix + self.answer_id), to_json(self.model_name)
        return f'{{"id":{answer_id},"object":"{object_name}","created":{self.created_s},"model":{model}'


class Shown:
    """The prompt as its choices show it: JSON that is made once for all of them."""

    def __init__(self, token_ids: tuple[int, ...] = (), echo: str = "") -> None:
        """Begin. `echo`: text that stands before the generated text."""
        self.has_echo = bool(echo)
        self.given_ids = token_ids
        self._given_echo = echo
        self.logprobs: defaultdict[str, _Grown] = defaultdict(_Grown)
        """The log probabilities of the prompt's tokens, by the names of the shape's lists."""
        self.num_chars = 0
        """The length of the text of these tokens."""

    def add_logprobs(self, tokens: Sequence[SampledToken], envelope: Envelope) -> None:
        """Take more of the prompt's tokens, with their log probabilities."""
        details = envelope.shape.logprobs(tokens, envelope.tokenizer, self.num_chars)
        for name in envelope.shape.logprob_lists:
            self.logprobs[name].add(details[name])
        self.num_chars += _num_chars(tokens, envelope.tokenizer)

    @functools.cached_property
    def echo(self) -> bytes:
        """The JSON of the echo, without its quotes."""
        return to_json(self._given_echo)[1:-1].encode()

    @functools.cached_property
    def token_ids(self) -> bytes:
        return pydantic_core.to_json(self.given_ids)  # json makes a text of each first


class _Grown:
    """JSON of a list's elements, to which more are added, as bytes in parts that may be sent one by one."""

    def __init__(self) -> None:
        self.parts: list[bytearray] = [bytearray()]

    def add(self, elements: Sequence[Any]) -> None:
        if not elements:
            return
        if len(self.parts[-1]) > PART_BYTES:
            self.parts.append(bytearray())
        comma = "," if self.parts[0] else ""
        self.parts[-1] += f"{comma}{to_json(elements)[1:-1]}".encode()


class Choice:
    """One of the answer's choices: its events while it streams, and its whole."""

    def __init__(
        self, envelope: Envelope, index: int, prompt: Shown, blocks: AnswerBlocks | None = None
    ) -> None:
        """Begin an empty choice, number `index` of the call.

        `blocks`: of an answer that is taken apart.
        """
        self.blocks = blocks
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self._envelope = envelope
        self._index = index
        self._prompt = prompt
        self._before = self._after = self._text_before = self._text_after = ""
        self._is_plain = not (envelope.with_logprobs or envelope.with_token_ids)
        self._is_opened = False
        self._offset = 0
        self._texts: list[str] = []
        self._kept: defaultdict[str, _Grown] = defaultdict(_Grown)
        """The details of tokens, by name."""
        self._finish_reason: FinishReason | None = None

    def keep(self, piece: Piece) -> None:
        """Take a piece for `whole`, as the bytes that will be sent: at the end there is no work left."""
        self._count(piece)
        if self.blocks is None:
            self._texts.append(piece.text)
        else:
            self.blocks.add(piece)
        if not self._is_plain:
            details = self._details(piece.tokens)
            for name, elements in {
                **(details["logprobs"] or {}),
                "token_ids": details.get("token_ids"),
            }.items():
                if elements is not None:
                    self._kept[name].add(elements)
        self._finish_reason = piece.finish_reason

    def events(self, piece: Piece) -> str:
        """Return the events that bring a streaming client a piece; may be empty."""
        self._count(piece)
        if self.blocks is not None:
            return self._opening() + self._deltas(piece, self.blocks) + self._finish(piece.finish_reason)
        if self._is_opened and self._is_plain and piece.finish_reason is None:
            return self._text_before + to_json(piece.text) + self._text_after if piece.text else ""
        return self._opening() + self._content(piece) + self._finish(piece.finish_reason)

    def whole(self) -> list[bytes | bytearray]:
        """Return the choice of a call that does not stream, in parts."""
        envelope = self._envelope
        assert self._finish_reason is not None
        parts: list[bytes | bytearray] = [f'{{"index":{self._index},'.encode()]
        parts += [chat_message(self.blocks).encode()] if self.blocks is not None else self._text()
        parts.append(b",")
        if envelope.with_logprobs:
            parts += self._logprob_lists(self._prompt.logprobs, self._kept)
        else:
            parts.append(NO_DETAILS.encode())
        if envelope.with_token_ids:
            parts += [b',"token_ids":[', *self._kept["token_ids"].parts, b'],"prompt_token_ids":']
            parts.append(self._prompt.token_ids)
        parts.append(f',"finish_reason":"{self._finish_name(self._finish_reason)}"}}'.encode())
        return parts

    def _logprob_lists(self, *lists: Mapping[str, _Grown]) -> list[bytes | bytearray]:
        """Return the JSON of log probabilities, in parts: those of `lists` one after the other."""
        parts: list[bytes | bytearray] = []
        opening = '"logprobs":{'
        for name in self._envelope.shape.logprob_lists:
            parts.append(f'{opening}"{name}":['.encode())
            filled = [table[name].parts for table in lists if table[name].parts[0]]
            for at, grown in enumerate(filled):
                parts += [b",", *grown] if at else grown
            opening = "],"
        return [*parts, self._envelope.shape.logprobs_end]

    def _text(self) -> list[bytes | bytearray]:
        before, after = self._envelope.shape.whole
        echo = self._prompt.echo if self._prompt.has_echo else b""
        return [before.encode(), echo, to_json("".join(self._texts))[1:-1].encode(), after.encode()]

    def _finish_name(self, reason: FinishReason) -> str:
        return reason.value if self.blocks is None else finish_name(self.blocks, reason)

    def _count(self, piece: Piece) -> None:
        self.num_tokens += len(piece.tokens)
        self.num_cached_tokens = piece.num_cached_tokens

    def _opening(self) -> str:
        if self._is_opened:
            return ""
        self._is_opened = True
        shape = self._envelope.shape
        # Not before: who is rejected needs none of it.
        self._before, self._after = self._envelope.chunk_ends(self._index)
        text_before, text_after = shape.text.split("%s")
        self._text_before = self._before + text_before
        self._text_after = f'{text_after},{NO_DETAILS},"finish_reason":null{self._after}'
        prompt = self._prompt
        opening = shape.opening or (shape.text % f'"{prompt.echo.decode()}"' if prompt.has_echo else "")
        if self._envelope.with_token_ids:
            opening = f'{opening or shape.no_text},"prompt_token_ids":{prompt.token_ids.decode()}'
        if not opening:
            return ""
        scored = b"".join(self._logprob_lists(prompt.logprobs)).decode() if prompt.num_chars else NO_DETAILS
        return self._chunk(opening, scored, None)

    def _content(self, piece: Piece) -> str:
        if not piece.text and (self._is_plain or not piece.tokens):
            return ""
        return self._chunk(self._envelope.shape.text % to_json(piece.text), self._tokens(piece), None)

    def _deltas(self, piece: Piece, blocks: AnswerBlocks) -> str:
        """Return the chunks of an answer that is taken apart; the first has the details of the tokens."""
        deltas = blocks.add(piece)
        if self._is_plain or not piece.tokens:
            return "".join(self._chunk(delta, NO_DETAILS, None) for delta in deltas)
        first, *others = deltas or [self._envelope.shape.no_text]
        chunks = (self._chunk(delta, NO_DETAILS, None) for delta in others)
        return self._chunk(first, self._tokens(piece), None) + "".join(chunks)

    def _tokens(self, piece: Piece) -> str:
        """Return the JSON of the details of a piece's tokens."""
        return NO_DETAILS if self._is_plain else to_json(self._details(piece.tokens))[1:-1]

    def _finish(self, reason: FinishReason | None) -> str:
        return "" if reason is None else self._chunk(self._envelope.shape.no_text, NO_DETAILS, reason)

    def _chunk(self, content: str, details: str, reason: FinishReason | None) -> str:
        finish = f'"{self._finish_name(reason)}"' if reason else "null"
        return f'{self._before}{content},{details},"finish_reason":{finish}{self._after}'

    def _details(self, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        """Return what is sent of tokens besides their text."""
        details: dict[str, Any] = {"logprobs": None}
        if self._envelope.with_logprobs:
            offset = self._prompt.num_chars + self._offset
            details["logprobs"] = self._envelope.shape.logprobs(tokens, self._envelope.tokenizer, offset)
            self._offset += _num_chars(tokens, self._envelope.tokenizer)
        if self._envelope.with_token_ids:
            details["token_ids"] = [token.token_id for token in tokens]
        return details


def usage(
    num_prompt_tokens: int,
    num_completion_tokens: int,
    num_cached_tokens: int,
    num_reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """Return OpenAI's usage object; of reasoning only where it is parted from the answer."""
    details = {"completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens}}
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        **(details if num_reasoning_tokens is not None else {}),
    }


def _num_chars(tokens: Sequence[SampledToken], tokenizer: Tokenizer) -> int:
    return sum(len(token_text(token.token_id, tokenizer)) for token in tokens)


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token as text: `bytes:` and hexadecimal where it is part of a character."""
    spelled = tokenizer.token_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _chat_logprobs(tokens: Sequence[SampledToken], tokenizer: Tokenizer, offset: int) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(token_id, tokenizer),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = []
    for token in tokens:
        if token.logprobs is not None:
            top = [entry(token_id, logprob) for token_id, logprob in token.logprobs.top]
            content.append({**entry(token.token_id, token.logprobs.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: Sequence[SampledToken], tokenizer: Tokenizer, offset: int) -> dict[str, Any]:
    texts: list[str] = []
    offsets: list[int] = []
    logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    for token in tokens:
        texts.append(token_text(token.token_id, tokenizer))
        offsets.append(offset)
        if token.logprobs is None:  # the first of a prompt
            logprobs.append(None)
            top_logprobs.append(None)
        else:
            logprobs.append(max(token.logprobs.logprob, MIN_LOGPROB))
            # The sampled token is always among them, also where it was none of the likeliest.
            choices = (*token.logprobs.top, (token.token_id, token.logprobs.logprob))
            top_logprobs.append(
                {token_text(item, tokenizer): max(value, MIN_LOGPROB) for item, value in choices}
            )
        offset += len(texts[-1])
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top_logprobs, "text_offset": offsets}


CHAT = Shape(
    id_prefix="chatcmpl-",
    object_name="chat.completion",
    chunk_object_name="chat.completion.chunk",
    text='"delta":{"content":%s}',
    no_text='"delta":{}',
    opening='"delta":{"role":"assistant","content":""}',
    logprobs=_chat_logprobs,
    logprob_lists=("content",),
    logprobs_end=b'],"refusal":null}',
    whole=('"message":{"role":"assistant","content":"', '","refusal":null,"annotations":[]}'),
)
COMPLETION = Shape(
    id_prefix="cmpl-",
    object_name="text_completion",
    chunk_object_name="text_completion",
    text='"text":%s',
    no_text='"text":""',
    opening="",
    logprobs=_completion_logprobs,
    logprob_lists=("tokens", "token_logprobs", "top_logprobs", "text_offset"),
    logprobs_end=b"]}",
    whole=('"text":"', '"'),
)
