"""The body of the Responses API, and the turn that it asks for.

Items that are no message, call, result or reasoning are refused by name, and so are tools that a provider
would run and answers that would be made in the background.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from base.errors import invalid
from base.request import Grammar, GrammarKind
from conductor.api.chat_template import ChatMessage, PastCall, ToolSpec
from conductor.api.grammar_fields import JSON_OBJECT, SchemaText
from conductor.api.openai_schema import ReasoningEffort, SamplingBody, reasoning_wishes, sampling_of
from conductor.api.openai_tools import (
    CALL_CHARS,
    MAX_TOOLS,
    Table,
    ToolChoice,
    check_json_texts,
    chosen,
    past_arguments,
    require_called,
    tool_names,
    tool_spec,
)
from conductor.api.options import MAX_MESSAGES, Options
from conductor.api.strict_body import (
    MAX_PARTS,
    CallId,
    ShortName,
    StrictBody,
    TemplateVariables,
    TextOrParts,
    TextPart,
    content_kind,
    joined_text,
    required,
)
from conductor.api.turn import Reasoning, Tools

MAX_METADATA_CHARS, MAX_KEY_CHARS = 512, 64
"""OpenAI's bounds on `metadata`, which each event of a response's state repeats."""
_TEXT_TYPES = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class ItemPart(TextPart):
    refusal: str | None = None

    def shown(self, param: str) -> str:
        return required(self.refusal, f"{param}.refusal") if self.type == "refusal" else super().shown(param)


_plain = partial(joined_text, types=(*_TEXT_TYPES, "refusal"))


class InputMessage(StrictBody):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: TextOrParts[ItemPart]


class InputItem(StrictBody):
    """An item that is no message."""

    type: ShortName
    content: TextOrParts[ItemPart] | None = None
    id: str | None = None
    call_id: CallId | None = None
    name: str | None = None
    arguments: str | None = None
    output: TextOrParts[ItemPart] | None = None
    summary: Annotated[list[ItemPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


def _item_kind(value: Any) -> str:
    return "a message" if isinstance(value, dict) and "role" in value else "an item of another type"


_Item = Annotated[
    Annotated[InputMessage, Tag("a message")] | Annotated[InputItem, Tag("an item of another type")],
    Discriminator(_item_kind),
]
_Items = Annotated[list[_Item], Field(max_length=MAX_MESSAGES, fail_fast=True), Tag("a list of parts")]


class ResponsesTool(StrictBody):
    type: ShortName
    name: str | None = None
    description: str | None = None
    parameters: Table | None = None
    strict: bool | None = None


class ResponsesChoice(StrictBody):
    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class ReasoningWish(StrictBody):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(StrictBody):
    json_schema: SchemaText | None = Field(default=None, alias="schema")
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: ShortName | None = None


class TextWish(StrictBody):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


def _of_texts(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return what has short texts alone; as a type, pydantic would report each value that is none."""
    for key, value in metadata.items():
        if not isinstance(value, str) or len(value) > MAX_METADATA_CHARS or len(key) > MAX_KEY_CHARS:
            raise PydanticCustomError(
                "text",
                f"a text of {MAX_METADATA_CHARS} characters at most is wanted for {key[:100]!r}, "
                f"and a name of {MAX_KEY_CHARS} at most",
            )
    return metadata


class ResponsesBody(SamplingBody):  # type: ignore[valid-type, misc]
    refuses_fields_of_chats = True
    model: str
    input: Annotated[Annotated[str, Tag("a string")] | _Items, Discriminator(content_kind)] = Field(
        default_factory=list
    )
    instructions: str | None = None
    previous_response_id: CallId | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice[ResponsesChoice] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningWish | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=16), AfterValidator(_of_texts)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    text: TextWish | None = None
    conversation: None = None
    prompt: None = None

    def options(self, max_tokens: int) -> Options:
        """Return the body's choices; raises InvalidRequestError where a schema is missing."""
        grammar, param = self._grammar(), "text.format"
        return Options(sampling_of(self), max_tokens=max_tokens, grammar=grammar, grammar_param=param)

    def _grammar(self) -> Grammar | None:
        asked = self.text.format if self.text is not None else None
        if asked is None or asked.type == "text":
            return None
        if asked.type == "json_object":
            return JSON_OBJECT
        return Grammar(GrammarKind.JSON_SCHEMA, required(asked.json_schema, "text.format.schema"))

    def asked_tools(self) -> Tools:
        """Return the tools of the turn; raises InvalidRequestError."""
        specs = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or ())]
        return chosen(specs, *self._choice(), self.parallel_tool_calls is not False)

    def _choice(self) -> tuple[str, list[str] | None]:
        """Return what must be done (none, auto, required), and with which tools alone."""
        choice = self.tool_choice
        if choice is None or isinstance(choice, str):
            return choice or "auto", None
        if choice.type == "function":
            return "required", [required(choice.name, "tool_choice.name")]
        return choice.mode or "auto", tool_names(choice.tools or (), "tool_choice.tools")

    def asked_reasoning(self) -> Reasoning:
        effort = self.reasoning.effort if self.reasoning is not None else None
        return reasoning_wishes(effort, None, is_shown=True)

    @property
    def num_json_chars(self) -> int:
        """Characters of JSON that stand in texts of `input`, and what its items are worth."""
        items = () if isinstance(self.input, str) else self.input
        return sum(CALL_CHARS + len(item.arguments or "") for item in items if isinstance(item, InputItem))

    def conversation_after(self, call_ids: set[str]) -> list[ChatMessage]:
        """Return the turns of `input`; raises InvalidRequestError.

        `call_ids`: those of calls that were made before; new ones are added.
        """
        if isinstance(self.input, str):
            return [ChatMessage("user", self.input)]
        check_json_texts(
            (item.arguments or "" for item in self.input if isinstance(item, InputItem)), "input"
        )
        turns: list[ChatMessage] = []
        for index, item in enumerate(self.input):
            _add(turns, item, f"input[{index}]", call_ids)
        return turns


def _tool(tool: ResponsesTool, param: str) -> ToolSpec:
    if tool.type != "function":
        raise invalid(f"{param}.type", f"{tool.type!r} is not supported, function is")
    name = required(tool.name, f"{param}.name")
    spec = ToolSpec(name, tool.description or "", tool.parameters or {}, bool(tool.strict))
    return tool_spec(spec, param)


def _add(turns: list[ChatMessage], item: InputMessage | InputItem, param: str, call_ids: set[str]) -> None:
    """Add an item: the assistant's reasoning, text and calls that follow one another are one turn."""
    if isinstance(item, InputMessage):
        text = _plain(item.content, f"{param}.content")
        if item.role == "assistant" and _is_open(turns) and not turns[-1].content and not turns[-1].calls:
            turns[-1] = replace(turns[-1], content=text)
        else:
            turns.append(ChatMessage(item.role, text))
        return
    match item.type:
        case "function_call":
            call_id = required(item.call_id, f"{param}.call_id")
            name = required(item.name, f"{param}.name")
            arguments = past_arguments(item.arguments or "", f"{param}.arguments")
            call_ids.add(call_id)
            if not _is_open(turns):
                turns.append(ChatMessage("assistant", ""))
            turns[-1] = replace(turns[-1], calls=(*turns[-1].calls, PastCall(call_id, name, arguments)))
        case "function_call_output":
            call_id = required(item.call_id, f"{param}.call_id")
            require_called(call_id, call_ids, f"{param}.call_id")
            turns.append(ChatMessage("tool", _plain(item.output, f"{param}.output"), call_id=call_id))
        case "reasoning":
            thought = _plain(item.content or item.summary or "", f"{param}.content")
            turns.append(ChatMessage("assistant", "", reasoning=thought or None))
        case _:
            raise invalid(f"{param}.type", f"{item.type!r} is not supported")


def _is_open(turns: Sequence[ChatMessage]) -> bool:
    return bool(turns) and turns[-1].role == "assistant"
