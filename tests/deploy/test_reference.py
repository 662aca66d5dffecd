"""The API reference names every path of the server, and every field with what the sources say of it."""

import random
from types import SimpleNamespace

import httpx
import pytest

from base.clock import SystemClock
from base.metrics import process_registry
from base.request import SamplingParams, Slo
from conductor.api.http_api import HttpApi
from conductor.api.routes import ROUTES, openapi
from tests.deploy.generators import loaded

reference = loaded("generate_api").reference


async def test_every_path_of_it_is_answered():
    model = SimpleNamespace(name="m", max_model_len=8, sampling=SamplingParams())
    registry = process_registry()
    metrics = SimpleNamespace(registry=registry)
    completions = SimpleNamespace(model=model, is_ready=True, metrics=metrics, clock=SystemClock())
    reports = {route.path: lambda *name: {"of": name} for route in ROUTES if route.handler is None}
    app = HttpApi(completions, Slo(), 1, random.Random(0), reports)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://conductor") as client:
        for path, methods in openapi()["paths"].items():
            for method in methods.keys() - {"post"}:
                answer = await client.request(method.upper(), path.replace("{name}", "m"))
                assert answer.status_code in (200, 307), path


def test_a_report_that_no_path_waits_for_is_refused():
    with pytest.raises(KeyError):
        HttpApi(
            SimpleNamespace(model=None, clock=SystemClock()), Slo(), 1, random.Random(0), {"/nowhere": dict}
        )


def test_every_reference_of_the_openapi_leads_somewhere():
    told = openapi()

    def references(value):
        if isinstance(value, dict):
            yield from [value["$ref"]] if "$ref" in value else []
            for each in value.values():
                yield from references(each)
        elif isinstance(value, list):
            for each in value:
                yield from references(each)

    names = {reference.rpartition("/")[2] for reference in references(told)}
    assert names
    assert names <= told["components"]["schemas"].keys()


def test_comments_beside_and_above_a_field_are_told():
    text = reference()
    assert "| `optional uint32 num_logprobs` | 8 | absent: none; 0: the sampled token's alone |" in text
    assert "| `repeated Reserve reserve` | 2 |" in text
    assert "honoured; the request id, if any, is echoed." in text
    assert "| `n` | integer from 1 to 128 |" in text
    assert "Grant grant" in text
