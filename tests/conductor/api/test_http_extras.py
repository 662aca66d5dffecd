"""What browsers, probes and tools ask of the HTTP listener beside the API itself."""

import threading

import httpx
import pytest

from conductor.api import routes
from tests.conductor.fakes import MODEL, serving, spoken

CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
ELSEWHERE = "https://elsewhere.example"


def answering(model):
    return lambda request: spoken(model, "hi")


async def test_the_description_is_served_and_names_the_routes_it_stands_beside(model):
    async with serving(model, answering(model)) as api, httpx.AsyncClient(base_url=api.url) as client:
        described = (await client.get("/openapi.json")).json()
    assert described["openapi"].startswith("3.")
    assert {CHAT, "/health", "/openapi.json"} <= described["paths"].keys()


async def test_nobody_waits_while_the_description_is_made(model, monkeypatch):
    """It takes 80 ms, and needs no key."""
    makers = []
    monkeypatch.setattr(routes, "openapi", lambda: makers.append(threading.get_ident()) or {})
    routes.openapi_json.cache_clear()
    try:
        async with serving(model, answering(model)) as api, httpx.AsyncClient(base_url=api.url) as client:
            for _ in range(2):
                assert (await client.get("/openapi.json")).json() == {}
    finally:
        routes.openapi_json.cache_clear()
    assert len(makers) == 1
    assert threading.get_ident() not in makers


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/version", "/ui", "/openapi.json"])
async def test_what_is_read_may_be_asked_for_without_its_body(model, path):
    async with serving(model, answering(model)) as api, httpx.AsyncClient(base_url=api.url) as client:
        head, whole = await client.head(path), await client.get(path)
    assert (head.status_code, head.content, whole.status_code) == (200, b"", 200)
    assert head.headers["content-type"] == whole.headers["content-type"]


async def test_the_root_leads_to_the_page(model):
    async with serving(model, answering(model)) as api, httpx.AsyncClient(base_url=api.url) as client:
        answer = await client.get("/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/ui")


@pytest.mark.parametrize(
    ("origin", "media_type", "status"),
    [
        (ELSEWHERE, "text/plain", 403),
        (ELSEWHERE, "application/x-www-form-urlencoded", 403),
        (ELSEWHERE, "", 403),
        ("null", "text/plain", 403),
        (ELSEWHERE, "application/json", 200),
        (ELSEWHERE, "Application/JSON; charset=utf-8", 200),
        ("own", "text/plain", 200),
        (None, "text/plain", 200),
    ],
)
async def test_a_body_that_a_page_of_elsewhere_sent_unasked_is_refused(model, origin, media_type, status):
    async with serving(model, answering(model)) as api, httpx.AsyncClient(base_url=api.url) as client:
        headers = {"content-type": media_type}
        if origin is not None:
            headers["origin"] = api.url if origin == "own" else origin
        answer = await client.post(CHAT, json=HELLO, headers=headers)
        assert answer.status_code == status
        assert len(api.dispatcher.requests) == (status == 200)


PREFLIGHT = {"origin": ELSEWHERE, "access-control-request-method": "POST"}


async def test_pages_of_elsewhere_may_not_call_unless_they_are_named(model):
    async with serving(model, answering(model)) as api, httpx.AsyncClient(base_url=api.url) as client:
        asked = await client.options(CHAT, headers=PREFLIGHT)
    assert "access-control-allow-origin" not in asked.headers


async def test_pages_of_origins_that_are_named_may_call(model):
    server = {"cors_origins": (ELSEWHERE,)}
    async with (
        serving(model, answering(model), server=server) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        headers = {**PREFLIGHT, "access-control-request-headers": "authorization, content-type"}
        asked = await client.options(CHAT, headers=headers)
        answer = await client.post(CHAT, json=HELLO, headers={"origin": ELSEWHERE})
        other = await client.options(CHAT, headers={**headers, "origin": "https://other.example"})
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == ELSEWHERE
    assert answer.headers["access-control-allow-origin"] == ELSEWHERE
    assert other.status_code == 400
