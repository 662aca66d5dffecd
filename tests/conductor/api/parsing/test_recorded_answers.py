"""The recorded answers of canitoolcall 0.1.1: nine families of models, judged by its own checks."""

import random

import pytest

canitoolcall = pytest.importorskip(
    "canitoolcall.fixtures", reason="the package canitoolcall is not installed"
)

from canitoolcall.checks import case_status, run_checks  # noqa: E402
from canitoolcall.fixtures import Family, Fixture, load_families, load_fixtures  # noqa: E402
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status  # noqa: E402

from conductor.api.parsing.answer import AnswerParser  # noqa: E402
from conductor.api.parsing.events import Called, Said, Thought  # noqa: E402
from conductor.api.parsing.families import FORMS  # noqa: E402

FAMILIES = load_families()
FORM_OF = {"qwen3-hermes": "hermes", "qwen3-xml": "qwen-xml", "gemma4": "gemma"}
FORM_OF_MODEL = {
    "Llama-3": "llama3",
    "Llama-4": "llama4",
    "Magistral-Small-2506": "mistral-think-text",
    "DeepSeek-V3-": "deepseek-v3",
    "DeepSeek-V3.1": "deepseek-v3",
    "DeepSeek-V3.2": "deepseek-v3.2",
    "DeepSeek-V4-": "deepseek-v4",
    "DeepSeek-V4.1": "deepseek-v4.1",
    "Kimi-K2": "kimi-k2",
    "Kimi-K3": "kimi-k3",
}
MISSES = {
    "gemma4/sglang-text-before-call": "keeps white space before a call, which others of gemma4 drop",
    "gemma4/sglang-text-around-call": "the same",
}
"""The answers that we take apart differently, and why."""


def form_of(fixture: Fixture) -> str:
    model = fixture.reference_model
    found = next((form for name, form in FORM_OF_MODEL.items() if name in model), "")
    return found or FORM_OF.get(fixture.family, fixture.family)


def result(fixture: Fixture, family: Family, pieces: list[str]) -> ParseResult:
    form = FORMS[form_of(fixture)]
    prompt = fixture.generation_prompt
    if prompt is None:
        prompt = family.reference_for(fixture.reference_model).default_generation_prompt or ""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in fixture.tools}
    parser = AnswerParser(form, schemas, bool(form.think) and prompt.rstrip().endswith(form.think[0]))
    events = [event for piece in pieces for event in parser.push(piece)]
    events += parser.finish(is_cut=fixture.truncated)
    return ParseResult(
        content="".join(event.text for event in events if isinstance(event, Said)) or None,
        reasoning_content="".join(event.text for event in events if isinstance(event, Thought)) or None,
        tool_calls=tuple(
            ParsedToolCall(name=event.name, arguments_raw=event.arguments)
            for event in events
            if isinstance(event, Called)
        ),
    )


def in_pieces(text: str, seed: int) -> list[str]:
    rng, pieces = random.Random(seed), []
    while text:
        count = rng.randint(1, 12)
        pieces.append(text[:count])
        text = text[count:]
    return pieces


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_answers_are_taken_apart_as_they_should_be_however_they_are_split(family: str) -> None:
    missed = {}
    for fixture in load_fixtures():
        if fixture.family != family:
            continue
        text = fixture.raw_output
        streams = {f"seed-{seed}": in_pieces(text, seed) for seed in range(3)} | {"characters": list(text)}
        observed = Observation(
            nonstream=result(fixture, FAMILIES[family], [text]),
            streams={name: result(fixture, FAMILIES[family], pieces) for name, pieces in streams.items()},
        )
        rows = run_checks(fixture, FAMILIES[family], observed)
        if case_status(rows) is not Status.PASS:
            missed[fixture.id] = [row for row in rows if row.status is not Status.PASS][:1]
    assert missed.keys() == {name for name in MISSES if name.startswith(f"{family}/")}, missed


def test_all_469_are_there() -> None:
    assert len(load_fixtures()) == 469
