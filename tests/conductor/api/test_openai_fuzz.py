"""No body makes the server fail: it is answered, or refused by what is wrong with it."""

import asyncio
import json
import random

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from base.clock import SystemClock
from base.metrics import ConductorMetrics, process_registry
from base.request import Slo
from conductor.api.completion import Completions
from conductor.api.http_api import HttpApi
from conductor.api.openai_schema import ChatBody, CompletionBody
from tests.conductor.fakes import MODEL, ScriptedDispatcher, spoken

numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 2**31, 2**64, 1e308]))
scalars = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=10,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "nobody"]), "content": values}
    ),
    max_size=3,
)


def bodies(schema, **known):
    fields = st.sampled_from(sorted(schema.model_fields))
    return st.builds(
        lambda some, base: {**some, **base},
        st.dictionaries(fields, values, max_size=4),
        st.fixed_dictionaries(known),
    )


@pytest.fixture(scope="module")
def client(model):
    """Posts to the application itself; returns the status and the error, if it is one."""
    with asyncio.Runner() as runner:

        async def start():
            dispatcher = ScriptedDispatcher(lambda request: spoken(model, "hi"))
            metrics = ConductorMetrics(process_registry(), MODEL)
            completions = Completions(model, dispatcher, metrics, SystemClock(), max_calls=9)
            app = HttpApi(completions, Slo(), 1 << 20, random.Random(1))
            return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://conductor")

        session = runner.run(start())

        def post(path, body):
            answer = runner.run(session.post(path, content=json.dumps(body)))
            is_json = answer.headers["content-type"] == "application/json"
            return answer.status_code, answer.json().get("error") if is_json else None

        yield post


@pytest.mark.parametrize(
    ("path", "bodies"),
    [
        ("/v1/chat/completions", bodies(ChatBody, messages=st.one_of(messages, values))),
        ("/v1/chat/completions", bodies(ChatBody, messages=st.just([{"role": "user", "content": "x"}]))),
        ("/v1/completions", bodies(CompletionBody, prompt=values)),
        ("/v1/completions", bodies(CompletionBody, prompt=st.just("x"))),
    ],
    ids=["any messages", "any option of a chat", "any prompt", "any option of a completion"],
)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_body_is_answered_or_refused(client, path, bodies, data):
    body = data.draw(bodies)
    status, error = client(path, body)
    assert status in (200, 400, 404), (body, error)
    assert (error is None) == (status == 200)
