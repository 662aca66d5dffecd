"""The bodies of Anthropic's Messages API, and the turn that they ask for.

A block that is no text, call, result or reasoning is refused by name, and so is a tool that a provider would
run. Fields that change no answer (`cache_control`, `metadata`, ...) are ignored: prefixes are found by their
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from base.errors import invalid
from base.request import Grammar, GrammarKind
from conductor.api.chat_template import ChatMessage, PastCall, ToolSpec
from conductor.api.grammar_fields import SchemaText
from conductor.api.openai_schema import SamplingBody, sampling_of
from conductor.api.openai_tools import MAX_TOOLS, Table, chosen, require_called, tool_spec
from conductor.api.options import MAX_MESSAGES, MAX_STOP_STRINGS, Options
from conductor.api.strict_body import (
    CallId,
    ShortName,
    StrictBody,
    TemplateVariables,
    TextOrParts,
    TextPart,
    joined_text,
    required,
)
from conductor.api.turn import Reasoning, Tools


class Block(TextPart):
    id: CallId | None = None
    name: str | None = None
    input: Table | None = None
    tool_use_id: CallId | None = None
    content: TextOrParts[TextPart] | None = None
    is_error: bool | None = None
    thinking: str | None = None


class AnthropicMessage(StrictBody):
    role: Literal["user", "assistant", "system"]
    content: TextOrParts[Block]


class AnthropicTool(StrictBody):
    type: ShortName | None = None
    name: str
    description: str | None = None
    input_schema: Table | None = None


class AnthropicChoice(StrictBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictBody):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictBody):
    json_schema: SchemaText = Field(alias="schema")
    type: Literal["json_schema"]


class OutputConfig(StrictBody):
    format: OutputFormat | None = None
    effort: ShortName | None = None


class CountTokensBody(StrictBody):
    """The fields that make a prompt."""

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextOrParts[TextPart] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateVariables | None = None
    output_format: OutputFormat | None = None
    output_config: OutputConfig | None = None
    mcp_servers: None = None
    container: None = None

    def asked_tools(self) -> Tools:
        """Return the tools of the turn; raises InvalidRequestError."""
        specs = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or ())]
        choice = self.tool_choice or AnthropicChoice(type="auto")
        mode = "required" if choice.type in ("any", "tool") else choice.type
        names = [required(choice.name, "tool_choice.name")] if choice.type == "tool" else None
        is_parallel = choice.type != "tool" and not choice.disable_parallel_tool_use
        return chosen(specs, mode, names, is_parallel)

    def asked_reasoning(self) -> Reasoning:
        """Return the wishes about reasoning: without `thinking` there is none to see."""
        thinking = self.thinking
        if thinking is None or thinking.type == "disabled":
            off = {"enable_thinking": False, "thinking": False}
            return Reasoning(is_shown=False, budget_tokens=None if thinking is None else 0, variables=off)
        on = {"enable_thinking": True, "thinking": True}
        return Reasoning(thinking.display != "omitted", thinking.budget_tokens, on)

    def grammar(self) -> Grammar | None:
        """Return the form that the answer is to have."""
        asked = self.output_config.format if self.output_config is not None else None
        asked = asked or self.output_format
        return Grammar(GrammarKind.JSON_SCHEMA, asked.json_schema) if asked is not None else None

    def conversation(self) -> tuple[list[ChatMessage], str]:
        """Return the turns so far, and the beginning of the answer; raises InvalidRequestError.

        A last message of the assistant's is that beginning: the model goes on from there.
        """
        turns: list[ChatMessage] = []
        if self.system is not None:
            turns.append(ChatMessage("system", joined_text(self.system, "system")))
        call_ids: set[str] = set()
        for index, message in enumerate(self.messages):
            turns += _turns(message, f"messages[{index}]", call_ids)
        last = turns[-1]
        if last.role == "assistant" and not last.calls:
            return turns[:-1], last.content
        return turns, ""


class MessagesBody(CountTokensBody, SamplingBody):  # type: ignore[valid-type, misc]
    refuses_fields_of_chats = True
    max_tokens: Annotated[int, Field(ge=1, le=1 << 31)]
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None

    def options(self, max_tokens: int) -> Options:
        return Options(
            sampling=sampling_of(self),
            max_tokens=max_tokens,
            stop=tuple(text for text in self.stop_sequences or () if text and not text.isspace()),
            grammar=self.grammar(),
            grammar_param="output_config.format",
        )


def _tool(tool: AnthropicTool, param: str) -> ToolSpec:
    if tool.type not in (None, "custom"):
        raise invalid(f"{param}.type", f"{tool.type!r} is a tool of the provider's; custom is supported")
    schema = required(tool.input_schema, f"{param}.input_schema")
    return tool_spec(ToolSpec(tool.name, tool.description or "", schema), param, "input_schema")


def _turns(message: AnthropicMessage, param: str, call_ids: set[str]) -> list[ChatMessage]:
    """Return the turns that a message is: results of tools are turns of their own, before its text."""
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    results, calls = [], []
    texts: list[str] = []
    thoughts: list[str] = []
    for index, block in enumerate(message.content):
        where = f"{param}.content[{index}]"
        match block.type, message.role:
            case "text", _:
                texts.append(required(block.text, f"{where}.text"))
            case "thinking", "assistant":
                thoughts.append(required(block.thinking, f"{where}.thinking"))
            case "redacted_thinking", "assistant":
                pass
            case "tool_use", "assistant":
                calls.append(_past_call(block, where))
                call_ids.add(calls[-1].call_id)
            case "tool_result", "user":
                results.append(_result(block, where, call_ids))
            case _:
                raise invalid(f"{where}.type", f"{block.type!r} is not supported from the {message.role}")
    separator = "" if message.role == "assistant" else "\n"
    text, thought = separator.join(texts), "".join(thoughts) or None
    if results and not texts:
        return results
    return [*results, ChatMessage(message.role, text, calls=tuple(calls), reasoning=thought)]


def _past_call(block: Block, where: str) -> PastCall:
    arguments: Mapping[str, Any] = block.input if block.input is not None else {}
    return PastCall(required(block.id, f"{where}.id"), required(block.name, f"{where}.name"), arguments)


def _result(block: Block, where: str, call_ids: set[str]) -> ChatMessage:
    call_id = required(block.tool_use_id, f"{where}.tool_use_id")
    require_called(call_id, call_ids, f"{where}.tool_use_id", "tool_use")
    text = joined_text(block.content or "", f"{where}.content")
    if block.is_error:
        text = json.dumps({"error": text}, ensure_ascii=False)
    return ChatMessage("tool", text, call_id=call_id)
