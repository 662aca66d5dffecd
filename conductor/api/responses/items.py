"""The output items of a response and the events that bring them, in the order in which they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conductor.api.answer_blocks import AnswerBlock, AnswerBlocks, Words
from conductor.api.http_reply import to_json
from conductor.api.parsing.events import Called, Said, Thought

_PREFIXES = {Thought: "rs", Said: "msg", Called: "fc"}


class OutputItems:
    """The words for the output of one response, whose blocks are its items."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._sequence_number = -1

    @property
    def words(self) -> Words:
        return Words(self._begun, self._grown, self._ended)

    def done(self, blocks: AnswerBlocks) -> list[dict[str, Any]]:
        """Return the items, when all are whole."""
        return [self._ended_item(block) for block in blocks.all]

    def event(self, kind: str, **fields: Any) -> str:
        self._sequence_number += 1
        numbered = {"type": kind, "sequence_number": self._sequence_number, **fields}
        return f"event: {kind}\ndata: {to_json(numbered)}\n\n"

    def _begun(self, block: AnswerBlock) -> str:
        item = self._item(block, "", "in_progress")
        if block.kind is not Called:
            item["content"] = []
        events = self.event("response.output_item.added", output_index=block.index, item=item)
        if block.kind is Said:
            part = _part(block, "")
            events += self.event("response.content_part.added", **self._part_place(block), part=part)
        return events

    def _grown(self, block: AnswerBlock, text: str) -> str:
        if block.kind is Called:
            place = self._place(block)
            return self.event("response.function_call_arguments.delta", **place, delta=text)
        place = self._part_place(block)
        if block.kind is Thought:
            return self.event("response.reasoning_text.delta", **place, delta=text)
        return self.event("response.output_text.delta", **place, delta=text, logprobs=[])

    def _ended(self, block: AnswerBlock) -> str:
        text, place = block.text, self._part_place(block)
        if block.kind is Called:
            named = {**self._place(block), "name": block.name}
            events = self.event("response.function_call_arguments.done", **named, arguments=text)
        elif block.kind is Thought:
            events = self.event("response.reasoning_text.done", **place, text=text)
        else:
            events = self.event("response.output_text.done", **place, text=text, logprobs=[])
            events += self.event("response.content_part.done", **place, part=_part(block, text))
        item = self._ended_item(block)
        return events + self.event("response.output_item.done", output_index=block.index, item=item)

    def _item_id(self, block: AnswerBlock) -> str:
        return f"{_PREFIXES[block.kind]}_{self._request_id}_{block.index}"

    def _place(self, block: AnswerBlock) -> dict[str, Any]:
        return {"item_id": self._item_id(block), "output_index": block.index}

    def _part_place(self, block: AnswerBlock) -> dict[str, Any]:
        return {**self._place(block), "content_index": 0}

    def _ended_item(self, block: AnswerBlock) -> dict[str, Any]:
        return self._item(block, block.text, "completed" if block.is_whole else "incomplete")

    def _item(self, block: AnswerBlock, text: str, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind is Called:
            call = {"call_id": block.call_id, "name": block.name, "arguments": text}
            return {"type": "function_call", **item, **call}
        content = [_part(block, text)]
        if block.kind is Thought:
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": "assistant", "content": content}


def usage(blocks: AnswerBlocks, num_prompt_tokens: int) -> Mapping[str, Any]:
    return {
        "input_tokens": num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": blocks.num_cached_tokens},
        "output_tokens": blocks.num_tokens,
        "output_tokens_details": {"reasoning_tokens": blocks.num_reasoning_tokens},
        "total_tokens": num_prompt_tokens + blocks.num_tokens,
    }


def _part(block: AnswerBlock, text: str) -> dict[str, Any]:
    if block.kind is Thought:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
