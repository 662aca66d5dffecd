"""The assistant's message of a chat completion that has reasoning or calls: its deltas, and its whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from base.request import FinishReason
from conductor.api.http_reply import to_json
from conductor.api.parsing.events import Called, Event, Said

DELTA_CHARS = 1 << 14
"""The most of a call's arguments in one delta."""


class ChatParts:
    """The parts of one choice as they come."""

    def __init__(self, call_id: Callable[[str, int], str]) -> None:
        """Begin. `call_id` names a call by its tool and its number."""
        self._call_id = call_id
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[str] = []

    def add(self, events: Sequence[Event]) -> list[str]:
        """Take parts in; returns the JSON of the deltas that bring them."""
        deltas = []
        for event in events:
            if isinstance(event, Called):
                deltas += self._call(event)
            elif isinstance(event, Said):
                self._texts.append(event.text)
                deltas.append(f'"delta":{{"content":{to_json(event.text)}}}')
            else:
                self._thoughts.append(event.text)
                text = to_json(event.text)
                deltas.append(f'"delta":{{"reasoning_content":{text},"reasoning":{text}}}')
        return deltas

    def _call(self, call: Called) -> list[str]:
        index = len(self._calls)
        name, call_id = to_json(call.name), to_json(self._call_id(call.name, index))
        head = f'"id":{call_id},"type":"function","function":{{"name":{name},"arguments":'
        self._calls.append(f"{{{head}{to_json(call.arguments)}}}}}")
        arguments = call.arguments
        pieces = (arguments[at : at + DELTA_CHARS] for at in range(0, len(arguments), DELTA_CHARS))
        return [
            f'"delta":{{"tool_calls":[{{"index":{index},{head}""}}}}]}}',
            *(
                f'"delta":{{"tool_calls":[{{"index":{index},"function":{{"arguments":{to_json(piece)}}}}}]}}'
                for piece in pieces
            ),
        ]

    def message(self) -> str:
        """Return the JSON of the whole message, with its name."""
        parts = ['"message":{"role":"assistant","content":']
        text = "".join(self._texts)
        parts.append(to_json(text) if text or not self._calls else "null")
        if self._thoughts:
            thoughts = to_json("".join(self._thoughts))
            parts.append(f',"reasoning_content":{thoughts},"reasoning":{thoughts}')
        if self._calls:
            parts.append(f',"tool_calls":[{",".join(self._calls)}]')
        parts.append(',"refusal":null,"annotations":[]}')
        return "".join(parts)

    def finish_name(self, reason: FinishReason) -> str:
        """Return OpenAI's word for why the answer ended."""
        return "tool_calls" if self._calls and reason is FinishReason.STOP else reason.value
