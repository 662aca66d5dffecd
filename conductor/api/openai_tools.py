"""The tools of OpenAI's chat completions as a body has them, and as a turn has them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from base.errors import invalid
from conductor.api.body_bounds import excess
from conductor.api.chat_template import ToolSpec
from conductor.api.parsing.events import fault_of, value_or_none
from conductor.api.strict_body import CallId, StrictBody, required
from conductor.api.turn import Tools

MAX_TOOLS = 1_024
MAX_TOOL_CALLS = 128
MAX_JSON_CHARS = 1 << 20
"""Characters of all JSON in texts of a conversation: arguments of calls; over gRPC, schemas too."""
CALL_CHARS = 64
"""Characters of JSON whose time the shortest call takes to be read."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")

MAX_KEYS = 1_024
"""Members of a schema, or of the arguments of a call, at the top; a body has bounds for all of its own."""


def _of_json(table: dict[str, Any]) -> dict[str, Any]:
    """Return what some JSON could be that is not too deep; here, where a long body is off the event loop."""
    if fault := fault_of(table):
        raise PydanticCustomError("json", fault)
    return table


Table = Annotated[dict[str, Any], Field(max_length=MAX_KEYS), AfterValidator(_of_json)]


class FunctionTool(StrictBody):
    name: str
    description: str | None = None
    parameters: Table | None = None
    strict: bool | None = None

    def spec(self) -> ToolSpec:
        return ToolSpec(self.name, self.description or "", self.parameters or {}, bool(self.strict))


class OfferedTool(StrictBody):
    type: str
    function: FunctionTool | None = None


class CalledFunction(StrictBody):
    name: str
    arguments: str


class CallOfTool(StrictBody):
    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class _NamedFunction(StrictBody):
    name: str


class _AllowedTools(StrictBody):
    mode: Literal["auto", "required"]
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedChoice(StrictBody):
    type: Literal["function", "allowed_tools"]
    function: _NamedFunction | None = None
    allowed_tools: _AllowedTools | None = None


ToolList = Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


Named = TypeVar("Named", bound=StrictBody)
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a word")] | Annotated[Named, Tag("an object")],
    # Tags have spaces: errors leave them out of a field's name.
    Discriminator(lambda value: "an object" if isinstance(value, dict) else "a word"),
]


def tool_spec(spec: ToolSpec, param: str, schema_field: str = "parameters") -> ToolSpec:
    """Return a tool; raises InvalidRequestError for a name that cannot be, or a schema of no object.

    `schema_field`: what the API at hand calls the schema, whose values were looked at where it was read.
    """
    if not _NAME.fullmatch(spec.name):
        raise invalid(f"{param}.name", "1 to 128 letters, digits and any of _ - . : / are wanted")
    if spec.parameters.get("type", "object") != "object":
        raise invalid(f"{param}.{schema_field}.type", "a tool takes an object")
    return spec


def offered_tools(
    tools: Sequence[OfferedTool] | None, choice: str | NamedChoice | None, is_parallel: bool
) -> Tools:
    """Return the tools of a chat; raises InvalidRequestError that names the field."""
    specs = []
    for index, tool in enumerate(tools or ()):
        param = f"tools[{index}]"
        if tool.type != "function":
            raise invalid(f"{param}.type", f"{tool.type[:100]!r} is not supported, function is")
        param = f"{param}.function"
        specs.append(tool_spec(required(tool.function, param).spec(), param))
    return chosen(specs, *_choice(choice), is_parallel)


def _choice(choice: str | NamedChoice | None) -> tuple[str, list[str] | None]:
    """Return what must be done (none, auto, required), and with which tools alone."""
    if choice is None or isinstance(choice, str):
        return choice or "auto", None
    if choice.type == "function":
        return "required", [required(choice.function, "tool_choice.function").name]
    allowed = required(choice.allowed_tools, "tool_choice.allowed_tools")
    return allowed.mode, tool_names(allowed.tools, "tool_choice.allowed_tools.tools")


def tool_names(tools: Iterable[Any], param: str) -> list[str]:
    """Return the names of allowed tools; raises InvalidRequestError for one without."""
    names = []
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise invalid(f"{param}[{index}]", "a function's name is wanted")
        names.append(name)
    return names


def chosen(specs: Sequence[ToolSpec], mode: str, names: Sequence[str] | None, is_parallel: bool) -> Tools:
    """Return the tools of a turn.

    `mode`: none, auto or required; `names`: the tools that may be called, None: all. Raises
    InvalidRequestError for two tools of one name, or a choice of none that is offered.
    """
    known = {spec.name: spec for spec in specs}
    if len(known) < len(specs):
        twice = next(name for name, count in Counter(spec.name for spec in specs).items() if count > 1)
        raise invalid("tools", f"{twice!r} is there twice")
    if missing := [name for name in names or () if name not in known]:
        raise invalid("tool_choice", f"no tool is called {missing[0][:100]!r}")
    if mode == "none":
        return Tools()
    allowed = tuple(spec for spec in specs if names is None or spec.name in names)
    if mode == "required" and not allowed:
        raise invalid("tool_choice", "there are no tools to choose from")
    demanded = tuple(spec.name for spec in allowed) if mode == "required" else ()
    return Tools(allowed, demanded, is_parallel)


def check_json_texts(texts: Iterable[str], param: str) -> None:
    """Raise InvalidRequestError, naming `param`, where the JSON in texts is more than a body's may be.

    A body's own bounds leave its texts out.
    """
    whole = ",".join(texts)
    if len(whole) > MAX_JSON_CHARS:
        raise invalid(param, f"JSON within texts has at most {MAX_JSON_CHARS} characters, not {len(whole)}")
    if found := excess(whole.encode(errors="replace")):
        raise invalid(param, f"JSON within texts has {found}")


def require_called(call_id: str, call_ids: Collection[str], param: str, kind: str = "call") -> None:
    """Raise InvalidRequestError for a result of no call before it; `kind` is the API's word for a call."""
    if call_id not in call_ids:
        raise invalid(param, f"no {kind} before it has the id {call_id[:100]!r}")


def past_arguments(text: str, param: str) -> Mapping[str, Any]:
    """Return the arguments of a past call.

    Raises InvalidRequestError for no JSON of an object, or one that is too deep.
    """
    value = value_or_none(text or "{}")
    if not isinstance(value, dict):
        raise invalid(param, "JSON of an object is wanted")
    if fault := fault_of(value):
        raise invalid(param, fault)
    return value
