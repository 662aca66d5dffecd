"""Grammars that would harm whoever compiles them have an answer, and harm nobody."""

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from base.errors import InvalidRequestError, RejectedError
from base.request import Grammar, GrammarKind
from bench.hostile_grammars import CHATS, hostile_grammars
from conductor.api import grammar_checker
from conductor.api.grammar_checker import GrammarChecker
from tests.conductor.fakes import MODEL, serving, spoken, write_model_folder

REGEX = GrammarKind.REGEX
GRAMMARS = [Grammar(REGEX, f"a{{{count}}}") for count in range(1, 9)]


@pytest.fixture
async def checker(tmp_path):
    made = GrammarChecker(write_model_folder(tmp_path), 263)
    yield made
    await made.close()


async def test_each_hostile_grammar_has_its_status_and_no_node_hears_of_those_refused(model):
    cases = hostile_grammars()
    assert len(cases) >= 24
    async with (
        serving(model, lambda request: spoken(model, "a"), max_body_mib=12) as api,
        httpx.AsyncClient(base_url=api.url, timeout=120) as client,
    ):
        for case in cases:
            before = len(api.dispatcher.requests)
            answer = await client.post(
                CHATS, content=case.body(MODEL), headers={"content-type": "application/json"}
            )
            assert answer.status_code == case.status, f"{case.name}: {answer.text[:300]}"
            assert len(api.dispatcher.requests) - before == (case.status == 200), case.name
            assert len(answer.content) < 2_000, case.name
        good = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "guided_regex": "a+"}
        assert (await client.post(CHATS, json=good)).status_code == 200


async def test_a_grammar_is_tried_once_however_many_ask_for_it(checker):
    asked = [checker.checked(GRAMMARS[0], "x") for _ in range(20)]
    assert await asyncio.gather(*asked) == [GRAMMARS[0]] * 20
    await checker.checked(GRAMMARS[0], "x")
    assert checker.num_tried == 1


async def test_refusals_are_kept_too_and_name_the_field_of_who_asks(checker):
    for param in ("one", "two"):
        with pytest.raises(InvalidRequestError, match=f"{param}: .*unclosed") as refused:
            await checker.checked(Grammar(REGEX, "(a"), param)
        assert refused.value.param == param
    assert checker.num_tried == 1


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (
            {"properties": {"a": {"items": {"type": "string", "pattern": "("}}}},
            "x: properties.a.items: .*unclosed",
        ),
        ({"anyOf": [{"type": "null"}, {"type": "objekt"}]}, r"x: anyOf\[1\]: .*objekt"),
        ({"$defs": {"b": {"type": "objekt"}}, "$ref": "#/$defs/b"}, r"x: \$defs.b: .*objekt"),
        ({"type": "objekt", "default": {"type": "objekt"}}, "x: Invalid type"),
    ],
)
async def test_the_place_of_a_schemas_fault_is_told(checker, schema, told):
    with pytest.raises(InvalidRequestError, match=f"^{told}"):
        await checker.checked(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), "x")


async def test_the_place_of_a_fault_is_looked_for_within_bounds(checker):
    wide = {"properties": {f"p{at}": {"type": "string", "pattern": f"a{{{at}}}"} for at in range(2_000)}}
    wide["properties"]["last"] = {"type": "objekt"}
    with pytest.raises(InvalidRequestError, match="Invalid type: objekt"):
        await checker.checked(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(wide)), "x")


async def test_who_leaves_while_a_grammar_is_tried_takes_nothing_along(checker):
    leaving = asyncio.create_task(checker.checked(GRAMMARS[0], "x"))
    staying = asyncio.create_task(checker.checked(GRAMMARS[1], "x"))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == GRAMMARS[1]
    assert checker.num_tried == 2


async def test_more_grammars_than_may_wait_are_rejected(checker, monkeypatch):
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 4)
    results = await asyncio.gather(*(checker.checked(item, "x") for item in GRAMMARS), return_exceptions=True)
    assert results[:4] == GRAMMARS[:4]
    assert all(isinstance(error, RejectedError) for error in results[4:])


@pytest.mark.parametrize("least", [0, grammar_checker.LEAST_CHARS])
async def test_answers_are_kept_up_to_a_bound(checker, monkeypatch, least):
    """A short grammar is charged with what its objects take."""
    monkeypatch.setattr(grammar_checker, "LEAST_CHARS", least)
    monkeypatch.setattr(grammar_checker, "MAX_KEPT_CHARS", 60 + len(GRAMMARS) * least)
    for grammar in GRAMMARS:
        await checker.checked(grammar, "x")
    await checker.checked(GRAMMARS[-1], "x")
    assert checker.num_tried == len(GRAMMARS)
    await checker.checked(GRAMMARS[0], "x")
    assert checker.num_tried == len(GRAMMARS) + 1


async def test_a_process_that_is_killed_is_started_again(checker):
    await checker.checked(GRAMMARS[0], "x")
    first = checker.pid
    os.kill(first, signal.SIGKILL)
    assert await checker.checked(GRAMMARS[0], "x") == GRAMMARS[0], "it is known"
    assert await checker.checked(GRAMMARS[1], "x") == GRAMMARS[1]
    assert checker.pid != first


async def test_a_model_without_a_usable_tokenizer_says_so(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    checker = GrammarChecker(tmp_path, 10)
    with pytest.raises(InvalidRequestError, match="grammars cannot be had"):
        await checker.checked(GRAMMARS[0], "x")
    await checker.close()
