"""The API reference names every path of the server, and every field with what the sources say of it."""

import random
from types import SimpleNamespace

from base.request import Slo
from conductor.api.openai import openai_app
from conductor.api.served_model import SamplingDefaults
from deploy.reference import ROUTES, openapi, reference

REPORTED = ("/status", "/v1/explain", "/v1/explain/{name}", "/v1/links/{name}", "/v1/panels")
REPORTS = {path: dict for path in (*REPORTED, "/v1/panels/{name}")}


def test_every_route_of_the_server_is_in_it():
    model = SimpleNamespace(name="m", max_model_len=8, sampling=SamplingDefaults())
    app = openai_app(SimpleNamespace(model=model), Slo(), 1, random.Random(0), REPORTS)
    served = {
        (method.lower(), route.path.replace(":path", ""))
        for route in app.routes
        for method in route.methods - {"HEAD"}
        if not route.path.startswith("/ui/")  # what the page is made of
    }
    assert {(route.method, route.path) for route in ROUTES} == served


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
