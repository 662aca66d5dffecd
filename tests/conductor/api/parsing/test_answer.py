import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.api.parsing.answer import AnswerParser
from conductor.api.parsing.events import MAX_CALL_DEPTH, Called, Said, Thought
from conductor.api.parsing.families import FORMS, family_of
from tests.conductor.api.parsing.answers import ANSWERS, BETWEEN, SCHEMAS, Answer, parsed

EVERY_ANSWER = pytest.mark.parametrize(
    "answer", ANSWERS, ids=lambda answer: f"{answer.family}-{answer.text[:20]!r}"
)


@EVERY_ANSWER
def test_an_answer_is_taken_apart(answer: Answer) -> None:
    assert parsed(answer, [answer.text]) == answer.events


@EVERY_ANSWER
def test_where_pieces_end_changes_nothing(answer: Answer) -> None:
    text = answer.text
    assert parsed(answer, list(text)) == answer.events
    for at in range(len(text) + 1):
        assert parsed(answer, [text[:at], text[at:]]) == answer.events, at


@EVERY_ANSWER
def test_a_call_that_was_cut_off_is_none(answer: Answer) -> None:
    calls = [event for event in answer.events if isinstance(event, Called)]
    for at in range(len(answer.text)):
        events = parsed(answer, [answer.text[:at]], is_cut=True)
        found = [event for event in events if isinstance(event, Called)]
        assert found == calls[: len(found)], at


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_text_in_any_pieces_is_taken_apart_in_one_way(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(sorted(FORMS)))
    marks = [*FORMS[family].marks, *'{}"\\[]<a \n=:>()', *BETWEEN]
    parts = data.draw(st.lists(st.sampled_from(marks), max_size=30))
    text = "".join(parts)
    answer = Answer(family, text, [], data.draw(st.booleans()))
    is_cut = data.draw(st.booleans())
    whole = parsed(answer, [text], is_cut)
    assert parsed(answer, list(text), is_cut) == whole
    assert parsed(answer, parts, is_cut) == whole


@settings(deadline=None)
@given(st.sampled_from(sorted(FORMS)), st.text("abc .\n", max_size=40))
def test_text_without_marks_is_the_answer(family: str, text: str) -> None:
    events = parsed(Answer(family, text, []), list(text))
    assert "".join(event.text for event in events if isinstance(event, Said)) in (text, text.lstrip())
    assert not any(isinstance(event, Called | Thought) for event in events)


@pytest.mark.parametrize("family", sorted(FORMS))
def test_text_is_handed_on_at_once(family: str) -> None:
    parser = AnswerParser(FORMS[family], SCHEMAS)
    assert parser.push("Hello") == [Said("Hello")]
    assert parser.push(", you") == [Said(", you")]


@pytest.mark.parametrize("depth", [MAX_CALL_DEPTH + 1, 50_000])
def test_arguments_that_are_too_deep_are_text(depth: int) -> None:
    for answer in (
        Answer("hermes", '<tool_call>{"name": "say", "arguments": {"text": ' + "[" * depth, []),
        Answer("llama4", "[say(text=" + "[" * depth + "]" * depth + ")]", []),
        Answer("gemma", "<|tool_call>call:say{text:" + "[" * depth + "]" * depth + "}<tool_call|>", []),
        Answer(
            "glm",
            f"<tool_call>say<arg_key>tags</arg_key><arg_value>{'[' * depth}</arg_value></tool_call>",
            [],
        ),
    ):
        events = parsed(answer, [answer.text])
        if answer.family == "glm":
            assert events == [Called("say", f'{{"tags": "{"[" * depth}"}}')]
        else:
            assert events == [Said(answer.text)]


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ '<|channel|>analysis<|message|>' }}", "gpt-oss"),
        ("'<tool_call>\\n<function=' + name", "qwen-xml"),
        ("<tool_call>{name}<arg_key>", "glm"),
        ("<tool_call>", "hermes"),
        ("[TOOL_CALLS] <think>", "mistral-think-text"),
        ("[TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜>", "deepseek-v3"),
        ("<|im_start|>user", ""),
    ],
)
def test_a_family_is_known_by_its_template(template: str, family: str) -> None:
    assert family_of(template) == family
