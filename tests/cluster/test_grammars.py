"""Answers of a form, from a whole cluster: prefill, hand-off, decode."""

import json
import re

import httpx
import pytest
from jsonschema import validate

from tests.cluster.asking import PATIENCE_S

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "languages": {"type": "array", "items": {"enum": ["de", "en", "fr"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Describe Ada Lovelace as JSON."}]
ASK = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 120, "temperature": 0}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.fixture
def client(cluster):
    with httpx.Client(base_url=cluster.url, timeout=PATIENCE_S) as opened:
        yield opened


def answer(client, **fields):
    reply = client.post("/v1/chat/completions", json={**ASK, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def test_an_answer_of_a_schema_is_valid_and_ends_by_itself(client):
    choice = answer(client, response_format=FORM)
    validate(json.loads(choice["message"]["content"]), PERSON)
    assert choice["finish_reason"] == "stop"


def test_an_answer_cut_by_length_says_so(client):
    choice = answer(client, response_format=FORM, max_tokens=5)
    assert choice["finish_reason"] == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice["message"]["content"])


def test_a_stream_says_the_same(client):
    whole = answer(client, response_format=FORM)["message"]["content"]
    body = {**ASK, "response_format": FORM, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
    pieces = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    assert "".join(pieces) == whole


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_regex": r"[A-Z][a-z]+ \d{4}"}, r"[A-Z][a-z]+ \d{4}"),
        ({"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c")+ "."'}}, r"a[bc]+\."),
    ],
)
def test_other_forms_are_kept_too(client, fields, pattern):
    choice = answer(client, temperature=1.0, seed=3, **fields)
    assert choice["finish_reason"] == "length" or re.fullmatch(pattern, choice["message"]["content"])


def test_choices_and_logprobs_go_with_a_form(client):
    reply = client.post(
        "/v1/chat/completions",
        json={**ASK, "response_format": FORM, "n": 3, "temperature": 1, "seed": 5, "logprobs": True},
    ).json()
    for choice in reply["choices"]:
        assert choice["logprobs"]["content"]
        if choice["finish_reason"] == "stop":
            validate(json.loads(choice["message"]["content"]), PERSON)
