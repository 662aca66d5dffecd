"""A model's chat template: messages to the one text the model was trained to continue.

Templates are Jinja programs that come with the weights. They run as transformers runs
them (same block trimming, filters and functions; a test compares), in jinja2's immutable
sandbox: a template can read what it is given and change nothing. The sandbox bounds
`range`, and the output is bounded here; a template made to burn time or memory still
can, so a model folder is to be trusted that far.

`{% generation %}` blocks, which mark the assistant's turns for training, are rendered as
if the marks were not there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from base.clock import wall_clock_s
from base.errors import ConfigError, InvalidRequestError

ChatRole = Literal["system", "developer", "user", "assistant", "tool"]
MAX_OUTPUT_CHARS = 64 << 20
"""More than any request body; a template that multiplies its input stops here."""
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

# What a template raises on messages it was not written for, next to its own errors.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)


class PastCall(NamedTuple):
    """A call of a tool in a turn of the assistant's."""

    call_id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn."""

    role: ChatRole
    content: str
    name: str | None = None
    """The speaker among those of one role, where the template has a place for it."""
    calls: tuple[PastCall, ...] = ()
    call_id: str | None = None
    """The call that a tool's message answers."""
    reasoning: str | None = None
    """The reasoning that went before an answer of the assistant's."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments."""
    is_strict: bool = False

    def as_template_sees_it(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class ChatTemplate:
    """One compiled template. Reading only; any thread may use it."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = lambda: datetime.fromtimestamp(wall_clock_s()),
    ) -> None:
        """Compile `source`, which is Jinja; raises ConfigError if it does not parse.

        `special_tokens`: variables such as `bos_token`; `now`: local time, for templates that state the date.
        """
        try:
            self._template = _environment(now).from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, TypeError) as error:
            raise ConfigError(f"the model's chat template does not parse: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source

    @functools.cached_property
    def has_tools(self) -> bool:
        """Whether a tool that is offered shows in what is rendered."""
        try:
            return _NEEDLE in self.render(_QUESTION, tools=[ToolSpec(_NEEDLE)])
        except InvalidRequestError:
            return False

    @functools.cached_property
    def _takes_text_arguments(self) -> bool:
        """Whether the arguments of past calls are to be JSON text; else they are to be a table.

        A template that expects a text shows Python's form of a table, or adds a table to a text and fails.
        """
        asked = PastCall("123456789", "f", {"k": _NEEDLE})
        turns = [*_QUESTION, ChatMessage("assistant", "", calls=(asked,))]
        try:
            shown = self._bounded(self._given(turns, False, {}, [ToolSpec("f")], takes_text=False))
        except _RENDER_ERRORS:
            return True
        return f"'{_NEEDLE}'" in shown

    def render(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[ToolSpec] = (),
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: At least one. A developer's message is a system message to templates,
                which mostly do not know the newer word.
            add_generation_prompt: Whether to end with the opening of the assistant's turn.
            variables: More of the template's own, such as `enable_thinking`.

        Raises InvalidRequestError where the template refuses the messages, or multiplies them beyond bounds.
        """
        variables = variables or {}
        if taken := RESERVED & variables.keys():
            raise InvalidRequestError(f"{min(taken)} cannot be set here", "chat_template_kwargs")
        takes_text = any(message.calls for message in messages) and self._takes_text_arguments
        try:
            return self._bounded(self._given(messages, add_generation_prompt, variables, tools, takes_text))
        except _RENDER_ERRORS as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise InvalidRequestError(message, "messages") from error

    def _given(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[ToolSpec],
        takes_text: bool,
    ) -> dict[str, Any]:
        return {
            **self._special_tokens,
            **variables,
            "messages": [_turn(message, takes_text) for message in messages],
            "tools": [tool.as_template_sees_it() for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _bounded(self, given: Mapping[str, Any]) -> str:
        pieces = []
        num_left = MAX_OUTPUT_CHARS
        for piece in self._template.generate(given):
            num_left -= len(piece)
            if num_left < 0:
                raise ValueError(f"more than {MAX_OUTPUT_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)


_NEEDLE = "needle"
_QUESTION = [ChatMessage("user", "?")]


def _turn(message: ChatMessage, takes_text: bool) -> dict[str, Any]:
    """Return a turn as templates know it."""
    turn: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content,
    }
    if message.name is not None:
        turn["name"] = message.name
    if message.call_id is not None:
        turn["tool_call_id"] = message.call_id
    if message.reasoning is not None:
        turn["reasoning_content"] = turn["thinking"] = message.reasoning
    if message.calls:
        turn["tool_calls"] = [_call(call, takes_text) for call in message.calls]
    return turn


def _call(call: PastCall, takes_text: bool) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False) if takes_text else dict(call.arguments)
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


class _GenerationBlock(Extension):
    """Renders what stands between `{% generation %}` and `{% endgeneration %}`."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        # A scope of its own, as in transformers, where the body is a macro.
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body)]


class _PlainNamespace(Namespace):
    """A namespace without underscore names: they are ways out of the sandbox."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _require_plain(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_plain(name)
        super().__setitem__(name, value)


def _require_plain(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.TemplateError(f"a namespace cannot hold {name!r}")


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    # JSON as models saw it in training; jinja2's own filter escapes for HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    environment.globals["namespace"] = _PlainNamespace
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
