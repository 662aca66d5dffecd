"""The content blocks of a message and the events that bring them, in the order in which they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from base.request import FinishReason
from conductor.api.http_reply import to_json
from conductor.api.parsing.events import Argued, Called, Calling, Event, Thought, deltas_of, value_or_none
from conductor.api.turn import Part

TOOL_USE = "tool_use"


def event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {to_json({'type': kind, **fields})}\n\n"


class MessageBlocks:
    """One message on its way."""

    def __init__(self, call_id: Callable[[str, int], str]) -> None:
        """Begin. `call_id` names a call by its tool and its number."""
        self.num_tokens = self.num_cached_tokens = self.num_reasoning_tokens = 0
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self._call_id = call_id
        self.content: list[dict[str, Any]] = []
        """The blocks that are whole."""
        self._texts: list[str] = []
        """The text of the last block, which is open."""
        self._open: str = ""
        self._call: dict[str, Any] = {}
        """The last call; it has its input when it is whole."""
        self._num_calls = 0

    def add(self, part: Part, is_short: bool) -> str:
        """Take a part in; returns the events that bring it.

        `is_short`: the context window left less room than was asked for.
        """
        piece = part.piece
        self.num_tokens += len(piece.tokens)
        self.num_cached_tokens = piece.num_cached_tokens
        self.num_reasoning_tokens = part.num_reasoning_tokens
        events = "".join(self._added(part.events))
        if piece.finish_reason is not None:
            events += self._closed()
            self._finish(piece.finish_reason, piece.stopped_by, is_short)
        return events

    def usage(self, num_prompt_tokens: int) -> Mapping[str, Any]:
        return {
            "input_tokens": num_prompt_tokens - self.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.num_cached_tokens,
            "output_tokens": self.num_tokens,
            "output_tokens_details": {"thinking_tokens": self.num_reasoning_tokens},
            "cache_creation": None,
            "server_tool_use": None,
            "service_tier": "standard",
            "inference_geo": None,
        }

    def _added(self, events: Sequence[Event]) -> Iterable[str]:
        for found in events:
            if isinstance(found, Calling):
                yield self._closed()
                yield self._call_begun(found.name)
            elif isinstance(found, Argued):
                yield from self._argued(found.text)
            elif isinstance(found, Called):
                if self._open != TOOL_USE:
                    yield self._closed()
                    yield self._call_begun(found.name)
                    yield from self._argued(found.arguments)
                self._call["input"] = value_or_none(found.arguments)
                yield self._closed()
            else:
                kind = "thinking" if isinstance(found, Thought) else "text"
                if self._open != kind:
                    yield self._closed()
                    yield self._begun(kind)
                self._texts.append(found.text)
                delta = {"type": f"{kind}_delta", kind: found.text}
                yield event("content_block_delta", index=len(self.content), delta=delta)

    def _begun(self, kind: str) -> str:
        self._open = kind
        block = {"type": kind, kind: "", **_extra(kind)}
        return event("content_block_start", index=len(self.content), content_block=block)

    def _closed(self) -> str:
        """End the block that is open, if one is."""
        if not self._open:
            return ""
        kind, index = self._open, len(self.content)
        if kind != TOOL_USE:
            self.content.append({"type": kind, kind: "".join(self._texts), **_extra(kind)})
        elif "input" in self._call:  # else the limit cut it off: a whole message has no half of an object
            self.content.append(self._call)
        self._open = ""
        self._texts = []
        sign = {"type": "signature_delta", "signature": ""}
        signed = event("content_block_delta", index=index, delta=sign) if kind == "thinking" else ""
        return signed + event("content_block_stop", index=index)

    def _call_begun(self, name: str) -> str:
        self._open = TOOL_USE
        call_id = self._call_id(name, self._num_calls)
        self._num_calls += 1
        self._call = {"type": TOOL_USE, "id": call_id, "name": name, "caller": {"type": "direct"}}
        block = {**self._call, "input": {}}
        return event("content_block_start", index=len(self.content), content_block=block)

    def _argued(self, arguments: str) -> Iterable[str]:
        for piece in deltas_of(arguments):
            delta = {"type": "input_json_delta", "partial_json": piece}
            yield event("content_block_delta", index=len(self.content), delta=delta)

    def _finish(self, reason: FinishReason, stopped_by: str, is_short: bool) -> None:
        if reason is FinishReason.LENGTH:
            self.stop_reason = "model_context_window_exceeded" if is_short else "max_tokens"
        elif stopped_by:
            self.stop_reason, self.stop_sequence = "stop_sequence", stopped_by
        else:
            self.stop_reason = "tool_use" if self._num_calls else "end_turn"


def _extra(kind: str) -> dict[str, Any]:
    return {"signature": ""} if kind == "thinking" else {"citations": None}
