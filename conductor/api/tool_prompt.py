"""Tools for a model whose chat template has no place for them: said in words, in the form of Hermes.

The tools go after the system's message; past calls and their results become text of their turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from conductor.api.chat_template import ChatMessage, ToolSpec

FAMILY = "hermes"
"""The form in which such a model is asked to call."""

_ASKED = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_tools_in_words(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[ChatMessage]:
    """Return a conversation that needs no tools of its template."""
    turns: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            result = f"<tool_response>\n{message.content}\n</tool_response>"
            last = turns[-1] if turns else None
            if last is not None and last.role == "user" and last.content.endswith("</tool_response>"):
                turns[-1] = ChatMessage("user", f"{last.content}\n{result}")
            else:
                turns.append(ChatMessage("user", result))
        elif message.calls:
            calls = "\n".join(
                f"<tool_call>\n{_json({'name': call.name, 'arguments': dict(call.arguments)})}\n</tool_call>"
                for call in message.calls
            )
            turns.append(ChatMessage("assistant", f"{message.content}\n{calls}".lstrip()))
        else:
            turns.append(message)
    if tools:
        asked = _ASKED.format(tools="\n".join(_json(tool.as_template_sees_it()) for tool in tools))
        if turns and turns[0].role in ("system", "developer"):
            turns[0] = ChatMessage("system", f"{turns[0].content}\n\n{asked}")
        else:
            turns.insert(0, ChatMessage("system", asked))
    return turns


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
