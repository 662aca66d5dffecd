"""The output items of a response and the events that bring them, in the order in which they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from base.request import FinishReason
from conductor.api.http_reply import to_json
from conductor.api.parsing.events import Argued, Called, Calling, Event, Thought, deltas_of
from conductor.api.turn import Part

FUNCTION_CALL = "function_call"


class OutputItems:
    """The output of one response on its way."""

    def __init__(self, request_id: str, call_id: Callable[[str, int], str]) -> None:
        """Begin. `call_id` names a call by its tool and its number."""
        self.num_tokens = self.num_cached_tokens = self.num_reasoning_tokens = 0
        self.done: list[dict[str, Any]] = []
        """The items that are whole."""
        self.calls: list[tuple[str, Called]] = []
        """The calls among them, with their ids."""
        self._said: list[str] = []
        self._request_id = request_id
        self._call_id = call_id
        self._texts: list[str] = []
        self._open = ""
        self._call: dict[str, Any] = {}
        """The last call, without its arguments."""
        self._sequence_number = -1

    @property
    def text(self) -> str:
        """All text of the answer."""
        return "".join(self._said)

    def event(self, kind: str, **fields: Any) -> str:
        self._sequence_number += 1
        numbered = {"type": kind, "sequence_number": self._sequence_number, **fields}
        return f"event: {kind}\ndata: {to_json(numbered)}\n\n"

    def add(self, part: Part) -> str:
        """Take a part in; returns the events that bring it."""
        piece = part.piece
        self.num_tokens += len(piece.tokens)
        self.num_cached_tokens = piece.num_cached_tokens
        self.num_reasoning_tokens = part.num_reasoning_tokens
        events = "".join(self._added(part.events))
        if piece.finish_reason is None:
            return events
        return events + self._closed(
            "incomplete" if piece.finish_reason is FinishReason.LENGTH else "completed"
        )

    def _added(self, events: Sequence[Event]) -> Iterable[str]:
        for found in events:
            if isinstance(found, Calling | Argued | Called):
                yield from self._of_call(found)
                continue
            kind = "reasoning" if isinstance(found, Thought) else "message"
            if self._open != kind:
                yield self._closed()
                yield self._begun(kind)
            self._texts.append(found.text)
            if kind == "reasoning":
                yield self.event("response.reasoning_text.delta", **self._place(), delta=found.text)
            else:
                self._said.append(found.text)
                yield self.event("response.output_text.delta", **self._place(), delta=found.text, logprobs=[])

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id(self._open), "output_index": len(self.done), "content_index": 0}

    def _item_id(self, kind: str) -> str:
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        return f"{prefix}_{self._request_id}_{len(self.done)}"

    def _begun(self, kind: str) -> str:
        self._open = kind
        item = self._item(kind, "", "in_progress")
        item["content"] = []
        events = self.event("response.output_item.added", output_index=len(self.done), item=item)
        if kind == "reasoning":
            return events
        return events + self.event("response.content_part.added", **self._place(), part=_part(kind, ""))

    def _closed(self, status: str = "completed") -> str:
        """End the item that is open, if one is: with `status`, or incomplete where it is a call."""
        kind, text = self._open, "".join(self._texts)
        if not kind:
            return ""
        if kind == FUNCTION_CALL:
            return self._call_ended("incomplete")
        place = self._place()
        if kind == "reasoning":
            events = self.event("response.reasoning_text.done", **place, text=text)
        else:
            events = self.event("response.output_text.done", **place, text=text, logprobs=[])
            events += self.event("response.content_part.done", **place, part=_part(kind, text))
        item = self._item(kind, text, status)
        events += self.event("response.output_item.done", output_index=len(self.done), item=item)
        self.done.append(item)
        self._open, self._texts = "", []
        return events

    def _item(self, kind: str, text: str, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"type": kind, "id": self._item_id(kind), "status": status}
        if kind == "reasoning":
            return {**item, "summary": [], "content": [_part(kind, text)]}
        return {**item, "role": "assistant", "content": [_part(kind, text)]}

    def _of_call(self, found: Calling | Argued | Called) -> Iterable[str]:
        match found:
            case Calling(name):
                yield self._closed()
                yield self._call_begun(name)
            case Argued(text):
                yield from self._argued(text)
            case Called(name, arguments):
                if self._open != FUNCTION_CALL:
                    yield self._closed()
                    yield self._call_begun(name)
                    yield from self._argued(arguments)
                self.calls.append((self._call["call_id"], found))
                yield self._call_ended("completed")

    def _call_begun(self, name: str) -> str:
        self._open = FUNCTION_CALL
        call_id = self._call_id(name, len(self.calls))
        self._call = {
            "type": FUNCTION_CALL,
            "id": self._item_id(FUNCTION_CALL),
            "call_id": call_id,
            "name": name,
        }
        begun = {**self._call, "arguments": "", "status": "in_progress"}
        return self.event("response.output_item.added", output_index=len(self.done), item=begun)

    def _argued(self, arguments: str) -> Iterable[str]:
        self._texts.append(arguments)
        place = {"item_id": self._call["id"], "output_index": len(self.done)}
        for delta in deltas_of(arguments):
            yield self.event("response.function_call_arguments.delta", **place, delta=delta)

    def _call_ended(self, status: str) -> str:
        """End the call that is open: it is completed, or incomplete where the limit cut it off."""
        call, arguments, index = self._call, "".join(self._texts), len(self.done)
        self._open, self._texts = "", []
        item = {**call, "arguments": arguments, "status": status}
        self.done.append(item)
        place = {"item_id": call["id"], "output_index": index, "name": call["name"]}
        done = self.event("response.function_call_arguments.done", **place, arguments=arguments)
        return done + self.event("response.output_item.done", output_index=index, item=item)

    def usage(self, num_prompt_tokens: int) -> Mapping[str, Any]:
        return {
            "input_tokens": num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "output_tokens": self.num_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": num_prompt_tokens + self.num_tokens,
        }


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
