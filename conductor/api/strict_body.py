"""The base of every body that a client sends, and of its parts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError, to_json

from base.errors import InvalidRequestError

Value = TypeVar("Value")

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
