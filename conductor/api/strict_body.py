"""The base of every body that a client sends, and of its parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError, to_json

from base.errors import InvalidRequestError, invalid

Value = TypeVar("Value")

MAX_PARTS = 8_192
"""The parts of one message's content. All of a body are bounded with its other lists and objects."""
MAX_TEMPLATE_VARIABLES = 64
MAX_VARIABLE_BYTES = 1 << 17
"""JSON of the chat template's variables that a body sets: switches and short texts."""


class StrictBody(BaseModel):
    """The body of a call, or a part of one."""

    # Fields we do not know are kept for one look at whether we refuse them.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)
    refuses_fields_of_chats: ClassVar[bool] = False
    """Whether what a chat's body asks for, and this one cannot, is refused by name."""


def required(value: Value | None, param: str) -> Value:
    """Return a field's value; raises InvalidRequestError where there is none."""
    if value is None:
        raise InvalidRequestError(f"{param} is missing", param)
    return value


ShortName = Annotated[str, Field(max_length=100)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(StrictBody):
    """A part of a message's content, of a tool's result or of the system's message."""

    type: ShortName
    text: str | None = None

    def shown(self, param: str) -> str:
        """Return the text that the prompt has of it; raises InvalidRequestError where there is none."""
        return required(self.text, f"{param}.text")


def content_kind(value: Any) -> str:
    """Return the tag of a content's form. Tags have spaces, by which errors know them from fields."""
    return "a list of parts" if isinstance(value, list) else "a string"


Part = TypeVar("Part", bound=StrictBody)
TextOrParts = Annotated[
    Annotated[str, Tag("a string")]
    | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True), Tag("a list of parts")],
    Discriminator(content_kind),
]


def joined_text(
    content: str | Sequence[TextPart] | None, param: str, types: Collection[str] = ("text",)
) -> str:
    """Return a content as one text, of which its parts are lines.

    Raises InvalidRequestError for none, or a part of none of `types`, or without a text.
    """
    if isinstance(content, str):
        return content
    lines = []
    for index, part in enumerate(required(content, param)):
        if part.type not in types:
            raise invalid(f"{param}[{index}].type", f"{part.type!r} is not supported, text is")
        lines.append(part.shown(f"{param}[{index}]"))
    return "\n".join(lines)


def variables_excess(variables: dict[str, Any]) -> str:
    """Return the bound that a chat template's variables are beyond, in words; empty: none."""
    if len(variables) > MAX_TEMPLATE_VARIABLES:
        return f"at most {MAX_TEMPLATE_VARIABLES} variables, not {len(variables)}"
    if len(to_json(variables)) > MAX_VARIABLE_BYTES:
        return f"at most {MAX_VARIABLE_BYTES} bytes of JSON"
    return ""


def _few_variables(value: Any) -> Any:
    if isinstance(value, dict) and (found := variables_excess(value)):
        raise PydanticCustomError("too_long", found)
    return value


TemplateVariables = Annotated[
    dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES), BeforeValidator(_few_variables)
]
"""Variables of the chat template's own that a client sets."""
