"""The fields by which a client says what form an answer must have, and the grammar that they mean.

    response_format       OpenAI's: any JSON object, or one of a schema
    structured_outputs    vLLM's: a schema, a regular expression, a choice or a grammar
    guided_...            vLLM's older names of the same

A schema is a value of the body here and JSON from here on: what compiles it, on whatever process, reads that.
It is written down while the body is read, so of a long body off the event loop.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError, to_json

from base.errors import InvalidRequestError, invalid
from base.request import MAX_GRAMMAR_CHARS, Grammar, GrammarKind
from conductor.api.strict_body import StrictBody, required

MAX_CHOICE_TEXTS = 4_096
MAX_SCHEMA_KEYS = 4_096
"""Members of a schema itself; those within are bounded with its length."""
JSON_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
"""The grammar of any JSON object."""


class AskedGrammar(NamedTuple):
    """A grammar, and the field that a client gave it in, for errors."""

    grammar: Grammar
    param: str


def json_schema(schema: Any) -> Grammar:
    """Return the grammar of JSON that is valid by `schema`; raises ValueError for what JSON cannot say."""
    source = to_json(schema)
    if b"NaN" in source or b"Infinity" in source:
        # numbers, or texts that read so
        json.dumps(schema, allow_nan=False)
    return Grammar(GrammarKind.JSON_SCHEMA, source.decode())


def choice_grammar(texts: list[str], param: str) -> AskedGrammar:
    """Return the grammar of an answer that is one of these texts.

    Raises InvalidRequestError, before it copies any, where they are longer together than a grammar may be.
    """
    num_chars = sum(map(len, texts))
    if num_chars > MAX_GRAMMAR_CHARS:
        raise invalid(param, f"at most {MAX_GRAMMAR_CHARS} characters, not {num_chars}")
    grammar = Grammar(
        GrammarKind.LARK, "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    )
    return AskedGrammar(grammar, param)


def _schema_text(value: Any) -> Any:
    """Return a schema as JSON; a text is taken to be that already."""
    if isinstance(value, dict) and len(value) > MAX_SCHEMA_KEYS:
        raise PydanticCustomError("too_long", f"at most {MAX_SCHEMA_KEYS} members, not {len(value)}")
    try:
        text = value if isinstance(value, str) else json_schema(value).source
    except ValueError:
        raise PydanticCustomError("schema", "it has a number that JSON cannot say") from None
    return _short(text)


def _short(text: Any) -> Any:
    if isinstance(text, str) and len(text) > MAX_GRAMMAR_CHARS:
        raise PydanticCustomError("too_long", f"at most {MAX_GRAMMAR_CHARS} characters, not {len(text)}")
    return text


_SchemaForms = Annotated[dict[str, Any], Field(max_length=MAX_SCHEMA_KEYS)] | bool | str
SchemaText = Annotated[str, BeforeValidator(_schema_text, json_schema_input_type=_SchemaForms)]
_Source = Annotated[str, BeforeValidator(_short)]
_Choice = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICE_TEXTS, fail_fast=True)]


class _NamedSchema(StrictBody):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: SchemaText | None = Field(default=None, alias="schema")


class ResponseFormat(StrictBody):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    named: _NamedSchema | None = Field(default=None, alias="json_schema")

    def asked(self) -> AskedGrammar | None:
        """Return the grammar that is meant; raises InvalidRequestError where a schema is wanted."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return AskedGrammar(JSON_OBJECT, "response_format")
        param = "response_format.json_schema.schema"
        source = required(self.named.json_schema if self.named is not None else None, param)
        return AskedGrammar(Grammar(GrammarKind.JSON_SCHEMA, source), param)


class StructuredOutputs(StrictBody):
    """vLLM's `structured_outputs`."""

    schema_text: SchemaText | None = Field(default=None, alias="json")
    regex: _Source | None = None
    choice: _Choice | None = None
    grammar: _Source | None = None
    json_object: bool | None = None
    structural_tag: None = None


class GrammarFields(StrictBody):
    """The fields of a body that say what form the answer must have."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaText | None = None
    guided_regex: _Source | None = None
    guided_choice: _Choice | None = None
    guided_grammar: _Source | None = None

    def asked_grammar(self) -> AskedGrammar | None:
        """Return the one grammar that the body asks for; raises InvalidRequestError if there are two."""
        if self.model_fields_set.isdisjoint(GRAMMAR_FIELDS):
            return None
        asked = [item for item in self._all_asked() if item is not None]
        if len(asked) > 1:
            first, second = asked[0].param, asked[1].param
            raise InvalidRequestError(f"{first} and {second}: an answer has one form; leave one out", second)
        return asked[0] if asked else None

    def _all_asked(self) -> list[AskedGrammar | None]:
        outputs = self.structured_outputs or StructuredOutputs()
        under = "structured_outputs."
        return [
            self.response_format.asked() if self.response_format is not None else None,
            _written(GrammarKind.JSON_SCHEMA, outputs.schema_text, f"{under}json"),
            _written(GrammarKind.REGEX, outputs.regex, f"{under}regex"),
            _written(GrammarKind.LARK, outputs.grammar, f"{under}grammar"),
            choice_grammar(outputs.choice, f"{under}choice") if outputs.choice else None,
            AskedGrammar(JSON_OBJECT, f"{under}json_object") if outputs.json_object else None,
            _written(GrammarKind.JSON_SCHEMA, self.guided_json, "guided_json"),
            _written(GrammarKind.REGEX, self.guided_regex, "guided_regex"),
            _written(GrammarKind.LARK, self.guided_grammar, "guided_grammar"),
            choice_grammar(self.guided_choice, "guided_choice") if self.guided_choice else None,
        ]


GRAMMAR_FIELDS = frozenset(GrammarFields.model_fields)


def _written(kind: GrammarKind, source: str | None, param: str) -> AskedGrammar | None:
    return AskedGrammar(Grammar(kind, source), param) if source is not None else None
