"""Conversations of gRPC's clients: the messages of protos/inference.proto as turns have them.

Tools, choices and reasoning are those of the other APIs (`turn.py`); here are only the names. JSON within a
message has the bounds of a JSON body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from base.errors import InvalidRequestError, invalid
from conductor.api.chat_template import ChatMessage, ChatRole, PastCall, ToolSpec
from conductor.api.openai_schema import ReasoningEffort, reasoning_wishes
from conductor.api.openai_tools import (
    MAX_TOOL_CALLS,
    check_json_texts,
    chosen,
    past_arguments,
    require_called,
    tool_spec,
)
from conductor.api.strict_body import variables_excess
from conductor.api.turn import Reasoning, Tools
from protos import inference_pb2 as pb


class Conversation(NamedTuple):
    """The value of a `ChatMessages`."""

    messages: tuple[ChatMessage, ...]
    tools: Tools
    reasoning: Reasoning
    variables: Mapping[str, Any]
    """The chat template's own that the client sets."""
    add_generation_prompt: bool

    @property
    def num_calls(self) -> int:
        return sum(len(message.calls) for message in self.messages)


def conversation(chat: pb.ChatMessages) -> Conversation:
    """Return a conversation; raises InvalidRequestError that names the field."""
    _check_json(chat)
    messages: list[ChatMessage] = []
    call_ids: set[str] = set()
    for index, turn in enumerate(chat.messages):
        messages.append(_message(turn, call_ids, f"chat.messages[{index}]"))
        call_ids.update(call.call_id for call in messages[-1].calls)
    is_opened = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    return Conversation(
        tuple(messages), _tools(chat), _reasoning(chat.reasoning), _variables(chat), is_opened
    )


def _check_json(chat: pb.ChatMessages) -> None:
    """Raise InvalidRequestError for more JSON than a body may have, before any is parsed."""
    texts = [tool.parameters for tool in chat.tools]
    for index, turn in enumerate(chat.messages):
        if len(turn.tool_calls) > MAX_TOOL_CALLS:
            raise invalid(f"chat.messages[{index}].tool_calls", f"at most {MAX_TOOL_CALLS} elements")
        texts += [call.arguments for call in turn.tool_calls]
    check_json_texts(texts, "chat.tools")


def _message(turn: pb.ChatMessage, call_ids: set[str], param: str) -> ChatMessage:
    role = next((role for role in get_args(ChatRole) if turn.role == role), None)
    if role is None:
        raise InvalidRequestError(f"role: one of {', '.join(get_args(ChatRole))} is wanted", "messages")
    if turn.tool_calls and role != "assistant":
        raise invalid(f"{param}.tool_calls", "the assistant alone calls")
    if role == "tool":
        require_called(turn.tool_call_id, call_ids, f"{param}.tool_call_id")
    calls = tuple(
        PastCall(call.id, call.name, past_arguments(call.arguments, f"{param}.tool_calls[{at}].arguments"))
        for at, call in enumerate(turn.tool_calls)
    )
    name, call_id = turn.name or None, turn.tool_call_id or None
    return ChatMessage(role, turn.content, name, calls, call_id, turn.reasoning or None)


def _tools(chat: pb.ChatMessages) -> Tools:
    specs = []
    for index, tool in enumerate(chat.tools):
        param = f"chat.tools[{index}]"
        schema = past_arguments(tool.parameters, f"{param}.parameters")
        specs.append(tool_spec(ToolSpec(tool.name, tool.description, schema), param))
    choice = chat.tool_choice
    if choice.mode not in ("", "auto", "none", "required"):
        raise invalid("chat.tool_choice.mode", "one of auto, none and required is wanted")
    return chosen(specs, choice.mode or "auto", list(choice.names) or None, not choice.one_call)


def _variables(chat: pb.ChatMessages) -> Mapping[str, Any]:
    field = "chat.chat_template_kwargs"
    check_json_texts([chat.chat_template_kwargs], field)
    variables = past_arguments(chat.chat_template_kwargs, field)
    if found := variables_excess(dict(variables)):
        raise invalid(field, found)
    return variables


def _reasoning(wishes: pb.Reasoning) -> Reasoning:
    effort: Any = wishes.effort or None
    if effort is not None and effort not in get_args(ReasoningEffort):
        raise invalid("chat.reasoning.effort", f"one of {', '.join(get_args(ReasoningEffort))} is wanted")
    budget = wishes.budget_tokens if wishes.HasField("budget_tokens") else None
    return reasoning_wishes(effort, budget, not wishes.is_hidden)
