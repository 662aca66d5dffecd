"""Grammars over a model's tokens: what may come, when an answer may end, and what is no grammar."""

import json
from pathlib import Path

import numpy as np
import pytest
from jsonschema import validate

from base.errors import ConfigError, InvalidRequestError
from base.grammar import MaskFiller, Vocabulary, lark_of
from base.request import Grammar, GrammarKind, StopParams
from tests.conductor.fakes import byte_level_tokenizer, write_model_folder

END, OTHER = 0, 2
TOKENIZER = byte_level_tokenizer()
VOCAB_SIZE = 300  # some are padding, without a token
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["he", "world"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX, LARK = GrammarKind.REGEX, GrammarKind.LARK


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Vocabulary:
    return Vocabulary.load(write_model_folder(tmp_path_factory.mktemp("model")), VOCAB_SIZE)


def schema(value) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def begun(vocabulary, grammar, min_tokens=0, stop=(END,)):
    return vocabulary.constraint(grammar, StopParams(100, min_tokens, stop))


def allowed(constraint) -> set[int]:
    masks = np.zeros((1, constraint.vocabulary.num_words), np.int32)
    MaskFiller(1).fill([constraint], masks)
    return set(np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist())


def allowed_after(vocabulary, grammar, text, **fields) -> set[int]:
    constraint = begun(vocabulary, grammar, **fields)
    constraint.follow(tokens(text))
    return allowed(constraint)


def test_only_what_the_grammar_goes_on_with_is_allowed(vocabulary):
    assert allowed_after(vocabulary, Grammar(REGEX, "h(e|y)"), "") == set(tokens("h") + tokens("he"))
    assert allowed_after(vocabulary, Grammar(REGEX, "he(l|y)x"), "he") == set(tokens("l") + tokens("y"))


def test_an_answer_may_end_where_the_grammar_says_so_and_nowhere_else(vocabulary):
    grammar = Grammar(REGEX, "he(l|y)?")
    assert END not in allowed_after(vocabulary, grammar, "h")
    assert END in allowed_after(vocabulary, grammar, "he")
    assert allowed_after(vocabulary, grammar, "hey") == {END}


def test_the_tokens_that_end_an_answer_are_those_of_the_request(vocabulary):
    grammar = Grammar(REGEX, "he")
    assert allowed_after(vocabulary, grammar, "he", stop=(OTHER,)) == {OTHER}
    assert allowed_after(vocabulary, grammar, "he", stop=(END, OTHER)) == {END, OTHER}
    assert allowed_after(vocabulary, grammar, "he", stop=()) == set()


def test_an_end_is_held_back_until_the_least_number_of_tokens_unless_nothing_else_is_left(vocabulary):
    grammar = Grammar(REGEX, "h+")
    assert END not in allowed_after(vocabulary, grammar, "hh", min_tokens=3)
    assert END in allowed_after(vocabulary, grammar, "hhh", min_tokens=3)
    assert allowed_after(vocabulary, Grammar(REGEX, "hh"), "hh", min_tokens=3) == {END}


def test_any_path_through_a_schema_is_valid_json_of_it(vocabulary):
    for seed in range(20):
        rng, constraint, path = np.random.default_rng(seed), begun(vocabulary, schema(PERSON)), []
        while len(path) < 400 and (found := sorted(allowed(constraint))) != [END] and END not in found:
            path.append(int(rng.choice(found)))
            constraint.follow(path[-1:])
        found = json.loads(TOKENIZER.decode(path))
        validate(found, PERSON)
        assert found["name"] in PERSON["properties"]["name"]["enum"]


def test_the_state_is_a_function_of_the_tokens_so_far(vocabulary):
    text = tokens('{"name":"world","age":1')
    at_once, one_by_one = (begun(vocabulary, schema(PERSON)) for _ in range(2))
    at_once.follow(text)
    for token_id in text:
        allowed(one_by_one)
        one_by_one.follow([token_id])
    assert allowed(at_once) == allowed(one_by_one)


def test_a_token_that_ends_the_answer_is_the_last_that_is_followed(vocabulary):
    constraint = begun(vocabulary, Grammar(REGEX, "he"))
    constraint.follow([*tokens("he"), END, *tokens("he")])
    assert (constraint.is_over, constraint.error, constraint.num_tokens) == (True, "", 2)


def test_a_token_outside_of_the_grammar_is_an_error_and_not_an_exception(vocabulary):
    constraint = begun(vocabulary, Grammar(REGEX, "he"))
    constraint.follow(tokens("x"))
    assert "after 1 tokens" in constraint.error
    assert len(allowed(constraint)) == constraint.vocabulary.num_words * 32


def test_masks_of_several_sequences_are_those_of_each(vocabulary):
    constraints = [begun(vocabulary, Grammar(REGEX, text)) for text in ("he", "world", "h+", "l")]
    alone = [allowed(item) for item in constraints]
    constraints[1].follow([*tokens("world"), END])
    masks = np.zeros((6, vocabulary.num_words), np.int32)
    MaskFiller(2).fill(constraints, masks)
    together = [
        set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()) for row in masks
    ]
    assert [together[row] for row in (0, 2, 3)] == [alone[row] for row in (0, 2, 3)]
    assert len(together[1]) == vocabulary.num_words * 32
    assert together[4:] == [set(), set()]


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar(REGEX, "(a"), "unclosed group"),
        (Grammar(LARK, "start: other"), 'unknown name: "other"'),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type":'), "EOF"),
        (schema({"type": "horse"}), "Invalid type: horse"),
        (schema({"type": "array", "minItems": 5, "maxItems": 1}), ""),
        (Grammar(REGEX, "a" * 200_000), "at most"),
        (Grammar(REGEX, "\ud800"), "surrogates"),
    ],
)
def test_what_is_no_grammar_is_refused_with_what_is_wrong(vocabulary, grammar, words):
    with pytest.raises(InvalidRequestError) as refused:
        begun(vocabulary, grammar)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 400


def test_schemas_cannot_loosen_what_is_checked(vocabulary):
    """`x-guidance` in a schema would have the library leave out what it cannot check."""
    for name in ("lenient", "coerce_one_of"):
        with pytest.raises(InvalidRequestError):
            begun(
                vocabulary,
                schema(
                    {"x-guidance": {name: True}, "not": {"type": "string"}, "oneOf": [{}, {"type": "null"}]}
                ),
            )


def test_white_space_does_not_go_on_for_ever(vocabulary):
    constraint = begun(vocabulary, schema(PERSON))
    constraint.follow(tokens("{\n"))
    for _ in range(32):
        assert set(tokens(" ")) <= allowed(constraint)
        constraint.follow(tokens(" "))
    assert allowed(constraint) == set(tokens('"'))


def test_grammars_in_both_notations_are_one(vocabulary):
    gbnf = lark_of(Grammar(LARK, 'root ::= "he" word*\nword ::= "l" | "w"'))
    assert allowed_after(vocabulary, gbnf, "he") == {END, *tokens("l"), *tokens("ll"), *tokens("w")}
    lark = Grammar(LARK, 'start: "he" word*\nword: "l" | "w"')
    assert lark_of(lark) == lark
    with pytest.raises(InvalidRequestError, match="notation"):
        lark_of(Grammar(LARK, "root ::= ((("))


def test_few_grammars_are_kept_and_those_used_last(tmp_path):
    vocabulary = Vocabulary.load(write_model_folder(tmp_path), VOCAB_SIZE)
    grammars = [Grammar(REGEX, f"h{{{count}}}") for count in range(1, 70)]
    for grammar in grammars:
        vocabulary.compile(grammar)
        vocabulary.compile(grammars[0])
    assert grammars[0] in vocabulary
    assert grammars[-1] in vocabulary
    assert sum(grammar in vocabulary for grammar in grammars) == 64


def test_long_grammars_are_kept_up_to_a_bound_of_their_characters(tmp_path):
    vocabulary = Vocabulary.load(write_model_folder(tmp_path), VOCAB_SIZE)
    grammars = [schema({"const": f"{count}", "description": "x" * 100_000}) for count in range(12)]
    for grammar in grammars:
        vocabulary.compile(grammar)
    assert [grammar in vocabulary for grammar in grammars] == [False] * 2 + [True] * 10


def test_a_folder_without_a_usable_tokenizer_is_named(tmp_path):
    for text in (None, "{}", '{"added_tokens": [], "model": {"vocab": {"a": 0}}}', "no json"):
        if text is not None:
            (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ConfigError, match=r"tokenizer\.json: grammars cannot be had"):
            Vocabulary.load(Path(tmp_path), 10)
