"""The assistant's message of a chat completion that has reasoning or calls: its deltas, and its whole."""

from __future__ import annotations

from base.request import FinishReason
from conductor.api.answer_blocks import AnswerBlock, AnswerBlocks, Words
from conductor.api.http_reply import to_json
from conductor.api.parsing.events import Called, Said, Thought


def _head(call: AnswerBlock) -> str:
    call_id, name = to_json(call.call_id), to_json(call.name)
    return f'"id":{call_id},"type":"function","function":{{"name":{name},"arguments":'


def _begun(block: AnswerBlock) -> str:
    if block.kind is not Called:
        return ""
    return f'"delta":{{"tool_calls":[{{"index":{block.number},{_head(block)}""}}}}]}}'


def _grown(block: AnswerBlock, text: str) -> str:
    shown = to_json(text)
    if block.kind is Called:
        function = f'{{"index":{block.number},"function":{{"arguments":{shown}}}}}'
        return f'"delta":{{"tool_calls":[{function}]}}'
    if block.kind is Said:
        return f'"delta":{{"content":{shown}}}'
    return f'"delta":{{"reasoning_content":{shown},"reasoning":{shown}}}'


CHAT_WORDS = Words(_begun, _grown, lambda block: "")
"""JSON of deltas, each with its name."""


def chat_message(blocks: AnswerBlocks) -> str:
    """Return the JSON of the whole message, with its name."""
    calls = blocks.of(Called)
    text, thoughts = ("".join(block.text for block in blocks.of(kind)) for kind in (Said, Thought))
    shown = to_json(text) if text or not calls else "null"
    parts = [f'"message":{{"role":"assistant","content":{shown}']
    if thoughts:
        shown = to_json(thoughts)
        parts.append(f',"reasoning_content":{shown},"reasoning":{shown}')
    if calls:
        listed = ",".join(f"{{{_head(call)}{to_json(call.text)}}}}}" for call in calls)
        parts.append(f',"tool_calls":[{listed}]')
    return "".join([*parts, ',"refusal":null,"annotations":[]}'])


def finish_name(blocks: AnswerBlocks, reason: FinishReason) -> str:
    """Return OpenAI's word for why the answer ended."""
    calls = blocks.of(Called)
    # A stop string may have ended the last one before its end: nobody shall run that.
    is_called = bool(calls) and all(call.is_whole for call in calls)
    return "tool_calls" if is_called and reason is FinishReason.STOP else reason.value
