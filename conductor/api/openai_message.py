"""The assistant's message of a chat completion that has reasoning or calls: its deltas, and its whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from base.request import FinishReason
from conductor.api.http_reply import to_json
from conductor.api.parsing.events import Argued, Called, Calling, Event, Said, Thought, deltas_of


class _GrowingCall:
    """One call as it comes."""

    def __init__(self, head: str) -> None:
        self.head = head
        self.arguments: list[str] = []
        self.is_whole = False

    def whole(self) -> str:
        return f"{{{self.head}{to_json(''.join(self.arguments))}}}}}"


class ChatParts:
    """The parts of one choice as they come."""

    def __init__(self, call_id: Callable[[str, int], str]) -> None:
        """Begin. `call_id` names a call by its tool and its number."""
        self._call_id = call_id
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[_GrowingCall] = []

    def add(self, events: Sequence[Event]) -> list[str]:
        """Take parts in; returns the JSON of the deltas that bring them."""
        deltas = []
        for event in events:
            match event:
                case Calling(name):
                    deltas.append(self._begun(name))
                case Argued(text):
                    deltas += self._argued(text)
                case Called(name, arguments):
                    if not self._calls or self._calls[-1].is_whole:
                        deltas += [self._begun(name), *self._argued(arguments)]
                    self._calls[-1].is_whole = True
                case Said(text):
                    self._texts.append(text)
                    deltas.append(f'"delta":{{"content":{to_json(text)}}}')
                case Thought(text):
                    self._thoughts.append(text)
                    shown = to_json(text)
                    deltas.append(f'"delta":{{"reasoning_content":{shown},"reasoning":{shown}}}')
        return deltas

    def _begun(self, name: str) -> str:
        index = len(self._calls)
        call_id = to_json(self._call_id(name, index))
        head = f'"id":{call_id},"type":"function","function":{{"name":{to_json(name)},"arguments":'
        self._calls.append(_GrowingCall(head))
        return f'"delta":{{"tool_calls":[{{"index":{index},{head}""}}}}]}}'

    def _argued(self, arguments: str) -> list[str]:
        index = len(self._calls) - 1
        self._calls[-1].arguments.append(arguments)
        return [
            f'"delta":{{"tool_calls":[{{"index":{index},"function":{{"arguments":{to_json(piece)}}}}}]}}'
            for piece in deltas_of(arguments)
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
            parts.append(f',"tool_calls":[{",".join(call.whole() for call in self._calls)}]')
        parts.append(',"refusal":null,"annotations":[]}')
        return "".join(parts)

    def finish_name(self, reason: FinishReason) -> str:
        """Return OpenAI's word for why the answer ended."""
        # A stop string may have ended the last one before its end: nobody shall run that.
        is_called = bool(self._calls) and all(call.is_whole for call in self._calls)
        return "tool_calls" if is_called and reason is FinishReason.STOP else reason.value
