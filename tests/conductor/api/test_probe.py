"""canitoolcall's probe of a live server finds nothing amiss, where the model calls as it is asked to."""

import asyncio
import json

import pytest

probing = pytest.importorskip("canitoolcall.probe", reason="the package canitoolcall is not installed")

from base.request import FinishReason  # noqa: E402
from conductor.api.parsing.families import FORMS  # noqa: E402
from tests.conductor.fakes import MODEL, serving, spoken  # noqa: E402

EVENT = {
    "title": "Design review",
    "attendees": [{"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}],
    "location": {"city": "Berlin", "room": "4.12"},
}
NOTE = {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"}
CALLS = {
    "single-call": [("get_weather", {"city": "Paris"})],
    "parallel-calls": [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Tokyo"})],
    "nested-args": [("create_event", EVENT)],
    "unicode-args": [("save_note", NOTE)],
    "empty-args": [("get_server_time", {})],
    "reasoning-then-call": [("record_answer", {"answer": "9.9"})],
}
TEXTS = {"no-call": "42", "tool-result-followup": "It is 18 degrees and clear."}


def written(name, arguments):
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def answer(scenario):
    """Return what a model of Hermes' family writes."""
    if scenario.id == "forced-tool-choice":  # a grammar holds it to this form
        return '[{"name": "get_weather", "arguments": {"city": "Lisbon"}}]'
    if scenario.id in TEXTS:
        return TEXTS[scenario.id]
    thought = "<think>\n9.90 is more than 9.11.\n</think>\n\n" if scenario.id.startswith("reasoning") else ""
    return thought + "\n".join(written(*call) for call in CALLS[scenario.id])


@pytest.mark.parametrize("per_step", [1, 7])
async def test_all_its_scenarios_pass_whole_and_streamed_alike(tooled, per_step):
    assert tooled.family == "hermes" in FORMS

    def script(request):
        prompt = tooled.tokenizer.decode(request.token_ids, skip_special_tokens=False)
        scenario = max(
            probing.BUILTIN_SCENARIOS,
            key=lambda each: len(each.messages[0]["content"]) * (each.messages[0]["content"] in prompt),
        )
        return spoken(tooled, answer(scenario), FinishReason.STOP, per_step)

    async with serving(tooled, script) as api:
        report = await asyncio.to_thread(probing.probe, f"{api.url}/v1", MODEL)
    assert len(report.outcomes) == 3 * len(probing.BUILTIN_SCENARIOS)
    assert not [
        (each.scenario, each.stream, each.detail) for each in report.outcomes if each.status != "pass"
    ]
