"""The content blocks of a message and the events that bring them, in the order in which they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from base.request import FinishReason
from conductor.api.answer_blocks import AnswerBlock, AnswerBlocks, Words
from conductor.api.http_reply import to_json
from conductor.api.parsing.events import Called, Said, Thought, value_or_none


def event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {to_json({'type': kind, **fields})}\n\n"


def _content(block: AnswerBlock, text: str) -> dict[str, Any]:
    """Return a block of content; `text` is what it has of it."""
    if block.kind is Thought:
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind is Said:
        return {"type": "text", "text": text, "citations": None}
    call = {"type": "tool_use", "id": block.call_id, "name": block.name, "caller": {"type": "direct"}}
    return {**call, "input": value_or_none(text or "{}")}


def _delta(block: AnswerBlock, delta: Mapping[str, str]) -> str:
    return event("content_block_delta", index=block.index, delta=delta)


def _begun(block: AnswerBlock) -> str:
    return event("content_block_start", index=block.index, content_block=_content(block, ""))


def _grown(block: AnswerBlock, text: str) -> str:
    if block.kind is Called:
        return _delta(block, {"type": "input_json_delta", "partial_json": text})
    kind = "thinking" if block.kind is Thought else "text"
    return _delta(block, {"type": f"{kind}_delta", kind: text})


def _ended(block: AnswerBlock) -> str:
    signed = _delta(block, {"type": "signature_delta", "signature": ""}) if block.kind is Thought else ""
    return signed + event("content_block_stop", index=block.index)


MESSAGE_WORDS = Words(_begun, _grown, _ended)


def content(blocks: AnswerBlocks) -> list[dict[str, Any]]:
    """Return the blocks of a whole message, which has no half of a call's input."""
    return [_content(each, each.text) for each in blocks.all if each.is_whole or each.kind is not Called]


def stop_reason(blocks: AnswerBlocks, is_short: bool) -> str:
    """Return Anthropic's word for the end; `is_short`: the window left less room than was asked for."""
    if blocks.finish_reason is FinishReason.LENGTH:
        return "model_context_window_exceeded" if is_short else "max_tokens"
    if blocks.stopped_by:
        return "stop_sequence"
    return "tool_use" if blocks.of(Called) else "end_turn"


def usage(blocks: AnswerBlocks, num_prompt_tokens: int) -> Mapping[str, Any]:
    return {
        "input_tokens": num_prompt_tokens - blocks.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": blocks.num_cached_tokens,
        "output_tokens": blocks.num_tokens,
        "output_tokens_details": {"thinking_tokens": blocks.num_reasoning_tokens},
        "cache_creation": None,
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }
