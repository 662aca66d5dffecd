"""Schemas that cannot be followed become narrower ones: every value of theirs is valid by the first."""

import json

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from base.errors import InvalidRequestError
from base.grammar import MaskFiller, Vocabulary
from base.request import Grammar, GrammarKind, StopParams
from conductor.api.grammar_process import tried
from conductor.api.schema_narrowing import CannotNarrowError, narrowed
from tests.conductor.fakes import byte_level_tokenizer, write_model_folder

TOKENIZER = byte_level_tokenizer()
END = 0
NAMES = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}}
OBJECT = {"type": "object", "properties": NAMES, "additionalProperties": False}
ARRAY = {"type": "array", "items": {"type": "integer"}}

NARROWED = {
    "format": {"type": "string", "format": "html-selector"},
    "not type": {"not": {"type": ["object", "array", "string"]}},
    "not required": {**OBJECT, "not": {"required": ["a", "b"]}},
    "not const": {"type": ["string", "integer"], "not": {"const": "hello"}},
    "not a bound": {"type": "integer", "not": {"minimum": 5}},
    "not a length": {"type": "string", "not": {"maxLength": 3}},
    "not not": {"not": {"not": OBJECT}},
    "not any of": {
        "type": ["string", "null", "boolean"],
        "not": {"anyOf": [{"type": "null"}, {"minLength": 2}]},
    },
    "not all of": {"type": "integer", "not": {"allOf": [{"minimum": 3}, {"maximum": 9}]}},
    "not properties": {**OBJECT, "required": ["a"], "not": {"properties": {"a": {"minimum": 10}}}},
    "not items": {**ARRAY, "not": {"items": {"minimum": 0}}},
    "not an anchor": {
        "$defs": {"few": {"$anchor": "few", "maximum": 3}},
        "type": "integer",
        "not": {"$ref": "#few"},
    },
    "not a reference": {"$defs": {"few": {"maximum": 3}}, "type": "integer", "not": {"$ref": "#/$defs/few"}},
    "one of": {**OBJECT, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "one of, overlapping": {"type": "integer", "oneOf": [{"minimum": 3}, {"maximum": 9}]},
    "if": {**OBJECT, "required": ["c"], "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "if, else": {"type": "integer", "if": {"minimum": 10}, "then": {"maximum": 20}, "else": {"maximum": -5}},
    "dependencies": {**OBJECT, "required": ["a"], "dependencies": {"a": ["b"], "c": ["a"]}},
    "dependent schemas": {**OBJECT, "required": ["a"], "dependentSchemas": {"a": {"required": ["c"]}}},
    "contains": {**ARRAY, "contains": {"minimum": 100}, "minContains": 2},
    "at most so many": {"type": "array", "contains": {"type": "integer"}, "maxContains": 2},
    "least properties": {**OBJECT, "minProperties": 2},
    "most properties": {**OBJECT, "maxProperties": 1, "required": ["b"]},
    "values": {"enum": [1, 5, "x", None], "not": {"type": "integer", "minimum": 3}},
    "values of all": {
        "allOf": [{"enum": [{"a": 1}, {"a": 2}]}, {"not": {"properties": {"a": {"const": 1}}}}]
    },
    "a way that cannot be": {"type": "string", "anyOf": [{"not": {"pattern": "a"}}, {"maxLength": 4}]},
    "deep inside": {"type": "object", "properties": {"x": {"not": {"type": "object"}}}, "required": ["x"]},
}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Vocabulary:
    return Vocabulary.load(write_model_folder(tmp_path_factory.mktemp("model")), 263)


def answer(vocabulary: Vocabulary, grammar: Grammar, seed: int) -> str | None:
    """Return a random text of a grammar, None if it did not come to its end."""
    rng, constraint = np.random.default_rng(seed), vocabulary.constraint(grammar, StopParams(1, 0, (END,)))
    masks, said = np.zeros((1, vocabulary.num_words), np.int32), []
    for _ in range(300):
        MaskFiller(1).fill([constraint], masks)
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
        # Bytes of ASCII and the end: others make texts longer, and nothing else.
        plain = [token for token in allowed.tolist() if token == END or TOKENIZER.decode([token]).isascii()]
        closing = [token for token in plain if TOKENIZER.decode([token]) in tuple('"}],:')]
        token = int(rng.choice(closing if closing and rng.random() < 0.5 else plain))
        if token == END:
            return TOKENIZER.decode(said)
        said.append(token)
        constraint.follow([token])
    return None


@pytest.mark.parametrize("name", NARROWED)
def test_what_a_narrower_schema_allows_is_valid_by_the_first(vocabulary, name):
    schema = NARROWED[name]
    asked = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    with pytest.raises(InvalidRequestError):
        vocabulary.compile(asked)
    grammar = tried(vocabulary, asked)
    found = [text for seed in range(12) if (text := answer(vocabulary, grammar, seed)) is not None]
    assert found
    for text in found:
        Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "not": {"pattern": "a"}},
        {"not": {}},
        {"oneOf": [{"pattern": "a"}, {"pattern": "b"}, {"pattern": "c"}], "type": "string"},
        {"type": "array", "prefixItems": [{}], "contains": {"type": "integer"}},
        {"not": {"$ref": "#/not"}},
        {"not": {"$ref": "elsewhere.json"}},
        {"not": {"$ref": "#/nowhere"}},
    ],
)
def test_what_no_rule_helps_is_refused_as_it_was(vocabulary, schema):
    asked = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    with pytest.raises(InvalidRequestError) as first:
        vocabulary.compile(asked)
    with pytest.raises(InvalidRequestError) as second:
        tried(vocabulary, asked)
    assert str(first.value) == str(second.value)


def test_what_can_be_followed_is_left_as_it_is(vocabulary):
    asked = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**OBJECT, "required": ["a"]}))
    assert tried(vocabulary, asked) is asked


@pytest.mark.parametrize(
    "schema", [[], "x", 5, {"properties": 3, "not": 7}, {"allOf": 3, "not": {"type": 9}}]
)
def test_what_is_no_schema_is_no_crash(schema):
    with pytest.raises((CannotNarrowError, TypeError, AttributeError)):
        narrowed(schema, lambda _: True)
